"""Figures of runs: the GPU-hours of all attempts."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from hpc_trainer.record.run_figures import gpu_hours
from hpc_trainer.record.run_status import RunStatus
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from tests.unit.record.builders import make_spec, make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm

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


def test_gpu_hours_count_each_attempt_to_its_end_or_to_the_next(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    assert gpu_hours(_one(sweep)) == 0.0, "nothing has begun"
    fake_slurm.answer("squeue", "500_0|RUNNING|n7|None|x\n")
    sweep.start(resumed=0, age_s=7200)
    sweep.start(attempt=1, resumed=0, age_s=3600)
    sweep.end(attempt=1, state=S.REQUEUED, cause="preempted", age_s=1800)
    sweep.start(attempt=2, resumed=0, age_s=900)
    sweep.beat(attempt=2, step=7)
    run = _one(sweep)
    # An hour up to the next attempt, half an hour up to its end, a quarter of an hour up to now; two GPUs each.
    assert gpu_hours(run) == pytest.approx(2 * 1.75, abs=0.01)
    assert gpu_hours(dataclasses.replace(run, attempts=run.attempts[:1], age_s=time.time())) == 0.0, "a clock was wrong"
    hour = dataclasses.replace(run.attempts[0], start_time=0.0, end_time=3600.0)
    assert gpu_hours(dataclasses.replace(run, attempts=[hour])) == 2.0
    shared = dataclasses.replace(hour, per_gpu=4)
    assert gpu_hours(dataclasses.replace(run, attempts=[hour, shared])) == 2.5, "of a shared GPU its share"


def test_gpu_hours_are_counted_up_to_the_last_sign_of_life(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    sweep = SweepOnDisk(tmp_path / "runs" / "gpus", [make_spec("cluster=slurm", "hardware=gpu_x8")])
    sweep.submit(age_s=200_000)
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "500_0|NODE_FAIL|1:0|n7\n")
    sweep.start(age_s=7200)
    sweep.end(state=S.REQUEUED, cause="x", age_s=3600)  # one hour
    assert gpu_hours(_one(sweep)) == pytest.approx(8.0, abs=0.1)
    sweep.start(attempt=1, age_s=3600)
    sweep.beat(attempt=1, step=3, age_s=1800)  # half an hour, then its node died without a word
    assert _one(sweep).state is S.NODE_FAIL
    assert gpu_hours(_one(sweep)) == pytest.approx(12.0, abs=0.2)
    sweep.start(attempt=2, age_s=900)
    sweep.beat(attempt=2, step=4, age_s=0)  # a quarter so far; the dead attempt's time ended at the latest then
    assert gpu_hours(_one(sweep)) <= 8.0 + 8 * (3600 - 900) / 3600 + 2.0 + 0.2
