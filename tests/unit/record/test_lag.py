"""A scheduler that is behind: squeue and sacct tell of yesterday, and nothing is guessed, failed or submitted twice."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_trainer.errors import SilentError
from hpc_trainer.record.files import write_json
from hpc_trainer.record.journal import Journal
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.run_status import RunStatus
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from hpc_trainer.record.submissions import read_ledger
from tests.unit.launch.grids import make_grid, submit
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm

ROW = "{job}|{state}|0:0|n1\n"


def _only(paths: SweepPaths) -> RunStatus:
    (run,) = read_status(paths).runs
    return run


def test_a_squeue_that_is_behind_hides_no_submission(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    (spec,) = make_specs(1, "cluster=slurm")
    grid = make_grid(tmp_path / "runs" / "sweep", [spec])
    paths = SweepPaths(tmp_path / "runs" / "sweep")
    fake_slurm.answer("sacct", "")
    fake_slurm.lag()
    submit(grid)
    assert _only(paths).state is RunState.PENDING
    submit(grid)
    assert len(fake_slurm.calls("sbatch")) == 1
    fake_slurm.catch_up()
    run = _only(paths)
    assert (run.state, run.job_id) == (RunState.PENDING, "101_0")


def test_a_lost_answer_and_a_squeue_that_is_behind(
    tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch took the job, and its answer got lost: only squeue knows, and not yet. Never a second job."""
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        fake_slurm.catch_up()

    monkeypatch.setattr("hpc_trainer.launch.settle.time", SimpleNamespace(time=time.time, sleep=wait))
    (spec,) = make_specs(1, "cluster=slurm")
    grid = make_grid(tmp_path / "runs" / "sweep", [spec])
    paths = SweepPaths(tmp_path / "runs" / "sweep")
    fake_slurm.answer("sacct", "")
    fake_slurm.lag()
    fake_slurm.lose_reply()
    with pytest.raises(SilentError, match="controller"):
        submit(grid)
    assert _only(paths).state is RunState.UNKNOWN
    submit(grid)
    assert len(waits) == 1
    assert len(fake_slurm.calls("sbatch")) == 1
    assert [each.job_id for each in read_ledger(paths).submissions] == ["101"]
    assert (_only(paths).state, _only(paths).job_id) == (RunState.PENDING, "101_0")


def _killed(tmp_path: Path, fake_slurm: FakeSlurm, sacct: str, *, age_s: float) -> SweepOnDisk:
    """A run that was killed `age_s` seconds after its last sign of life, and is out of the queue."""
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(1, "cluster=slurm"))
    sweep.submit()
    sweep.start(resumed=0, age_s=age_s)
    write_json(sweep.run().heartbeat, {"attempt": 0, "step": 7, "time": time.time() - age_s})
    fake_slurm.answer("sacct", ROW.format(job="500_0", state=sacct))
    return sweep


def test_a_sacct_that_is_behind_is_no_end(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    sweep = _killed(tmp_path, fake_slurm, "RUNNING", age_s=5)
    run = _only(sweep.paths)
    assert (run.state, run.cause) == (
        RunState.UNKNOWN, "it has left the queue, and sacct still says RUNNING: ask again",
    )  # fmt: skip
    fake_slurm.answer("sacct", ROW.format(job="500_0", state="NODE_FAIL"))
    assert _only(sweep.paths).state is RunState.NODE_FAIL


def test_a_row_that_never_ends_is_a_runaway_job(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    sweep = _killed(tmp_path, fake_slurm, "RUNNING", age_s=3600)
    assert _only(sweep.paths).state is RunState.FAILED
    assert not Journal(sweep.run()).read()[-1].has_ended


@pytest.mark.parametrize(
    ("start_s", "beat_s", "state"),
    [
        (7200, 5, RunState.UNKNOWN),
        (7200, 540, RunState.UNKNOWN),
        (5, None, RunState.UNKNOWN),
        (540, None, RunState.UNKNOWN),
        (5, 7200, RunState.UNKNOWN),
        (7200, 660, RunState.FAILED),
        (660, 7200, RunState.FAILED),
        (7200, None, RunState.FAILED),
    ],
)
def test_how_long_a_sacct_may_be_behind_counts_from_the_last_sign_of_life(
    tmp_path: Path, fake_slurm: FakeSlurm, start_s: float, beat_s: float | None, state: RunState
) -> None:
    """The last heartbeat, or the newest start where that wrote none yet: what is there may be of the attempt before."""
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(1, "cluster=slurm"))
    sweep.submit(age_s=9000)
    sweep.start(resumed=0, age_s=start_s)
    if beat_s is not None:
        write_json(sweep.run().heartbeat, {"attempt": 0, "step": 7, "time": time.time() - beat_s})
    fake_slurm.answer("sacct", ROW.format(job="500_0", state="RUNNING"))
    run = _only(sweep.paths)
    assert run.state is state
    assert not run.state.needs_submit


def test_a_word_that_nobody_knows_is_no_end(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    sweep = _killed(tmp_path, fake_slurm, "RUNNING", age_s=5)
    fake_slurm.answer("squeue", "500_0|HIBERNATING|n1|None|x\n")
    assert _only(sweep.paths).state is RunState.UNKNOWN
