"""A look at a sweep of which every run has ended asks nothing of Slurm: a controller that is down costs 30 s."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_trainer.operate.control import cancel_runs
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from hpc_trainer.record.submissions import write_waiting
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm

S = RunState


@pytest.fixture
def sweep(tmp_path: Path, fake_slurm: FakeSlurm) -> SweepOnDisk:
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(2, "cluster=slurm"))
    sweep.submit()
    fake_slurm.answer("squeue", error="Unable to contact slurm controller", code=1)
    return sweep


def _asks(sweep: SweepOnDisk, fake_slurm: FakeSlurm, *, is_look: bool = True) -> int:
    fake_slurm.forget_calls()
    read_status(sweep.paths, is_look=is_look)
    return len(fake_slurm.calls("squeue"))


def test_cancelled_before_they_began(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    for index in range(2):
        sweep.run(index)
        sweep.mark("CANCEL", index)
    assert _asks(sweep, fake_slurm) == 0
    status = read_status(sweep.paths, is_look=True)
    assert (status.counts, status.notes) == ({"CANCELLED": 2}, [])
    assert _asks(sweep, fake_slurm, is_look=False) == 1, "who acts has to know what is in the queue"


def test_cancelled_in_the_sweeps_own_queue(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    sweep = SweepOnDisk(tmp_path / "runs" / "waits", make_specs(1, "cluster=slurm"))
    sweep.paths.scripts.mkdir()
    write_waiting(sweep.paths, [sweep.specs[0].run_id], "MaxSubmitJobs is 1", None)
    assert _asks(sweep, fake_slurm) == 1
    sweep.run()
    sweep.mark("CANCEL")
    assert _asks(sweep, fake_slurm) == 0


def test_one_that_was_cancelled_at_work_is_asked_about_until_it_says_its_end(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm
) -> None:
    sweep.start(0)
    for index in range(2):
        sweep.run(index)
        sweep.mark("CANCEL", index)
    assert _asks(sweep, fake_slurm) == 1
    sweep.end(0, state=S.CANCELLED, cause="cancelled")
    assert _asks(sweep, fake_slurm) == 0


@pytest.mark.parametrize(("age_s", "asks"), [(10.0, 1), (3000.0, 0)])
def test_a_failure_may_be_requeued_by_hand_for_a_while(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, age_s: float, asks: int
) -> None:
    for index in range(2):
        sweep.start(index, age_s=age_s + 20)
        sweep.end(index, state=S.FAILED, cause="exception", age_s=age_s)
    assert _asks(sweep, fake_slurm) == asks
    assert read_status(sweep.paths, is_look=True).counts == {"FAILED": 2}


def test_an_end_that_only_the_accounting_told(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "500_0|TIMEOUT|0:0|n1\n500_1|NODE_FAIL|0:0|n1\n")
    before = read_status(sweep.paths, is_look=True).counts
    assert before == {"TIMEOUT": 1, "NODE_FAIL": 1}
    fake_slurm.answer("squeue", error="Unable to contact slurm controller", code=1)
    assert _asks(sweep, fake_slurm) == 1
    monkeypatch.setattr("hpc_trainer.record.slurm_answers.OVER_S", -1.0)
    assert _asks(sweep, fake_slurm) == 0
    assert read_status(sweep.paths, is_look=True).counts == before


def test_complete_runs_with_a_damaged_ledger(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    sweep.paths.scripts.mkdir()
    sweep.paths.submissions.write_text("x\n")
    for index in range(2):
        sweep.start(index)
        sweep.done(index)
    assert _asks(sweep, fake_slurm) == 0


def test_a_lost_line_may_be_of_a_job_that_has_a_failed_run_again(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    sweep.paths.scripts.mkdir()
    for index in range(2):
        sweep.start(index, age_s=3020)
        sweep.end(index, state=S.FAILED, cause="exception", age_s=3000)
    assert _asks(sweep, fake_slurm) == 0
    with sweep.paths.submissions.open("a") as file:
        file.write("x\n")
    assert _asks(sweep, fake_slurm) == 1


def test_a_run_at_work_is_asked_about(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    sweep.run(0)
    sweep.mark("CANCEL", 0)
    assert _asks(sweep, fake_slurm) == 1


def test_a_second_cancel_still_finds_the_job(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    for index in range(2):
        sweep.run(index)
        sweep.mark("CANCEL", index)
    fake_slurm.answer("squeue", "500_0|PENDING||Priority|x\n500_1|PENDING||Priority|x\n")
    status = read_status(sweep.paths)
    cancel_runs(status, status.runs)
    assert fake_slurm.calls("scancel") == ["scancel --quiet 500_[0-1]"]
