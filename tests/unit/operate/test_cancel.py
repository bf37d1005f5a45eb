"""Cancelled is cancelled: the marker first, then one scancel."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_trainer.errors import SlurmError
from hpc_trainer.operate.cancel import cancel_runs
from hpc_trainer.operate.status import read_status
from hpc_trainer.runs.local_process import process_name
from hpc_trainer.runs.states import RunState
from tests.unit.operate.sweeps import SweepOnDisk
from tests.unit.runs.builders import make_specs
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


def test_nothing_to_cancel_calls_nothing(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    assert _cancel(sweep) == []
    assert fake_slurm.calls() == []


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
