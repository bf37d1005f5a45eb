"""A run that ends while it is looked at: between the read of its folder and the answer of who should know."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

import pytest

from hpc_trainer.cli import grid_verbs
from hpc_trainer.cli.live import watch
from hpc_trainer.errors import RunStateError
from hpc_trainer.launch.freeze import freeze_grid
from hpc_trainer.operate.control import cancel_runs
from hpc_trainer.operate.results import result_table
from hpc_trainer.operate.why import explain
from hpc_trainer.record import run_state
from hpc_trainer.record.journal import Journal, Story
from hpc_trainer.record.processes import process_name
from hpc_trainer.record.reading import Faults
from hpc_trainer.record.run_status import RunStatus
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from hpc_trainer.record.submissions import read_submissions
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm


@pytest.fixture
def sweep(tmp_path: Path, fake_slurm: FakeSlurm) -> SweepOnDisk:
    """A run at work, which ends well in the moment in which squeue is asked."""
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(1, "cluster=slurm"))
    sweep.submit()
    sweep.start(resumed=0)
    sweep.beat(step=199, loss=0.5)
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "500_0|COMPLETED|0:0|n1\n")
    _meanwhile(fake_slurm, f"""
        echo '{{"step": 200, "metrics": {{"eval_accuracy": 0.9}}}}' > "{sweep.run().result}"
        echo '{{}}' > "{sweep.run().marker("DONE")}"
    """)  # fmt: skip
    return sweep


def _meanwhile(fake: FakeSlurm, lines: str) -> None:
    """What happens elsewhere while squeue is asked."""
    script = fake.bin / "squeue"
    script.write_text(script.read_text().replace("#!/bin/sh\n", f"#!/bin/sh\n{lines}\n", 1))


def _only(sweep: SweepOnDisk) -> RunStatus:
    (run,) = read_status(sweep.paths).runs
    return run


@pytest.mark.parametrize("is_whole_sweep", [True, False], ids=["sweep", "run"])
def test_a_folder_that_goes_away_while_slurm_is_asked_tells_nothing(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, is_whole_sweep: bool
) -> None:
    """A mount that is gone for a moment: what Slurm calls COMPLETED has not failed to begin."""
    gone = sweep.paths.folder if is_whole_sweep else sweep.run().folder
    _meanwhile(fake_slurm, f'mv "{gone}" "{gone}.away"')
    if is_whole_sweep:
        with pytest.raises(RunStateError, match="was there a moment ago and is not now"):
            read_status(sweep.paths)
        return
    run = _only(sweep)
    assert run.state is RunState.UNKNOWN, run.cause
    assert "its folder was there a moment ago" in str(run.cause)
    assert not sweep.paths.ends.exists()


def test_a_run_that_ends_while_slurm_is_asked_is_complete(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    run = _only(sweep)
    assert (run.state, run.step, run.metrics) == (RunState.COMPLETED, 200, {"eval_accuracy": 0.9})
    assert fake_slurm.calls("sacct") == [], "its folder settles it: nobody else is asked"


def test_who_waits_for_it_leaves_without_an_error(
    sweep: SweepOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is still among the open ones of that look."""
    monkeypatch.setenv("HPC_TRAINER_RUNS", str(tmp_path / "runs"))
    status = read_status(sweep.paths)
    assert list(status.open_runs) == [sweep.specs[0].run_id]
    grid = freeze_grid(["cluster=local", "sweep_name=sweep"])
    grid_verbs._exit_by_outcome(dataclasses.replace(grid, specs=sweep.specs), status, quiet=True)


def test_every_verb_sees_it_complete(sweep: SweepOnDisk) -> None:
    marker = sweep.run().marker("DONE")

    def again() -> None:
        marker.unlink()
        sweep.run().result.unlink()

    status = read_status(sweep.paths)
    assert [row["state"] for row in result_table(status).rows] == ["COMPLETED"]
    assert explain(status, status.runs[0]).state is RunState.COMPLETED
    again()
    assert cancel_runs(status, read_status(sweep.paths).runs) == []
    again()
    assert watch(sweep.paths, {sweep.specs[0].run_id}, quiet=True).counts == {"COMPLETED": 1}


