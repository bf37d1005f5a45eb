"""Interruptions of a run of `verify resume`: the same for the same seed, in order, early enough to be acted on."""

from __future__ import annotations

import itertools
import random
import signal

import pytest

from hpc_trainer.verify.interruptions import ALL_RANKS, NONE, draw, from_text, to_text
from tests.seeds import chosen_seed


def test_random_draws_are_in_order_and_early_enough() -> None:
    chance = random.Random(chosen_seed())
    for _ in range(200):
        steps, count, ranks = chance.randint(5, 60), chance.randint(1, 8), chance.randint(1, 4)
        every = max(1, steps // 8)
        number = chance.randrange(10_000)
        drawn = draw(number, num_steps=steps, every_steps=every, count=count, world_size=ranks)
        assert drawn == draw(number, num_steps=steps, every_steps=every, count=count, world_size=ranks)
        assert len(drawn) == min(count, steps - every - 3)
        at = [each.step for each in drawn]
        assert at == sorted(set(at))
        assert every + 1 <= at[0] <= at[-1] <= steps - 3, "after the first checkpoint, so that there is one to resume"
        kills = [each.number is signal.SIGKILL for each in drawn]
        assert all(one != other for one, other in itertools.pairwise(kills)), "they take turns"
        for each in drawn:
            assert each.rank == ALL_RANKS if each.number is signal.SIGKILL else each.rank in range(ranks)
            assert 0 <= each.fraction <= 1
        assert from_text(to_text(drawn)) == drawn


def test_none_is_none() -> None:
    assert to_text([]) == NONE
    assert from_text(NONE) == []
    with pytest.raises(ValueError, match="unpack"):
        from_text("7:SIGTERM")
