"""Who makes which matrix whole; with ranks: test_sharded_ranks.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_trainer.features.muon.whole_matrices import WholeMatrices, num_flops, share_work


def test_the_largest_goes_first_and_to_the_one_with_least() -> None:
    assert share_work([3.0, 3.0, 2.0, 2.0, 2.0], 2) == [0, 1, 0, 1, 0]
    assert share_work([1.0, 9.0, 1.0], 2) == [1, 0, 1]
    assert share_work([1.0, 1.0], 4) == [0, 1]


@settings(max_examples=100)
@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=40), st.integers(1, 9))
def test_no_rank_has_more_than_a_share_and_one_piece(work: list[float], num_ranks: int) -> None:
    """Graham's bound: mean + largest × (1 - 1 / ranks)."""
    ranks = share_work(work, num_ranks)
    most = max(sum(size for size, rank in zip(work, ranks, strict=True) if rank == each) for each in range(num_ranks))
    assert most <= sum(work) / num_ranks + max(work) * (1 - 1 / num_ranks) + 1e-9
    assert share_work(work, num_ranks) == ranks, "the same on each rank"


def test_flops_are_those_of_three_products() -> None:
    assert num_flops(torch.Size((4, 10))) == num_flops(torch.Size((10, 4))) == 2 * (4 * 10 * 4 + 4**3 + 4 * 4 * 10)


def test_one_rank_has_them_all() -> None:
    wholes = [torch.arange(6.0).reshape(2, 3), torch.ones(4, 1)]
    matrices = WholeMatrices(wholes, [1.0, 2.0], None)
    first, second = matrices.map([0, 1], wholes, lambda whole: whole.flip(0))
    assert torch.equal(first.float(), wholes[0].flip(0))
    assert torch.equal(second.float(), wholes[1])
    with pytest.raises(ValueError, match="zip"):
        matrices.map([0, 1], wholes[:1], lambda whole: whole)