def test_a_run_that_fails_while_slurm_is_asked_says_why(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    end = {
        "event": "end", "attempt": 0, "time": time.time(), "state": "FAILED", "cause": "exception",
        "error": {"type": "ValueError", "message": "no such label"},
    }  # fmt: skip
    _meanwhile(fake_slurm, f"echo '{json.dumps(end)}' >> '{sweep.run().journal(0)}'; exec cat {_header(fake_slurm)}")
    run = _only(sweep)
    assert (run.state, run.reason) == (RunState.FAILED, "ValueError: no such label")


def _header(fake: FakeSlurm) -> Path:
    return fake.folder / "squeue.out"


def test_a_run_whose_successor_appears_while_slurm_is_asked_waits(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    intent = {
        "event": "intent", "kind": "successor", "uuid": "f" * 32, "executor": "slurm", "hardware": "cpu_x1",
        "run_ids": [sweep.specs[0].run_id], "time": time.time(), "after": read_submissions(sweep.paths)[-1].uuid,
    }  # fmt: skip
    answer = {"event": "confirmed", "uuid": "f" * 32, "job_id": "501", "time": time.time()}
    lines = f"{json.dumps(intent)}\\n{json.dumps(answer)}\\n"
    path = sweep.run().submissions
    _meanwhile(fake_slurm, f"umask 077; printf '{lines}' > '{path}'; exec cat {_header(fake_slurm)}")
    run = _only(sweep)
    assert (run.state, run.job_id) == (RunState.PENDING, "501")


def test_a_squeue_that_takes_its_time_makes_no_young_job_an_old_one(
    tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was young when squeue was asked may not show in its answer, however long the answer took."""
    young = SweepOnDisk(tmp_path / "runs" / "young", make_specs(1, "cluster=slurm"))
    young.submit(age_s=20)
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "")
    real, taken = time.time, []

    def late() -> float:
        return real() + (60 if (fake_slurm.folder / "asked").exists() else 0)

    _meanwhile(fake_slurm, 'touch "$(dirname "$0")/../asked"')
    monkeypatch.setattr(time, "time", late)
    taken.append(_only(young).state)
    assert taken == [RunState.PENDING]


@pytest.mark.usefixtures("no_slurm")
@pytest.mark.parametrize("started", [False, True])
def test_a_local_run_that_ends_while_its_process_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: bool
) -> None:
    """The same on this machine: the folder first, then its processes, which are gone."""
    local = SweepOnDisk(tmp_path / "runs" / "local", make_specs(1))
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    name = process_name(child.pid)
    local.submit(name, "local", age_s=60)
    if started:
        local.start(executor="local", job_id="local-1", pid=child.pid)
    real = run_state.is_alive

    def is_alive(process: str) -> bool | None:
        if child.poll() is None:  # the rest of its life, between the look at its folder and this one
            child.communicate(b"\n")
            if not started:
                local.start(executor="local", job_id="local-1", pid=child.pid)
            local.done(eval_accuracy=0.9)
        return real(process)

    monkeypatch.setattr(run_state, "is_alive", is_alive)
    assert _only(local).state is RunState.COMPLETED


@pytest.mark.parametrize("executor", ["slurm", "local"])
def test_a_run_that_is_done_after_its_folder_was_listed(
    tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    """The journal says that it is complete; DONE was written before that, and after the listing."""
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(1, "cluster=slurm"))
    sweep.submit(process_name() if executor == "local" else "500", executor=executor)
    sweep.start(resumed=0, executor=executor)
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "")
    read = Journal.read_story

    def read_late(journal: Journal, faults: Faults | None = None, names: Collection[str] | None = None) -> Story:
        if not sweep.run().marker("DONE").exists():
            sweep.done()
            sweep.end(state=RunState.COMPLETED, cause="done", step=200, saved_step=200)
        return read(journal, faults, names)

    monkeypatch.setattr(Journal, "read_story", read_late)
    (run,) = read_status(sweep.paths).runs
    assert (run.state, run.cause) == (RunState.COMPLETED, "done")
