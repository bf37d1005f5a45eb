"""When a run saves: at a fixed interval, or at the one that its own measures make the best."""

from __future__ import annotations

import time

import pytest

from hpc_trainer.record.journal import Attempt
from hpc_trainer.runtime.pace import SaveTimer, best_interval
from hpc_trainer.runtime.rank_group import RankGroup

ALONE = RankGroup()


def _attempts(count: int, hours: float) -> list[Attempt]:
    return [
        Attempt(attempt=n, job_id="1", restart_count=n, node="n1", pid=1, start_time=1e9, end_time=1e9 + hours * 3600)
        for n in range(count)
    ]


def test_a_fixed_interval_counts_from_step_0_after_a_resume_too() -> None:
    timer = SaveTimer(50)
    timer.start(120)
    timer.add_save(120, 9.0, ALONE)
    assert [step for step in range(121, 260) if timer.is_due(step)] == [150, 200, 250]


def test_auto_waits_for_the_first_save_and_then_takes_its_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    timer = SaveTimer(100, is_auto=True)
    timer.start(0)
    for step in range(1, 101):
        clock[0] += 0.5
        timer.add_step(step)
        assert timer.is_due(step) == (step == 100)
    clock[0] += 2.0
    timer.add_save(100, 2.0, ALONE)
    assert timer.figures() == {"step_s": 0.5, "save_s": 2.0}
    wanted = round(best_interval(2.0, 24 * 3600.0) / 0.5)
    assert timer.every_steps == wanted > 100
    assert not timer.is_due(100 + wanted - 1)
    assert timer.is_due(100 + wanted)
    clock[0] += 0.5
    timer.add_step(101)
    assert timer.figures()["step_s"] == 0.5, "the save is no part of a step"


def test_a_run_that_is_interrupted_often_saves_more_often() -> None:
    timers = [SaveTimer(10, is_auto=True, attempts=_attempts(count, 0.5)) for count in (1, 40)]
    for timer in timers:
        timer.start(0)
        timer.pace.add_step(0.1)
        timer.add_save(10, 1.0, ALONE)
    assert timers[1].every_steps < timers[0].every_steps / 3


def test_a_stop_is_due_before_the_time_limit_by_as_much_as_a_save_takes() -> None:
    now = time.time()
    quick, slow = SaveTimer(end_time=now + 60), SaveTimer(end_time=now + 60)
    quick.pace.add_save(1.0)
    slow.pace.add_save(40.0)
    assert (quick.must_stop, slow.must_stop, SaveTimer().must_stop) == (False, True, False)


def test_a_step_costs_next_to_nothing() -> None:
    timer = SaveTimer()
    timer.start(0)
    begin = time.process_time()
    for step in range(100_000):
        timer.add_step(step)
    assert time.process_time() - begin < 1.0, "10 µs would be too much: the budget of the loop is 20 (design, 9)"
