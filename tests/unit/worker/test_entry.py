"""The first seconds of a rank: which run it is, and leaving at once, without torch, where there is nothing to do."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_trainer.errors import ExitCode
from hpc_trainer.record.files import write_json
from hpc_trainer.record.journal import read_failure
from hpc_trainer.record.reading import read_lines
from hpc_trainer.record.states import RunState
from hpc_trainer.record.submissions import read_submissions, write_confirmation, write_intent
from hpc_trainer.runtime.rank_env import read_rank_env
from hpc_trainer.runtime.spans import Spans
from hpc_trainer.runtime.stop import StopFlag
from hpc_trainer.worker import rank
from hpc_trainer.worker.rank import failed_before
from tests.journals import journal_records
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk

_PROGRAM = """
import sys
from hpc_trainer.worker.__main__ import main
code = main(sys.argv[1:])
print("torch" if "torch" in sys.modules else "light")
sys.exit(code)
"""


@pytest.fixture
def sweep(tmp_path: Path) -> SweepOnDisk:
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(2))
    sweep.submit()
    return sweep


def _worker(sweep: SweepOnDisk, *argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _PROGRAM, "--sweep-dir", str(sweep.paths.folder), *argv],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environ},
    )


@pytest.mark.parametrize("marker", ["DONE", "CANCEL"])
@pytest.mark.parametrize("index", [0, 1])
def test_a_run_that_is_over_leaves_at_once(sweep: SweepOnDisk, marker: str, index: int) -> None:
    """A restart after DONE, or after a cancel: no step, no attempt, no torch."""
    sweep.mark(marker, index)
    (submission,) = read_submissions(sweep.paths)
    done = _worker(sweep, "--array", submission.uuid, SLURM_ARRAY_TASK_ID=str(index))
    assert done.returncode == 0, done.stderr
    run_id = sweep.specs[index].run_id
    assert done.stdout.splitlines() == [f"{run_id}: the marker {marker} exists; nothing to do.", "light"]
    assert journal_records(sweep.run(index).folder) == []


@pytest.mark.parametrize("index", ["2", "", "x", "-1"])
def test_an_element_that_is_no_run_is_an_error(sweep: SweepOnDisk, index: str) -> None:
    (submission,) = read_submissions(sweep.paths)
    done = _worker(sweep, "--array", submission.uuid, SLURM_ARRAY_TASK_ID=index)
    assert done.returncode == 78, "exit 78: never retried"
    assert f"holds no run for array {submission.uuid}, element {index!r}" in done.stderr


def test_a_changed_spec_is_a_configuration_error(sweep: SweepOnDisk) -> None:
    (record, *_) = read_lines(sweep.paths.specs)  # without its checksum, as somebody writes it who means it
    sweep.paths.specs.write_text(json.dumps(record).replace('"seed": 0', '"seed": 5') + "\n")
    done = _worker(sweep, "--run", sweep.specs[0].run_id)
    assert done.returncode == 78, "exit 78: never retried"
    assert "was changed after submission" in done.stderr


def test_a_spec_that_others_may_write_is_refused(sweep: SweepOnDisk) -> None:
    sweep.mark("DONE")
    sweep.paths.specs.chmod(0o666)
    done = _worker(sweep, "--run", sweep.specs[0].run_id)
    assert done.returncode == 78
    assert "UntrustedFileError" in done.stderr
    sweep.paths.specs.chmod(0o600)
    sweep.paths.folder.chmod(0o777)
    assert "UntrustedFileError" in _worker(sweep, "--run", sweep.specs[0].run_id).stderr


def test_a_job_that_comes_back_late_leaves_the_run_to_the_newer_one(sweep: SweepOnDisk) -> None:
    """Slurm may requeue a job whose run was submitted again meanwhile: never two incarnations at a time."""
    sweep.submit("600", age_s=60.0)
    run_id = sweep.specs[1].run_id
    sweep.run(1).folder.chmod(0o700)
    task = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_NODEID": "0"}
    old = {**task, "SLURM_JOB_ID": "501", "SLURM_ARRAY_JOB_ID": "500", "SLURM_ARRAY_TASK_ID": "1"}
    done = _worker(sweep, "--run", run_id, **old)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{run_id}: job 600_1 has this run now; nothing to do for job 500_1.", "light"]
    assert journal_records(sweep.run(1).folder) == []
    successor = write_intent(sweep.run(1), executor="slurm", hardware="cpu_x1", run_ids=[run_id], kind="successor")
    write_confirmation(sweep.run(1), successor, "700")
    done = _worker(sweep, "--run", run_id, **{**old, "SLURM_ARRAY_JOB_ID": "600"})
    assert "job 700 has this run now" in done.stdout


@pytest.mark.parametrize(
    ("state", "exit_code", "budget", "leaves"),
    [("FAILED", 1, 3, True), (None, 1, 3, True), ("REQUEUED", 74, 3, False), (None, 74, 3, False),
     ("FAILED", 74, 1, False), ("FAILED", 74, 0, True), (None, None, 3, False), ("PREEMPTED", None, 3, False)],
)  # fmt: skip
def test_a_job_that_failed_for_good_does_not_start_again_by_itself(
    state: str | None, exit_code: int | None, budget: int, leaves: bool, sweep: SweepOnDisk
) -> None:
    """Slurm requeues it all the same where it has noted a preemption (since 24.05), or by its exit code."""
    run = sweep.run()
    run.folder.chmod(0o700)
    sweep.start(job_id="500_0")
    if state is not None:
        sweep.end(state=RunState(state), cause="storage" if exit_code == 74 else "exception")
    if exit_code is not None:
        write_json(run.failure(0), {"exit_code": exit_code})
    env = read_rank_env(
        {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_NODEID": "0",
         "SLURM_JOB_ID": "500", "SLURM_ARRAY_JOB_ID": "500", "SLURM_ARRAY_TASK_ID": "0", "SLURM_RESTART_COUNT": "1"}
    )  # fmt: skip
    assert (failed_before(run, env, budget) is not None) == leaves
    again = dataclasses.replace(env, job_id="600_0", restart_count=0)
    assert failed_before(run, again, budget) is None, "a person submitted it again"


def test_a_disk_that_is_full_before_the_attempt_is_recorded_like_any_error(
    sweep: SweepOnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 could not even open its log."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(rank, "_redirect_output", full)
    sweep.paths.folder.chmod(0o700)
    sweep.run().folder.chmod(0o700)
    words = ("GLOBALID", "LOCALID", "NODEID", "JOB_ID")
    environ = {f"SUBMITIT_LOCAL_{word}": "0" for word in words} | {"SUBMITIT_LOCAL_NTASKS": "1"}
    code = rank.run_rank(sweep.paths, sweep.specs[0].run_id, read_rank_env(environ), StopFlag(), Spans())
    assert code == ExitCode.STORAGE
    (end,) = journal_records(sweep.run().folder, "end")
    error = end["error"]
    assert (end["cause"], error["type"], error["rank"], error["exit_code"]) == ("storage", "OSError", 0, 74)
    assert "No space left on device" in error["message"]
    assert "_start_attempt" in error["traceback"]
    assert read_failure(sweep.run().failure(0)) == error, "where the next start looks for it"
