"""Cancelled is cancelled: the marker first, then one scancel."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_trainer.errors import SlurmError
from hpc_trainer.launch.grids import retry, submit_grid
from hpc_trainer.operate.control import cancel_runs, cancelled_with_sweep
from hpc_trainer.record.processes import process_name
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from hpc_trainer.record.submissions import SUCCESSOR, read_submissions, write_confirmation, write_intent
from hpc_trainer.verify.interruptions import InterruptionKind
from hpc_trainer.verify.preempt import PreemptReport, _come_back
from tests.unit.launch.grids import make_grid
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm


@pytest.fixture
def sweep(tmp_path: Path) -> SweepOnDisk:
    return SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(4, "cluster=slurm"))


def _cancel(sweep: SweepOnDisk, *, save: bool = False) -> list[str]:
    status = read_status(sweep.paths)
    return cancel_runs(status, status.runs, save=save)


def _busy(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    """Run 0 waits, 1 works, 2 failed, 3 is complete."""
    sweep.submit()
    for index in (1, 2):
        sweep.start(index)
    sweep.end(2, state=RunState.FAILED, cause="exception")
    sweep.done(3)
    fake_slurm.answer("squeue", "500_0|PENDING||Priority|x\n500_1|RUNNING|n1|None|x\n")
    fake_slurm.answer("sacct", "")


def test_what_waits_or_works_is_cancelled_by_one_command(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    _busy(sweep, fake_slurm)
    assert _cancel(sweep) == [spec.run_id for spec in sweep.specs[:2]]
    (call,) = fake_slurm.calls("scancel")
    assert sorted(call.split()) == sorted(["scancel", "--quiet", "500_[0-1]"])
    assert [sweep.run(index).marker("CANCEL").exists() for index in range(4)] == [True, True, False, False]


def test_what_works_may_save_first(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    _busy(sweep, fake_slurm)
    assert _cancel(sweep, save=True) == [spec.run_id for spec in sweep.specs[:2]]
    assert fake_slurm.calls("scancel") == [
        "scancel --quiet 500_[0]", "scancel --quiet --signal=USR2 500_[1]",
    ]  # fmt: skip
    assert [sweep.run(index).marker("CANCEL").exists() for index in range(4)] == [True, True, False, False]


def test_the_marker_is_there_before_the_signal(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    _busy(sweep, fake_slurm)
    seen = fake_slurm.folder / "seen"
    markers = " ".join(f'"{sweep.run(index).marker("CANCEL")}"' for index in (0, 1))
    (fake_slurm.bin / "scancel").write_text(f'#!/bin/sh\nls {markers} > "{seen}" 2>&1\n')
    _cancel(sweep)
    assert len(seen.read_text().splitlines()) == 2
    assert "No such file" not in seen.read_text()


def test_a_cancelled_run_is_not_submitted_again(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    _busy(sweep, fake_slurm)
    _cancel(sweep)
    fake_slurm.answer("squeue", "")
    states = [run.state for run in read_status(sweep.paths).runs]
    assert states[:2] == [RunState.CANCELLED] * 2
    assert not any(state.needs_submit for state in states)


def test_a_cancel_that_failed_may_be_given_again(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    """The markers stand, and the waiting run shows as cancelled: its job must be cancelled all the same."""
    _busy(sweep, fake_slurm)
    fake_slurm.answer("scancel", error="scancel: error: Unable to contact slurm controller\n", code=1)
    with pytest.raises(SlurmError, match="Unable to contact"):
        _cancel(sweep)
    fake_slurm.forget("scancel")
    fake_slurm.forget_calls()
    _cancel(sweep)
    (call,) = fake_slurm.calls("scancel")
    assert sorted(call.split()) == sorted(["scancel", "--quiet", "500_[0-1]"])


def test_an_unknown_state_is_cancelled_too(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    """The markers end it; whose the ids are, nobody can say without squeue, so nobody gets a signal."""
    _busy(sweep, fake_slurm)
    fake_slurm.answer("squeue", code=1, error="down\n")
    with pytest.raises(SlurmError, match=r"squeue did not answer.* the same command again"):
        _cancel(sweep)
    assert [sweep.run(index).marker("CANCEL").exists() for index in range(4)] == [True, True, False, False]
    assert fake_slurm.calls("scancel") == []


@pytest.mark.parametrize("state", [RunState.PREEMPTED, RunState.TIMEOUT, RunState.NODE_FAIL])
def test_an_interrupted_run_that_is_cancelled_stays_so(
    state: RunState, sweep: SweepOnDisk, fake_slurm: FakeSlurm
) -> None:
    """Nobody has it now, and the next submit of the grid would bring it back: the marker forbids that."""
    sweep.submit()
    for index in range(4):
        sweep.start(index)
    sweep.end(0, state=state, cause=state.value.lower(), saved_step=7)
    sweep.end(1, state=RunState.FAILED, cause="exception")
    sweep.done(2)
    fake_slurm.answer("squeue", "500_3|RUNNING|n1|None|x\n")
    fake_slurm.answer("sacct", "")
    status = read_status(sweep.paths)
    named = [run for run in status.runs if run.run_id == sweep.specs[0].run_id]
    assert named[0].state is state
    assert cancel_runs(status, named) == [sweep.specs[0].run_id]
    grid = make_grid(sweep.paths.folder, sweep.specs)
    assert submit_grid(grid).num_submitted == 0
    assert retry(sweep.paths, [sweep.specs[0].run_id], take_back=False).num_submitted == 0
    assert fake_slurm.calls("sbatch") == []
    cancel_runs(status, status.runs)
    states = [run.state for run in read_status(sweep.paths).runs]
    assert states[:3] == [RunState.CANCELLED, RunState.FAILED, RunState.COMPLETED], "what told its own end keeps it"
    assert [sweep.run(index).marker("CANCEL").exists() for index in range(4)] == [True, False, False, True]


def test_a_job_that_came_between_the_look_and_the_marker_is_cancelled_too(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm
) -> None:
    """The time limit ended the run, and its successor is handed over in this moment."""
    sweep.submit()
    sweep.start()
    sweep.end(state=RunState.TIMEOUT, cause="timeout", saved_step=7)
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "")
    status = read_status(sweep.paths)
    run = [run for run in status.runs if run.run_id == sweep.specs[0].run_id]
    newest = read_submissions(sweep.paths)[-1]
    intent = write_intent(
        sweep.run(), executor="slurm", hardware="cpu_x1", run_ids=[run[0].run_id], kind=SUCCESSOR, after=newest.uuid
    )
    write_confirmation(sweep.run(), intent, "501")
    fake_slurm.answer("squeue", f"501|PENDING||Dependency|{intent.uuid}\n")
    assert cancel_runs(status, run) == [run[0].run_id]
    assert fake_slurm.calls("scancel") == ["scancel --quiet 501"]


def test_what_slurm_calls_cancelled_keeps_its_marker_when_slurm_forgets(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm
) -> None:
    sweep.submit()
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "500_0|CANCELLED by 7|0:0|\n")
    status = read_status(sweep.paths)
    assert status.runs[0].state is RunState.CANCELLED
    cancel_runs(status, status.runs[:1])
    assert sweep.run().marker("CANCEL").exists()


def test_runs_that_have_not_begun_share_one_new_marker_and_each_can_be_taken_back(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm
) -> None:
    sweep.submit()
    fake_slurm.answer("squeue", "".join(f"500_{index}|PENDING||Priority|x\n" for index in range(4)))
    status = read_status(sweep.paths)
    cancel_runs(status, status.runs[:1])  # by its own name, so that its marker does not say that the sweep was meant
    status = read_status(sweep.paths)
    cancel_runs(status, status.runs, is_whole=True)
    assert [cancelled_with_sweep(status, spec.run_id) for spec in sweep.specs] == [False, True, True, True]
    markers = [sweep.run(index).marker("CANCEL") for index in range(4)]
    assert [marker.stat().st_nlink for marker in markers] == [1, 3, 3, 3]
    markers[1].unlink()  # as `retry` does
    status = read_status(sweep.paths)
    assert [run.state for run in status.runs] == [
        RunState.CANCELLED, RunState.PENDING, RunState.CANCELLED, RunState.CANCELLED,
    ]  # fmt: skip


def test_nothing_to_cancel_calls_no_scancel(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    assert _cancel(sweep) == []
    assert fake_slurm.calls("scancel") == []


@pytest.mark.usefixtures("no_slurm")
def test_a_local_run_gets_a_signal_after_its_marker(tmp_path: Path) -> None:
    sweep = SweepOnDisk(tmp_path / "runs" / "local", make_specs(2))
    program = "import signal, sys; print('up', flush=True); signal.pause()"
    rank = subprocess.Popen([sys.executable, "-S", "-c", program], stdout=subprocess.PIPE)
    queue = subprocess.Popen([sys.executable, "-S", "-c", program], stdout=subprocess.PIPE)
    try:
        for process in (rank, queue):
            assert process.stdout is not None
            process.stdout.readline()
        sweep.submit(process_name(queue.pid), "local")
        sweep.start(0, executor="local", job_id="local-1", pid=rank.pid)
        assert _cancel(sweep) == [spec.run_id for spec in sweep.specs]
        assert rank.wait(timeout=60) == -signal.SIGTERM
        assert queue.poll() is None, "the queue goes on with the other runs"
        assert sweep.run(1).marker("CANCEL").exists(), "the queue passes over what has not started"
    finally:
        for process in (rank, queue):
            process.kill()
            process.communicate()


@pytest.mark.usefixtures("no_slurm")
def test_preempt_does_not_bring_back_what_somebody_cancels_meanwhile(tmp_path: Path) -> None:
    """`verify preempt` has killed the run, and is about to retry it."""
    sweep = SweepOnDisk(tmp_path / "runs" / "local", make_specs(1))
    sweep.submit("elsewhere:1:1.00", "local")
    sweep.start(executor="local", job_id="local-1", pid=2**22 + 1)
    sweep.end(state=RunState.FAILED, cause="killed")
    sweep.mark("CANCEL")
    report = PreemptReport(run_id=sweep.specs[0].run_id, kind=InterruptionKind.kill, how="", newest_checkpoint=None)
    brought_back: list[str] = []
    attempt = read_status(sweep.paths).runs[0].attempts[0]
    _come_back(report, sweep.paths, attempt, brought_back.append, 0.0, 1.0)
    assert brought_back == []
    assert report.problems == ["it was cancelled in the meantime, so it stays cancelled"]
