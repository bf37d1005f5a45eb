"""`monitor.on_overheat=move`: when the rank asks the run to stop, and why it stays. Slurm is played by scripts."""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path

import pytest

from hpc_trainer.observe.sampler import Mover, move_of
from hpc_trainer.observe.telemetry import DeviceWarning, Trouble
from hpc_trainer.record.journal import Journal, num_moves, read_move, write_move
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.reading import Faults
from hpc_trainer.record.states import RunState
from hpc_trainer.runtime.rank_env import RankEnv
from hpc_trainer.runtime.stop import DEVICE, StopFlag
from tests.unit.slurm.fake_slurm import FakeSlurm

ENV = RankEnv(
    rank=3, local_rank=1, world_size=4, local_world_size=2, node_rank=1, num_nodes=2, launcher="slurm", job_id="101_0",
    restart_count=0, node="n7",
)  # fmt: skip
HOT = DeviceWarning(
    rank=3, trouble=Trouble.slowed, node="n7", device="H100 GPU-a", detail="hw_thermal", since=1.0, last=2.0, seconds=9
)
NO_NODE = "allocation failure: Requested node configuration is not available"


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "sweep" / "r")
    paths.telemetry.mkdir(parents=True)
    Journal(paths).start(0, job_id="101_0", restart_count=0, node="n6", pid=os.getpid(), executor="slurm", world_size=4)
    return paths


def _play(fake: FakeSlurm, excluded: str = "(null)", *, refusal: str = "") -> None:
    (fake.bin / "scontrol").write_text(
        f"#!/bin/sh\necho \"scontrol $*\" >> '{fake.folder}/calls'\n"
        f"case \"$1\" in\nshow) echo 'JobId=101 JobState=RUNNING ExcNodeList={excluded} Command=(null)' ;;\n"
        "write) printf '#!/bin/sh\\n#SBATCH --nodes=2\\n' ;;\nesac\n"
    )
    (fake.bin / "sbatch").write_text(
        f"#!/bin/sh\necho \"sbatch $*\" >> '{fake.folder}/calls'\ncat > '{fake.folder}/asked'\n"
        + (f"echo '{refusal}' >&2; exit 1\n" if refusal else "echo 'to start at 2026-01-01T00:00:00' >&2\n")
    )
    fake.forget_calls()


def test_a_run_that_can_go_elsewhere_is_asked_to_stop_once(paths: RunPaths, fake_slurm: FakeSlurm) -> None:
    _play(fake_slurm, "n[1-2]")
    flag = StopFlag()
    mover = Mover(paths, ENV, 0, flag)
    mover(HOT)
    assert flag.signal_name == DEVICE
    move = read_move(paths, 0)
    assert move is not None
    assert (move.node, move.cause) == ("n7", "overheated")
    assert (
        move.text
        == "overheated, it leaves n7: the GPU of rank 3 on n7 lowers its clocks (hw_thermal, for 9 s): H100 GPU-a"
    )
    assert fake_slurm.calls("sbatch") == ["sbatch --test-only --array=0 --exclude=n[1-2],n7"]
    assert "--nodes=2" in (fake_slurm.folder / "asked").read_text(), "it is asked of the job's own script"
    mover(HOT)
    assert len(fake_slurm.calls("sbatch")) == 1


@pytest.mark.parametrize("trouble", [Trouble.ecc, Trouble.xid, Trouble.lost])
def test_a_device_that_fails_has_a_cause_of_its_own(trouble: Trouble, paths: RunPaths, fake_slurm: FakeSlurm) -> None:
    _play(fake_slurm)
    Mover(paths, ENV, 2, StopFlag())(dataclasses.replace(HOT, trouble=trouble))
    move = read_move(paths, 2)
    assert move is not None
    assert move.cause == "device_failed"
    assert fake_slurm.calls("sbatch") == ["sbatch --test-only --array=0 --exclude=n7"]


def test_it_stays_where_slurm_would_not_start_it_and_asks_again_later(
    paths: RunPaths, fake_slurm: FakeSlurm, caplog: pytest.LogCaptureFixture
) -> None:
    _play(fake_slurm, refusal=NO_NODE)
    flag, now = StopFlag(), [0.0]
    mover = Mover(paths, ENV, 0, flag, lambda: now[0])
    with caplog.at_level(logging.WARNING):
        for now[0] in (0.0, 5.0, 599.0):
            mover(HOT)
    assert (flag.is_set, read_move(paths, 0)) == (False, None)
    assert len(fake_slurm.calls("sbatch")) == 1
    (said,) = [each.getMessage() for each in caplog.records]
    assert "The run continues on this node: without n7 Slurm would not start it" in said
    assert NO_NODE in said
    _play(fake_slurm)  # a drained node is back
    now[0] = 600.0
    mover(HOT)
    assert flag.signal_name == DEVICE


def test_a_full_queue_says_nothing_against_a_job_that_is_in_it(paths: RunPaths, fake_slurm: FakeSlurm) -> None:
    _play(fake_slurm, refusal="sbatch: error: QOSMaxSubmitJobPerUserLimit")
    flag = StopFlag()
    Mover(paths, ENV, 0, flag)(HOT)
    assert flag.is_set


def test_three_moves_are_enough(paths: RunPaths, fake_slurm: FakeSlurm, caplog: pytest.LogCaptureFixture) -> None:
    _play(fake_slurm)
    journal = Journal(paths)
    for attempt, cause in enumerate(("overheated", "preempted", "device_failed", "overheated")):
        assert num_moves(paths) < 3
        journal.end(attempt, state=RunState.REQUEUED, cause=cause, action="requeue")
        journal.start(
            attempt + 1, job_id="101_0", restart_count=attempt + 1, node="n6", pid=1, executor="slurm", world_size=4
        )
    flag = StopFlag()
    with caplog.at_level(logging.WARNING):
        Mover(paths, ENV, 4, flag)(HOT)
    assert not flag.is_set
    assert "it has left 3 nodes since it was submitted" in caplog.text
    assert fake_slurm.calls() == []
    journal.end(4, state=RunState.FAILED, cause="exception")
    journal.start(5, job_id="202_0", restart_count=0, node="n6", pid=1, executor="slurm", world_size=4)
    Mover(paths, dataclasses.replace(ENV, job_id="202_0"), 5, flag)(HOT)
    assert flag.is_set, "a person has submitted it again"


def test_outside_slurm_it_stays(paths: RunPaths, fake_slurm: FakeSlurm) -> None:
    flag = StopFlag()
    Mover(paths, dataclasses.replace(ENV, job_id="local-7"), 0, flag)(HOT)
    assert (flag.is_set, fake_slurm.calls()) == (False, [])


def test_a_damaged_move_is_a_fault(paths: RunPaths) -> None:
    write_move(paths, 0, move_of(HOT))
    assert read_move(paths, 0) is not None
    for text in ('{"node": "n7"}', "no"):
        paths.move(0).write_text(text)
        faults = Faults()
        assert read_move(paths, 0, faults) is None
        assert len(faults) == 1
