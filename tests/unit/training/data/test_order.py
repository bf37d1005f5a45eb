"""The order of samples: the same for every number of ranks, each sample once an epoch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpc_trainer.errors import DataError
from hpc_trainer.training.data import order
from hpc_trainer.training.data.order import BatchOrder
from tests.seeds import chosen_seed

# BatchOrder(8, 8, seed 0), step 0, and seed 12345, step 3, by numpy 2.4.6.
GOLDEN = [[1, 2, 3, 7, 0, 4, 5, 6], [0, 2, 3, 5, 4, 7, 1, 6]]


@given(
    micro=st.integers(1, 5),
    accum=st.integers(1, 3),
    spare=st.integers(0, 50),
    seed=st.integers(0, 2**32 - 1),
    step=st.integers(0, 40),
)
def test_any_world_size_gives_the_same_global_batch(micro: int, accum: int, spare: int, seed: int, step: int) -> None:
    batch = micro * accum * 4
    expected = BatchOrder(batch + spare, batch, seed).global_indices(step)
    for world_size in (1, 2, 4):
        order = BatchOrder(batch + spare, batch, seed)
        layout = {"world_size": world_size, "micro_batch_size": micro}
        parts = [
            order.micro_indices(step, accum=index, rank=rank, **layout)
            for index in range(accum * 4 // world_size)
            for rank in range(world_size)
        ]
        assert np.array_equal(np.concatenate(parts), expected)


@given(st.integers(1, 20), st.integers(0, 60), st.integers(0, 99), st.integers(0, 5))
def test_each_sample_at_most_once_an_epoch(batch: int, spare: int, seed: int, epoch: int) -> None:
    order = BatchOrder(batch + spare, batch, seed)
    first = epoch * order.steps_per_epoch
    seen = np.concatenate([order.global_indices(first + index) for index in range(order.steps_per_epoch)])
    assert len(set(seen.tolist())) == len(seen) == order.steps_per_epoch * batch
    assert set(seen.tolist()) <= set(range(batch + spare))


def test_epochs_and_seeds_differ_and_steps_may_be_asked_in_any_order() -> None:
    order = BatchOrder(100, 50, 0)
    batches = [order.global_indices(step).tolist() for step in range(6)]
    assert sorted(batches[0] + batches[1]) == list(range(100))
    assert len({tuple(batch) for batch in batches}) == 6
    assert batches[0] != BatchOrder(100, 50, 1).global_indices(0).tolist()
    fresh = BatchOrder(100, 50, 0)
    assert [fresh.global_indices(step).tolist() for step in (5, 0, 3)] == [batches[5], batches[0], batches[3]]


def test_the_order_never_changes_between_versions() -> None:
    assert BatchOrder(8, 8, 0).global_indices(0).tolist() == GOLDEN[0]
    assert BatchOrder(8, 8, 12345).global_indices(3).tolist() == GOLDEN[1]


def test_no_global_generator_is_touched() -> None:
    np.random.seed(0)
    torch.manual_seed(0)
    before = (np.random.get_state()[1].copy(), torch.get_rng_state())
    BatchOrder(100, 10, 0).global_indices(25)
    assert np.array_equal(np.random.get_state()[1], before[0])
    assert torch.equal(torch.get_rng_state(), before[1])


def test_too_few_samples_names_both_and_the_largest_batch() -> None:
    with pytest.raises(
        DataError, match=r"global_batch_size=64 must be 1 to 40.*Largest legal: train.global_batch_size=40"
    ):
        BatchOrder(40, 64, 0)
    with pytest.raises(DataError, match="0 training samples"):
        BatchOrder(0, 1, 0)
    assert BatchOrder(40, 40, 0).steps_per_epoch == 1


@pytest.mark.parametrize(("accum", "rank"), [(2, 0), (0, 2), (-1, 0), (0, -1)])
def test_a_part_outside_the_batch_is_refused(accum: int, rank: int) -> None:
    with pytest.raises(ValueError, match="global_batch_size must be"):
        BatchOrder(16, 16, 0).micro_indices(0, accum=accum, rank=rank, world_size=2, micro_batch_size=4)
    with pytest.raises(ValueError, match="step=-1 must be"):
        BatchOrder(16, 16, 0).global_indices(-1)


def test_equal_words_fall_as_a_stable_sort_has_them(monkeypatch):
    monkeypatch.setattr(order, "_BLOCK", 7)
    draws = np.random.default_rng(chosen_seed())
    for _ in range(200):
        words = draws.integers(0, draws.integers(1, 60), size=draws.integers(0, 50)).astype(np.uint64)
        assert np.array_equal(order.stable_order(words), np.argsort(words, kind="stable"))
    words = np.random.PCG64(3).random_raw(5000)
    assert np.array_equal(order.stable_order(words), np.argsort(words, kind="stable"))
