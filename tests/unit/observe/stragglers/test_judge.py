"""Who is slow, from looks that are played: a rank that is so all the time, and nobody for what noise does."""

from __future__ import annotations

import os
import random

import pytest

from hpc_trainer.observe.straggler_log import LOOKS, Judge, Verdict

SEED = int(os.environ.get("HPC_TRAINER_FUZZ_SEED", "17"))
Look = list[tuple[float, float, float]]


def _look(own: list[float], data: list[float] | None = None, step_s: float = 0.2) -> Look:
    return [(mine, wait, step_s) for mine, wait in zip(own, data or [0.0] * len(own), strict=True)]


def _seen(judge: Judge, looks: list[Look]) -> list[Verdict]:
    return [verdict for look in looks for verdict in judge.see(look)]


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 64])
def test_a_rank_that_is_slow_is_named_once_with_its_factor(num_ranks: int) -> None:
    judge, own = Judge(1.3), [0.1] * num_ranks
    own[1] = 0.18
    assert _seen(judge, [_look(own)] * (LOOKS - 1)) == []
    (found,) = _seen(judge, [_look(own)] * 5)
    assert (found.rank, found.is_slow, found.is_data) == (1, True, False)
    assert (found.factor, found.own_s, found.others_s) == (pytest.approx(1.8), 0.18, 0.1)


def test_it_is_said_whether_data_or_work_takes_longer() -> None:
    judge = Judge(1.3)
    (found,) = _seen(judge, [_look([0.1, 0.2, 0.1], [0.01, 0.1, 0.01])] * LOOKS)
    assert found.is_data


def test_worse_and_better_are_told() -> None:
    judge = Judge(1.3)
    looks = [*[_look([0.1, 0.14])] * LOOKS, *[_look([0.1, 0.3])] * LOOKS, *[_look([0.1, 0.1])] * LOOKS]
    first, *worse, last = _seen(judge, looks)
    assert (first.is_slow, first.factor) == (True, pytest.approx(1.4))
    assert worse
    assert all(each.is_slow and each.factor > 1.25 * 1.4 for each in worse)
    assert not last.is_slow
    assert last.factor < 1.15


@pytest.mark.parametrize("looks", [
    [_look([0.1, 0.12])] * 30,  # below the factor
    [_look([0.001, 0.004])] * 30,  # of a step of 200 ms nothing to mend
    ([_look([0.1, 0.5])] * (LOOKS - 1) + [_look([0.1, 0.1])]) * 5,  # held up for a while
    [_look([0.1, 0.5]), _look([0.5, 0.1])] * 30,  # now the one, now the other
])  # fmt: skip
def test_nobody_is_named(looks: list[Look]) -> None:
    assert _seen(Judge(1.3), looks) == []


@pytest.mark.parametrize(
    ("looks", "named"),
    [
        ([_look([1.0, 2.0], step_s=4.0)] * LOOKS, False),  # exactly the factor
        ([_look([1.0, 2.125], step_s=4.0)] * LOOKS, True),
        ([_look([0.125, 0.375], step_s=5.0)] * LOOKS, False),  # exactly the least share of a step
        ([_look([0.125, 0.375], step_s=4.0)] * LOOKS, True),
        ([_look([1.0, 2.125], step_s=4.0)] * (LOOKS - 1) + [_look([1.0, 2.0], step_s=4.0)], False),
    ],
)
def test_a_rank_is_slow_above_the_factor_and_the_share_of_a_step_in_every_look(looks: list[Look], named: bool) -> None:
    assert [verdict.rank for verdict in _seen(Judge(2.0), looks)] == ([1] if named else [])


@pytest.mark.parametrize(
    ("later", "told"),
    [
        (5.0, None),  # exactly a quarter slower than it was named
        (5.5, True), (1.5, None),  # exactly halfway back to the others
        (1.25, False),
    ],
)  # fmt: skip
def test_a_named_rank_is_told_again_if_it_is_a_quarter_slower_or_nearly_as_quick_as_the_others(
    later: float, told: bool | None
) -> None:
    judge = Judge(2.0)
    assert len(_seen(judge, [_look([1.0, 4.0], step_s=4.0)] * LOOKS)) == 1
    later_on = [_look([1.0, later], step_s=4.0)] * LOOKS
    verdicts = [verdict for verdict in _seen(judge, later_on) if verdict.own_s == later]
    assert [verdict.is_slow for verdict in verdicts] == ([] if told is None else [told])


@pytest.mark.parametrize(("data", "is_data"), [([0.0, 0.5], False), ([0.0, 0.75], True), ([0.5, 1.0], False)])
def test_data_are_at_fault_if_they_are_more_than_half_of_the_difference(data: list[float], is_data: bool) -> None:
    (found,) = _seen(Judge(1.5), [_look([1.0, 2.0], data, step_s=4.0)] * LOOKS)
    assert found.is_data is is_data


def _noisy(draw: random.Random, own_s: float) -> float:
    """What a rank tells of ten steps of which each is up to ten times as long as it should be, at random."""
    return sorted(own_s * 10 ** (draw.random() ** 3) for _ in range(10))[10 // 4]


def test_noise_of_a_busy_machine_names_nobody() -> None:
    print(f"HPC_TRAINER_FUZZ_SEED={SEED}")
    draw = random.Random(SEED)
    for num_ranks in (2, 3, 4, 8):
        judge = Judge(1.3)
        for _ in range(300):
            assert judge.see(_look([_noisy(draw, 0.1) for _ in range(num_ranks)])) == []


def test_a_slow_rank_is_found_in_that_noise() -> None:
    print(f"HPC_TRAINER_FUZZ_SEED={SEED}")
    draw = random.Random(SEED)
    judge, found = Judge(1.3), list[Verdict]()
    for _ in range(40):
        found += judge.see(_look([_noisy(draw, 0.2 if rank == 2 else 0.1) for rank in range(4)]))
    assert {each.rank for each in found} == {2}
