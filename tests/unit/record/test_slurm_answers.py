"""How often Slurm is asked about the runs of a sweep, and what a missing row means."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from hpc_trainer.record.run_status import RunStatus
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from tests.unit.record.builders import make_spec, make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm

S = RunState


@pytest.fixture
def sweep(tmp_path: Path, fake_slurm: FakeSlurm) -> SweepOnDisk:
    """A run that was submitted an hour ago as 500_0; Slurm knows nothing."""
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "")
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(1, "cluster=slurm"))
    sweep.submit()
    return sweep


def _one(sweep: SweepOnDisk) -> RunStatus:
    (run,) = read_status(sweep.paths).runs
    return run


def test_200_runs_are_one_squeue_and_one_sacct(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    spec = make_spec("cluster=slurm")
    many = [dataclasses.replace(spec, run_id=f"{spec.run_id}-{number}") for number in range(200)]
    sweep = SweepOnDisk(tmp_path / "runs" / "big", many)
    sweep.submit()
    queue = "".join(f"500_{index}|RUNNING|n{index}|None|x\n" for index in range(100))
    ends = "".join(f"500_{index}|FAILED|1:0|n1\n" for index in range(100, 200))
    fake_slurm.answer("squeue", queue)
    fake_slurm.answer("sacct", ends)
    status = read_status(sweep.paths)
    assert status.counts == {"RUNNING": 100, "FAILED": 100}
    assert [call.split()[0] for call in fake_slurm.calls()] == ["squeue", "sacct"]
    assert fake_slurm.calls("sacct")[0].endswith("-j 500")
    assert status.runs[7].node == "n7"
    assert status.has_active


def test_several_submissions_are_one_sacct(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    sweep = SweepOnDisk(tmp_path / "runs" / "two", make_specs(1, "cluster=slurm"))
    sweep.submit("500")
    sweep.specs = [make_spec("cluster=slurm", seed=9)]
    other = SweepOnDisk(tmp_path / "runs" / "other", sweep.specs)
    sweep.paths.specs.write_text(sweep.paths.specs.read_text() + other.paths.specs.read_text())
    sweep.submit("600")
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "500_0|FAILED|1:0|n1\n600_0|TIMEOUT|0:0|n1\n")
    assert [run.state for run in read_status(sweep.paths).runs] == [S.FAILED, S.TIMEOUT]
    assert fake_slurm.calls("sacct")[0].endswith("-j 500,600")


@pytest.mark.parametrize("row", ["500_[0-4%2]|CANCELLED|0:0|", "500|CANCELLED|0:0|", "500_1|COMPLETED|0:0|n7"])
def test_an_element_without_a_row_was_cancelled_before_it_began(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, row: str
) -> None:
    """An element that begins gets a row of its own. The array may have one row for all that did not begin."""
    monkeypatch.setattr("hpc_trainer.record.slurm_answers.LATE_ROW_S", 0.0)
    fake_slurm.answer("sacct", f"{row}\n")
    run = _one(sweep)
    assert (run.state, run.cause) == (S.CANCELLED, "cancelled before it began")
    num_looks = 2 if row.startswith("500_1") else 1
    assert len(fake_slurm.calls("squeue")) == len(fake_slurm.calls("sacct")) == num_looks
    assert _one(sweep).state is S.CANCELLED
    assert len(fake_slurm.calls("sacct")) == num_looks + 1, "the end is recorded: one look suffices from now on"


def test_an_element_whose_row_comes_late_was_not_cancelled(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by a campaign (lustre_flock, seed 116): a running element was in neither answer for 2.4 s."""

    really_sleep = time.sleep

    def begin(seconds: float) -> None:
        if seconds > 2.4:
            fake_slurm.answer("squeue", "500_0|RUNNING|n7||x\n")
        else:
            really_sleep(seconds)  # subprocess waits for squeue

    monkeypatch.setattr("hpc_trainer.record.slurm_answers.time.sleep", begin)
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "500_1|COMPLETED|0:0|n7\n")
    assert _one(sweep).state is S.RUNNING
    assert not list(sweep.paths.ends.glob("*")), "nothing false is recorded"


def test_an_element_that_has_begun_was_not_cancelled_before(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    sweep.start(resumed=0, age_s=300)
    fake_slurm.answer("sacct", "500_1|COMPLETED|0:0|n7\n")
    assert _one(sweep).state is S.FAILED
