"""Figures of runs: the GPU-hours of all attempts."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from hpc_trainer.record.journal import Attempt
from hpc_trainer.record.ledger import append_spent, read_allocations, spent_so_far
from hpc_trainer.record.run_figures import (
    ask_ledgers,
    gpu_hours,
    newest_metrics,
    outcome_metrics,
    queue_s,
    submit_times,
    waits_since,
    wall_s,
)
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


def _attempt(number: int, start: float, end: float | None) -> Attempt:
    return Attempt(
        attempt=number, job_id="500_0", restart_count=number, node="n1", pid=1, start_time=start, end_time=end
    )  # fmt: skip


@pytest.mark.parametrize(
    ("submitted", "attempts", "waited"),
    [
        ([], [], None),
        ([100.0], [(130.0, 200.0)], 30.0),
        ([100.0], [(130.0, 200.0), (250.0, 300.0)], 80.0),
        # Between its end and a later submit it did not wait.
        ([100.0, 240.0], [(130.0, 200.0), (250.0, 300.0)], 40.0),
        ([100.0, 130.0], [(130.0, 200.0)], 0.0),
        ([100.0, 101.0, 120.0, 140.0], [(130.0, 200.0)], 10.0),
        ([100.0], [(90.0, 95.0), (97.0, 99.0)], 2.0),
    ],
)
def test_a_run_waits_before_its_first_attempt_and_between_attempts(
    sweep: SweepOnDisk, submitted: list[float], attempts: list[tuple[float, float]], waited: float | None
) -> None:
    told = [_attempt(number, *times) for number, times in enumerate(attempts)]
    run = dataclasses.replace(_one(sweep), attempts=told, state=S.COMPLETED)
    assert queue_s(run, submitted) == waited
    assert waits_since(run, submitted) is None
    assert wall_s(run) == sum(end - start for start, end in attempts)


def test_a_run_that_waits_now_waits_since_its_submit_or_its_last_end(
    sweep: SweepOnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = dataclasses.replace(_one(sweep), state=S.PENDING, attempts=[])
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    assert (waits_since(run, [400.0, 900.0]), queue_s(run, [400.0, 900.0])) == (900.0, 100.0)
    assert waits_since(run, []) is None
    assert waits_since(dataclasses.replace(run, waits_in_sweep=True), [400.0]) is None
    back = dataclasses.replace(run, state=S.REQUEUED, attempts=[_attempt(0, 500.0, 700.0)])
    assert (waits_since(back, [400.0]), queue_s(back, [400.0])) == (700.0, 100.0 + 300.0)
    assert queue_s(back, [400.0, 1100.0]) == 100.0, "a clock was set back"


def test_the_times_of_a_run_s_submits_are_in_order(sweep: SweepOnDisk) -> None:
    sweep.submit("501", age_s=60.0)
    sweep.submit("502", age_s=7200.0)
    (run_id,) = (spec.run_id for spec in sweep.specs)
    times = submit_times(read_status(sweep.paths).ledger)
    assert list(times) == [run_id]
    assert len(times[run_id]) == 3
    assert times[run_id] == sorted(times[run_id])


def test_the_metrics_of_a_run_that_stopped_are_those_up_to_its_step(sweep: SweepOnDisk) -> None:
    sweep.start(resumed=0)
    sweep.beat(step=20, eval_accuracy=0.1)
    run = dataclasses.replace(_one(sweep), state=S.PREEMPTED, step=20)
    status = read_status(sweep.paths)
    records = [
        {"step": 10, "time": 1.0, "eval_accuracy": 0.5, "loss": 2.0, "lr": 0.1}, {"step": 20, "time": 2.0, "loss": 1.0},
        {"step": 21, "time": 3.0, "eval_accuracy": 0.9},
    ]  # fmt: skip
    assert newest_metrics(status, run, records) == ({"eval_accuracy": 0.5}, 10)
    assert newest_metrics(status, run, []) == ({"eval_accuracy": 0.1}, None)
    done = dataclasses.replace(run, state=S.COMPLETED)
    assert newest_metrics(status, done, records) == ({"eval_accuracy": 0.1}, 20)
    unbegun = dataclasses.replace(run, attempts=[])
    assert newest_metrics(status, unbegun, records) == ({"eval_accuracy": 0.1}, None)


def test_the_loss_of_a_step_is_the_outcome_of_a_program_alone(sweep: SweepOnDisk) -> None:
    run = _one(sweep)
    metrics = {"loss": 1.0, "lr": 0.1, "score": 3.0}
    assert outcome_metrics(run, metrics) == {"score": 3.0}
    program = dataclasses.replace(run, spec=dataclasses.replace(run.spec, num_steps=0))
    assert outcome_metrics(program, metrics) == metrics


def test_the_accounting_is_asked_once_about_an_allocation_and_its_answer_is_kept(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm
) -> None:
    sweep.start(resumed=0, age_s=1000.0)
    sweep.end(state=S.PREEMPTED, cause="preempted", age_s=900.0)
    status = read_status(sweep.paths)
    assert ask_ledgers(status, status.runs, []) == {}, "without a ledger nobody is asked"
    append_spent(sweep.run(), 0, 9, spent_so_far([("step", 80.0)], steps_done=9))
    notes: list[str] = []
    fake_slurm.print("sacct", "", code=1, error="sacct: error: Unable to contact slurmdbd")
    (ledger,) = ask_ledgers(status, status.runs, notes).values()
    assert not ledger.is_by_slurm
    (note,) = notes
    assert note.startswith("sacct did not answer (")
    start = int(status.runs[0].attempts[0].start_time) - 5
    head = "JobID|Start|End|ElapsedRaw|State|\n"
    fake_slurm.print("sacct", f"{head}500_0|{start}|{start + 110}|110|PREEMPTED|\n7_0|{start}|{start + 1}|1|FAILED|\n")
    (ledger,) = ask_ledgers(status, status.runs, notes).values()
    assert (ledger.is_by_slurm, ledger.elapsed_s) == (True, 110.0)
    assert [each.job_id for each in read_allocations(sweep.run())] == ["500_0"]
    fake_slurm.forget_calls()
    assert ask_ledgers(status, status.runs, notes)[sweep.specs[0].run_id].elapsed_s == 110.0
    assert fake_slurm.calls() == []
    assert len(notes) == 1
