"""What `status` shows of one run beside its state: figures of its heartbeat and result, its queue, its hours."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hpc_trainer.observe.telemetry import DeviceWarning, Trouble, write_warnings
from hpc_trainer.record.files import write_json
from hpc_trainer.record.run_status import RunStatus
from hpc_trainer.record.states import NOT_FINITE, RunState
from hpc_trainer.record.status import read_status
from hpc_trainer.record.submissions import write_waiting
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import CLUSTER, FakeSlurm

S = RunState


@pytest.fixture
def sweep(tmp_path: Path, fake_slurm: FakeSlurm) -> SweepOnDisk:
    """A run on two GPUs that was submitted an hour ago as 500_0; Slurm knows nothing."""
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "")
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(1, "cluster=slurm", "hardware=gpu_x2"))
    sweep.submit()
    return sweep


def _one(sweep: SweepOnDisk) -> RunStatus:
    (run,) = read_status(sweep.paths).runs
    return run


def test_only_a_run_at_work_has_a_speed_and_an_end_in_sight(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    sweep.start(resumed=0)
    sweep.beat(step=7, loss=0.5)
    fake_slurm.answer("squeue", "500_0|RUNNING|n7|None|x\n")
    run = _one(sweep)
    assert (run.steps_per_s, run.eta_s, run.metrics) == (2.0, 30.0, {"loss": 0.5})
    fake_slurm.answer("squeue", "500_0|PENDING||Priority|x\n")
    run = _one(sweep)
    assert (run.state, run.steps_per_s, run.eta_s) == (S.REQUEUED, None, None)


@pytest.mark.parametrize(("exit_code", "lines"), [(78, 2), (1, 1)])
def test_every_line_of_a_wrong_configuration_is_told(exit_code: int, lines: int, sweep: SweepOnDisk) -> None:
    sweep.start()
    error = {"type": "ConfigError", "message": "data.path=/x: no such folder.\nUse /y.", "exit_code": exit_code}
    sweep.end(state=S.FAILED, cause="exception", error=error)
    run = _one(sweep)
    assert run.reason == "ConfigError: data.path=/x: no such folder."
    assert len(str(run.whole_reason).splitlines()) == lines


def test_the_metrics_of_a_complete_run_are_those_of_its_result(sweep: SweepOnDisk) -> None:
    sweep.done(eval_loss=0.25)
    assert _one(sweep).metrics == {"eval_loss": 0.25}
    sweep.start(resumed=0)
    sweep.beat(step=200, loss=0.5)
    assert _one(sweep).metrics == {"eval_loss": 0.25}


def test_a_run_in_slurm_s_queue_does_not_wait_in_the_sweep_s(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("squeue", "500_0|PENDING||Priority|x\n")
    run = _one(sweep)
    assert (run.state, run.waits_in_sweep, run.job_id, run.waiting_job) == (S.PENDING, False, "500_0", "500_0")
    fake_slurm.answer("squeue", "")
    write_waiting(sweep.paths, [sweep.specs[0].run_id], "no room", None)
    run = _one(sweep)
    assert (run.state, run.waits_in_sweep, run.job_id, run.waiting_job) == (S.PENDING, True, None, None)
    fake_slurm.answer("squeue", "500_0|COMPLETING|n7|None|x\n")
    assert (_one(sweep).waits_in_sweep, _one(sweep).own_job) == (True, None), "the job that it had is not its own now"


def test_who_brings_in_what_waits_is_known_only_with_a_queue(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    write_waiting(sweep.paths, [sweep.specs[0].run_id], "no room", None)
    fake_slurm.answer("squeue", "")
    (note,) = read_status(sweep.paths).notes
    assert note.startswith("1 run(s) wait in the sweep's own queue, and no top-up job is queued. The submit command")
    fake_slurm.answer("squeue", error="Unable to contact slurm controller", code=1)
    assert "1 run(s) wait in the sweep's own queue." in read_status(sweep.paths).notes


def test_steps_are_shown_as_far_as_they_are_known(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("squeue", "500_0|RUNNING|n7|None|x\n")
    num_steps = sweep.specs[0].num_steps
    assert (_one(sweep).progress, _one(sweep).has_slurm_job) == (f"0/{num_steps}", True)
    sweep.start(resumed=0)
    sweep.beat(step=7)
    run = _one(sweep)
    assert run.progress == f"7/{num_steps}"
    assert dataclasses.replace(run, num_steps=0).progress == "7"
    assert dataclasses.replace(run, num_steps=0, step=0).progress == "-"
    assert not dataclasses.replace(run, job_id="host:1:2.3").has_slurm_job
    assert dataclasses.replace(run, job_id="7_0").has_slurm_job, "of a controller that has just been installed"


@pytest.mark.parametrize(("cluster", "own_job"), [(CLUSTER, "600_0"), ("elsewhere", None), (None, None)])
def test_a_job_that_does_not_show_yet_is_its_own_on_this_cluster_alone(
    sweep: SweepOnDisk, cluster: str | None, own_job: str | None
) -> None:
    sweep.submit("600", age_s=3, cluster=cluster)
    assert _one(sweep).own_job == own_job


def test_a_result_that_is_no_number_is_a_warning(sweep: SweepOnDisk) -> None:
    sweep.done()
    assert _one(sweep).warning is None
    write_json(sweep.run().result, {"cause": NOT_FINITE, "metrics": {"eval_loss": float("nan"), "loss": 0.5}})
    assert _one(sweep).warning == "complete, but not finite: eval_loss=nan"


def test_only_a_run_at_work_shows_what_is_wrong_with_its_device(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    sweep.start(resumed=0)
    warning = DeviceWarning(
        rank=0, trouble=Trouble.hot, node="n7", device="H100", detail="up to 93 °C", since=1.0, last=2.0, seconds=1.0
    )
    sweep.run().telemetry.mkdir()
    write_warnings(sweep.run(), 0, 0, [warning])
    fake_slurm.answer("squeue", "500_0|RUNNING|n7|None|x\n")
    assert _one(sweep).device_warning == warning.text
    fake_slurm.answer("squeue", "500_0|PENDING||BeginTime|x\n")
    assert (_one(sweep).state, _one(sweep).device_warning) == (S.REQUEUED, None)
    sweep.end(state=S.REQUEUED, cause="preempted")
    fake_slurm.answer("squeue", "500_0|RUNNING|n7|None|x\n")
    assert (_one(sweep).state, _one(sweep).device_warning) == (S.RUNNING, None), "the next attempt has not begun"


def test_a_heartbeat_of_the_attempt_before_is_no_sign_of_life(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("squeue", "500_0|RUNNING|n7|None|x\n")
    sweep.start(resumed=0, age_s=7200)
    sweep.beat(step=7, age_s=5000)
    sweep.start(attempt=1, resumed=0, age_s=600)
    assert _one(sweep).age_s == pytest.approx(600, abs=60)
