"""The smallest weights: as many as asked for, whatever they are, also of weights that are all alike."""

from __future__ import annotations

import pytest
import torch

from hpc_trainer.features.prune.choose import part_of, scores_of, smallest, smallest_of_each, smallest_units
from hpc_trainer.runtime.rank_group import RankGroup
from tests.seeds import chosen_seed

GROUP = RankGroup()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_those_of_a_stable_sort(dtype: torch.dtype) -> None:
    torch.manual_seed(chosen_seed())
    for _ in range(12):
        shapes = [(5, 7), (3, 2, 2), (11, 1)]
        weights = [(torch.randn(shape) * 2).round(decimals=int(torch.randint(3, ()))).to(dtype) for shape in shapes]
        pruned = [torch.rand(shape) < 0.2 for shape in shapes]
        parts = [part_of(weight, gone, GROUP) for weight, gone in zip(weights, pruned, strict=True)]
        flat = torch.cat([weight.abs().float().masked_fill(gone, -1).flatten()
                          for weight, gone in zip(weights, pruned, strict=True)])  # fmt: skip
        for count in (0, 1, 20, len(flat) - 1, len(flat)):
            (found,) = smallest([parts], [count], GROUP)
            expected = torch.zeros(len(flat), dtype=torch.bool)
            expected[flat.argsort(stable=True)[:count]] = True
            assert torch.cat([each.flatten() for each in found]).equal(expected)
        counts = [3, 6, 0]
        for each, count in zip(smallest([[part] for part in parts], counts, GROUP), counts, strict=True):
            assert int(each[0].sum()) == count


def test_numbers_that_are_none_are_the_largest() -> None:
    weight = torch.tensor([[torch.nan, torch.inf, -0.0, 1e-42]])
    (found,) = smallest([[part_of(weight, torch.zeros(1, 4, dtype=torch.bool), GROUP)]], [2], GROUP)
    assert found[0].tolist() == [[False, False, True, True]]


@pytest.mark.parametrize("shape", [(6, 8), (5, 4, 3, 3), (2, 12, 5)])
def test_of_each_neighbours_along_the_inputs_as_many_stay(shape: tuple[int, ...]) -> None:
    torch.manual_seed(chosen_seed())
    weight = torch.randn(shape)
    chosen = smallest_of_each(scores_of(weight, torch.zeros(shape, dtype=torch.bool)), 4, 2)
    groups = weight.movedim(1, -1).reshape(-1, 4).abs()
    zeros = chosen.movedim(1, -1).reshape(-1, 4)
    assert zeros.sum(1).eq(2).all()
    assert groups.masked_fill(zeros, torch.inf).amin(1).ge(groups.masked_fill(~zeros, 0).amax(1)).all()


def test_of_each_group_of_channels_one_stays() -> None:
    sizes = [torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0.1, 0.1]), torch.tensor([-1.0, 9.0])]
    alone = smallest_units(sizes, 0.9, together=False)
    assert [each.tolist() for each in alone] == [[True, True, True, False], [True, False], [True, False]]
    half = smallest_units(sizes, 0.5, together=True)
    assert [each.tolist() for each in half] == [[True, True, False, False], [True, False], [True, False]]
    most = smallest_units(sizes, 0.99, together=True)
    assert [int((~each).sum()) for each in most] == [1, 1, 1]
