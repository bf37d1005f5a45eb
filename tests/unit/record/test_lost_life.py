"""A run lived on in a job of which submissions.jsonl has lost the line: its own files and the queue speak for it."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from pathlib import Path

import pytest

from hpc_trainer.operate.control import cancel_runs
from hpc_trainer.record.files import write_json
from hpc_trainer.record.processes import process_name
from hpc_trainer.record.run_status import RunStatus
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from hpc_trainer.record.submissions import write_confirmation, write_intent, write_waiting
from tests.unit.launch.grids import make_grid, submit
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk
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
    shutil.rmtree(sweep.paths.intents)
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


@pytest.mark.parametrize("whose", ["its own", "another sweep's"])
def test_cancel_reaches_the_job_that_the_newest_attempt_names(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, whose: str
) -> None:
    sweep.submit()
    sweep.start(age_s=3000, resumed=0)
    sweep.end(state=S.TIMEOUT, cause="timeout", step=3, saved_step=3, age_s=2000)
    uuid = _submit_and_lose_the_line(sweep, "900")
    sweep.start(attempt=1, job_id="900_0")
    name = f"{'sweep' if whose == 'its own' else 'sweep-b'}-{uuid[:8]}"
    fake_slurm.answer("squeue", f"900_0|RUNNING|n1|None|{uuid}|{name}\n")
    status = read_status(sweep.paths)
    run = status.runs[0]
    assert (run.state, run.own_job) == (S.UNKNOWN, "900_0" if whose == "its own" else None)
    others = dataclasses.replace(status, specs={**status.specs, "other-0123456789": run.spec})  # not the whole sweep
    assert cancel_runs(others, [run]) == [run.run_id]
    assert fake_slurm.calls("scancel") == (["scancel --quiet 900_[0]"] if whose == "its own" else [])


@pytest.mark.parametrize("story", ["on Slurm", "local"])
def test_a_journal_that_cannot_be_opened_says_nothing_of_the_end(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, story: str
) -> None:
    """A local queue that was killed leaves its run alive; nobody may start it a second time."""
    if story == "local":
        gone = subprocess.Popen(["sleep", "60"])
        name = process_name(gone.pid)
        gone.kill()
        gone.wait()
        sweep.submit(name, "local", age_s=100)
    else:
        sweep.submit()
    sweep.run().journal(0).mkdir()
    run = _one(sweep)
    assert run.state is S.UNKNOWN
    assert not run.state.needs_submit
    assert "attempt-000.jsonl cannot be read: it is a folder" in str(run.cause)
