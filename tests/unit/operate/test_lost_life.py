"""A run lived on in a job of which submissions.jsonl has lost the line: its own files and the queue speak for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_trainer.operate.status import RunStatus, read_status
from hpc_trainer.runs.files import write_json
from hpc_trainer.runs.states import RunState
from hpc_trainer.runs.submissions import write_confirmation, write_intent, write_waiting
from tests.unit.launch.grids import make_grid, submit
from tests.unit.operate.sweeps import SweepOnDisk
from tests.unit.runs.builders import make_specs
from tests.unit.slurm.fake_slurm import FakeSlurm

S = RunState


@pytest.fixture
def sweep(tmp_path: Path, fake_slurm: FakeSlurm) -> SweepOnDisk:
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "")
    return SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(1, "cluster=slurm", "snapshot.mode=off"))


def _one(sweep: SweepOnDisk) -> RunStatus:
    (run,) = read_status(sweep.paths).runs
    return run


def _submit_and_lose_the_line(sweep: SweepOnDisk, job_id: str) -> str:
    """As one array of one run; the uuid that its job carries."""
    sweep.paths.scripts.mkdir(exist_ok=True)
    intent = write_intent(sweep.paths, executor="slurm", hardware="cpu_x1", run_ids=[sweep.specs[0].run_id])
    write_confirmation(sweep.paths, intent, job_id)
    (sweep.paths.scripts / f"{intent.uuid}.sh").write_text("#!/bin/sh\n")
    lines = sweep.paths.submissions.read_bytes().splitlines(keepends=True)
    lines[-2] = lines[-2].replace(b"cpu", b"cpv")
    sweep.paths.submissions.write_bytes(b"".join(lines))
    return intent.uuid


@pytest.fixture
def brought_in(sweep: SweepOnDisk) -> SweepOnDisk:
    """A run waited in the sweep's own queue and was brought in, and the line that says so is damaged."""
    write_waiting(sweep.paths, [sweep.specs[0].run_id], "full", None)
    _submit_and_lose_the_line(sweep, "500")
    return sweep


def test_a_run_that_lives_does_not_wait(brought_in: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    brought_in.start(age_s=50)
    brought_in.beat(step=3, age_s=1)
    run = _one(brought_in)
    assert (run.state, run.waits_in_sweep, run.job_id) == (S.UNKNOWN, False, "500_0")
    assert submit(make_grid(brought_in.paths.folder, brought_in.specs)) == []
    assert fake_slurm.calls("sbatch") == []


@pytest.mark.parametrize("state", [S.FAILED, S.CANCELLED])
def test_a_run_that_ended_does_not_wait(brought_in: SweepOnDisk, fake_slurm: FakeSlurm, state: RunState) -> None:
    brought_in.start()
    brought_in.end(state=state, cause="it said so", step=3, saved_step=3)
    run = _one(brought_in)
    assert (run.state, run.cause, run.waits_in_sweep) == (state, "it said so", False)
    assert submit(make_grid(brought_in.paths.folder, brought_in.specs)) == []
    assert fake_slurm.calls("sbatch") == []


@pytest.mark.parametrize("sign", ["heartbeat", "error"])
def test_a_life_without_a_journal_does_not_wait(brought_in: SweepOnDisk, sign: str) -> None:
    if sign == "heartbeat":
        brought_in.beat(step=3)
    else:
        write_json(brought_in.run().failure(0), {"type": "ValueError", "message": "x"})
    run = _one(brought_in)
    assert (run.state, run.waits_in_sweep) == (S.UNKNOWN, False)
    assert "lost attempt 0" in str(run.cause)


def test_a_run_that_was_put_to_wait_long_after_that_life_waits(sweep: SweepOnDisk) -> None:
    _submit_and_lose_the_line(sweep, "500")
    sweep.start(age_s=3000)
    sweep.end(state=S.FAILED, cause="error", age_s=2900)
    write_waiting(sweep.paths, [sweep.specs[0].run_id], "full", None)
    run = _one(sweep)
    assert (run.state, run.cause, run.waits_in_sweep) == (S.PENDING, "full", True)
