"""A rank that hangs: the run ends, every rank's stacks are in its log, and no process is left."""

from __future__ import annotations

import os
import re
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from hpc_trainer.observe.flight import read_flights
from hpc_trainer.record.layout import RunPaths

if TYPE_CHECKING:
    from tests.integration.conftest import LocalDriver

# Rank 1 stands still in its 6th batch; or fails there, while rank 0 is busy with something of its own.
DATA = """
import os, time
from hpc_trainer.config.schema.data import DigitsConfig
from hpc_trainer.training.data.digits import build as digits

class Standing:
    def __init__(self, inner, how):
        self._inner, self._how, self._calls = inner, how, 0
        self.input_shape, self.num_classes = inner.input_shape, inner.num_classes
    def __len__(self):
        return len(self._inner)
    def __getitems__(self, indices):
        self._calls += 1
        rank = os.environ["SUBMITIT_LOCAL_GLOBALID"]
        if self._calls == 6 and rank == "1" and self._how == "hangs":
            wait_for_a_disk_that_is_gone()
        if self._calls == 6 and rank == "1" and self._how in ("fails", "breaks"):
            raise RuntimeError("rank one is broken")
        if self._calls == 6 and rank == "0" and self._how == "fails":
            time.sleep(300)
        return self._inner.__getitems__(indices)

def wait_for_a_disk_that_is_gone():
    time.sleep(300)

def build(split, how):
    return Standing(digits(DigitsConfig(), split), how) if split == "train" else digits(DigitsConfig(), split)
"""
WORDS = (
    "experiment=digits", "cluster=local", "hardware=cpu_x2", "model=mlp", "train.num_steps=50", "data=custom",
    "data._target_=standing.build", "data.num_workers=0", "monitor.watchdog_s=25", "monitor.heartbeat_every_s=0",
)  # fmt: skip


def _ended(local: LocalDriver, how: str) -> float:
    """Seconds from the last step to the end of the run's processes."""
    (local.folder / "standing.py").write_text(DATA)
    done = local.run(
        "submit", *WORDS, f"+data.kwargs.how={how}", f"sweep_name={how}", "--trust", "standing", "--wait", check=False
    )
    ended = time.time()
    assert done.returncode == 1, (done.stdout, done.stderr, local.logs())
    left = [p for p in psutil.process_iter(["cmdline"]) if str(local.folder) in str(p.info["cmdline"])]
    ranks = [p for p in left if p.pid != os.getpid() and "--run" in p.info["cmdline"]]
    # The run has failed when its first rank has left; another one still writes its stacks then (STACKS_S).
    assert not psutil.wait_procs(ranks, timeout=10)[1]
    return ended - (local.run_folder(how) / "heartbeat.json").stat().st_mtime


@pytest.mark.dist
def test_a_hung_rank_ends_with_all_stacks(local: LocalDriver) -> None:
    assert _ended(local, "hangs") < 25 + 15
    (run,) = local.json("status", "hangs")["runs"]
    assert (run["state"], run["cause"]) == ("FAILED", "stuck")
    ledger = local.json("why", run["run_id"])["ledger"]
    assert ledger["seconds"]["hang"] > 20, ledger
    assert ledger["seconds"]["rendezvous"] > 0
    assert sum(ledger["seconds"].values()) == pytest.approx(ledger["elapsed_s"], abs=0.01)
    logs = {rank: next(local.run_folder("hangs").glob(f"logs/*.rank-{rank}.log")).read_text() for rank in (0, 1)}
    assert "in wait_for_a_disk_that_is_gone" in logs[1]
    assert "in target_shares" in logs[0], "where it waits for the other's count of targets"
    assert all("watchdog: " in text for text in logs.values())
    assert "no sign of life" in local.run("status", "hangs").stdout
    flights = read_flights(RunPaths(local.run_folder("hangs")), 0)
    assert [*flights] == [0, 1], "both have written, whoever left first"
    assert any(flight.why.startswith("no sign of life") for flight in flights.values())
    assert [[each.name for each in flight.collectives if each.is_open] for flight in flights.values()] == [
        ["all_reduce"], [],
    ]  # fmt: skip
    why = local.run("why", "hangs").stdout
    entered = r"rank 1 on \S+ never entered the \d+\w\w collective \(all-reduce, 8 bytes, step 6\), in which rank 0 on"
    assert re.search(entered, why)
    assert re.search(r"waited: it waited for data for \d+ s, at standing.py:\d+ in wait_for_a_disk_that_is_gone", why)


@pytest.mark.long
@pytest.mark.dist
def test_a_failing_rank_ends_one_that_is_busy(local: LocalDriver) -> None:
    """No srun here: the busy rank looks for itself."""
    assert _ended(local, "fails") < 10
    assert "rank one is broken" in local.run("status", "fails").stdout
    flights = read_flights(RunPaths(local.run_folder("fails")), 0)
    assert {rank: flight.error for rank, flight in flights.items()} == {0: None, 1: "RuntimeError"}
    assert len(flights[0].collectives) == len(flights[1].collectives) > 10, "both stood in a batch"
    assert "standing.py" in str(flights[0].frame)


@pytest.mark.long
@pytest.mark.dist
def test_of_a_failing_rank_and_of_those_that_wait_for_it_there_are_records(local: LocalDriver) -> None:
    _ended(local, "breaks")
    flights = read_flights(RunPaths(local.run_folder("breaks")), 0)
    assert flights[1].error == "RuntimeError"
    # On a busy machine its watchdog may see the failure before its connection breaks.
    assert flights[0].error in ("PeerLostError", None)
    assert [each.is_open for each in flights[0].collectives][-2:] == [False, True]
    assert all(len(flight.collectives) > 10 and flight.spans for flight in flights.values())
    why = local.run("why", "breaks").stdout
    entered = r"rank 1 on \S+ never entered the \d+\w\w collective \(all-reduce, 8 bytes, step 6\), in which rank 0 on"
    assert re.search(entered + r" \S+ waited: it ended with RuntimeError, at standing.py:\d+", why)
