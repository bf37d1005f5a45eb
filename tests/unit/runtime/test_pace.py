"""The time that a stop needs, and how often to save: figures against the formulas and against a simulation."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from hpc_trainer.runtime.pace import (
    JOB_START,
    Pace,
    best_interval,
    job_end_time,
    last_moment,
    mean_time_between_interruptions,
    must_stop,
    steps_between_saves,
)


def _pace(steps: list[float], saves: list[float]) -> Pace:
    pace = Pace()
    for each in steps:
        pace.add_step(each)
    for each in saves:
        pace.add_save(each)
    return pace


def test_the_percentile_is_of_the_last_200() -> None:
    pace = _pace([9.0] * 50 + [float(n) for n in range(1, 201)], [])
    assert pace.step_s == 198.0
    assert pace.typical_step_s == 101.0
    assert _pace([0.1, 5.0, 0.2], []).step_s == 5.0, "of a few the slowest"
    assert (_pace([], []).step_s, _pace([], []).save_s) == (None, None)


def test_a_stop_begins_so_early_that_the_save_is_finished() -> None:
    quick, slow = _pace([0.1], [1.0]), _pace([2.0], [300.0])
    assert quick.lead_s == pytest.approx(15 + 0.2 + 1.5)
    assert slow.lead_s == pytest.approx(15 + 4 + 450)
    assert not must_stop(quick, 1000.0, 980.0)
    assert must_stop(quick, 1000.0, 984.0)
    assert must_stop(slow, 1000.0, 540.0)
    assert not must_stop(slow, None, 1e12), "nobody knows the end"


def test_the_end_is_what_slurm_says_else_what_the_batch_script_saw() -> None:
    inside = {"SLURM_JOB_ID": "7"}
    assert job_end_time(60, {**inside, "SLURM_JOB_END_TIME": "5000", JOB_START: "1"}) == 5000.0
    assert job_end_time(60, {**inside, JOB_START: "1000"}) == 4600.0
    assert job_end_time(60, inside) is None
    assert job_end_time(60, {JOB_START: "1000"}) is None, "left over from another job"


def test_daly_is_young_for_rare_interruptions_and_the_mean_time_for_constant_ones() -> None:
    assert best_interval(1.0, 1e6) == pytest.approx(math.sqrt(2e6), rel=0.01)
    assert best_interval(10.0, 4.0) == 4.0
    assert best_interval(1.0, 100.0) == pytest.approx(14.142 * (1 + math.sqrt(0.005) / 3 + 0.005 / 9) - 1, abs=0.01)


def test_interruptions_that_were_seen_shorten_the_interval() -> None:
    assert mean_time_between_interruptions(0, 0.0) == 24 * 3600
    assert mean_time_between_interruptions(10, 24 * 3600.0) == pytest.approx(48 * 3600 / 11)
    pace = _pace([0.5] * 10, [2.0])
    rare, often = (steps_between_saves(pace, between, 100) for between in (86_400.0, 600.0))
    assert rare == round(best_interval(2.0, 86_400.0) / 0.5)
    assert often < rare / 5
    assert steps_between_saves(_pace([0.5], []), 600.0, 100) == 100
    assert steps_between_saves(_pace([1e6], [1.0]), 600.0, 100) == 1


def test_a_save_beside_training_costs_its_stall_and_must_be_written_before_the_next() -> None:
    pace = _pace([0.5] * 10, [40.0])
    assert steps_between_saves(pace, 600.0, 100) == round(best_interval(40.0, 600.0) / 0.5), "training waits for it"
    pace.add_stall(2.0)
    assert steps_between_saves(pace, 600.0, 100) == round(best_interval(2.0, 600.0) / 0.5), "the stall alone counts"
    pace.add_save(90.0)
    assert steps_between_saves(pace, 600.0, 100) == 180, "writing it takes longer than the best interval"


@pytest.mark.parametrize(("save_s", "between_s"), [(5.0, 3600.0), (60.0, 3600.0), (1.0, 300.0)])
def test_no_other_interval_loses_less_time(save_s: float, between_s: float) -> None:
    """Simulated, with interruptions at random: a third and three times the interval lose more."""
    best = best_interval(save_s, between_s)
    seed = 37
    lost = {factor: _lost_share(best * factor, save_s, between_s, random.Random(seed)) for factor in (1 / 3, 1.0, 3.0)}
    assert lost[1.0] < min(lost[1 / 3], lost[3.0]), (seed, lost)


def _lost_share(interval: float, save_s: float, between_s: float, chance: random.Random) -> float:
    """The share of wall time that was no lasting work, over 3,000 interruptions."""
    wall = useful = 0.0
    for _ in range(3000):
        until = chance.expovariate(1 / between_s)
        useful += math.floor(until / (interval + save_s)) * interval
        wall += until
    return 1 - useful / wall


@pytest.mark.parametrize(
    ("facts", "moment"),
    [
        ({"end_time": 500.0, "is_at_work": True}, 488.0),
        ({"end_time": None, "is_at_work": True}, None),
        # Being killed: from the signal on it has KillWait, whatever its time limit says.
        ({"end_time": 500.0, "is_at_work": False}, 118.0),
        ({"end_time": 500.0, "is_at_work": True, "preempt_time": 98.0, "grace_s": 60.0}, 176.0),
        ({"end_time": 500.0, "is_at_work": False, "preempt_time": 98.0, "grace_s": 0.0}, 116.0),
    ],
)
def test_a_rank_that_is_stuck_leaves_some_seconds_before_it_is_killed(facts: Any, moment: float | None) -> None:
    assert last_moment(signal_time=100.0, kill_wait_s=30.0, **facts) == moment
