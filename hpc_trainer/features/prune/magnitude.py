"""Smallest weights: exact to one weight, over all ranks' shards, and alike for any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.runtime.tensors import is_sharded, local_tensor

_LARGEST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Part:
    """Shard of a weight that this rank holds.

    `scores`: int32, of any shape; the larger the score, the larger the weight; -1 for what is zero already. `number`:
    index of the shard, in the order of the weight's rows; shards of one number are the same. `counts`: true on one of
    the ranks that hold the shard.
    """

    scores: torch.Tensor
    number: int
    counts: bool


def scores_of(weight: torch.Tensor, pruned: torch.Tensor) -> torch.Tensor:
    """Return the scores of this rank's shard of a weight, plain or a DTensor.

    Values of fp32 that are not negative have the order of their bits, and all formats of weights fit into it.

    Args:
        pruned: bool tensor of the weight's shape and placement.
    """
    bits = local_tensor(weight.detach()).abs().float().view(torch.int32)
    return bits.masked_fill(local_tensor(pruned), -1)


def part_of(weight: torch.Tensor, pruned: torch.Tensor, group: RankGroup) -> Part:
    """Return this rank's shard of a weight. Arguments as for `scores_of`."""
    scores = scores_of(weight, pruned)
    if not is_sharded(weight):
        return Part(scores, 0, group.is_rank_zero)
    sharded: Any = weight
    number, is_first = 0, True
    for index, size, placement in zip(
        sharded.device_mesh.get_coordinate(), sharded.device_mesh.shape, sharded.placements, strict=True
    ):
        if placement.is_replicate():
            is_first = is_first and index == 0
        else:
            number = number * size + index
    return Part(scores, number, is_first)


def smallest(questions: Sequence[Sequence[Part]], wanted: Sequence[int], group: RankGroup) -> list[list[torch.Tensor]]:
    """Mark the `wanted` smallest scores of each question, in bool tensors shaped as the scores. Collective.

    A question is a list of parts. Of equal scores the first ones are marked, by weight, part and place in it. The
    threshold is found bit by bit, by counts over all ranks: 32 messages of some numbers, however large the model is,
    and nothing is sorted.
    """
    low, high = [-1] * len(questions), [_LARGEST] * len(questions)
    while any(one < other for one, other in zip(low, high, strict=True)):
        middle = [(one + other) // 2 for one, other in zip(low, high, strict=True)]
        for index, count in enumerate(_counts(questions, middle, group)):
            if count >= wanted[index]:
                high[index] = middle[index]
            else:
                low[index] = middle[index] + 1
    below = _counts(questions, [threshold - 1 for threshold in low], group)
    chosen = []
    left = [count - less for count, less in zip(wanted, below, strict=True)]
    ties = [[part.scores == threshold for part in parts] for parts, threshold in zip(questions, low, strict=True)]
    shares = _share_out(questions, ties, left, group)
    for parts, threshold, equal, allowed in zip(questions, low, ties, shares, strict=True):
        chosen.append([
            (part.scores < threshold) | (each & (each.flatten().cumsum(0).view(each.shape) <= count))
            for part, each, count in zip(parts, equal, allowed, strict=True)
        ])  # fmt: skip
    return chosen


def _counts(questions: Sequence[Sequence[Part]], thresholds: Sequence[int], group: RankGroup) -> list[int]:
    """Return how many scores of each question are at most its threshold, over all ranks. Collective."""
    zero = torch.zeros((), dtype=torch.int64, device=group.device)
    sums = [
        sum(((part.scores <= threshold).sum() for part in parts if part.counts), start=zero)
        for parts, threshold in zip(questions, thresholds, strict=True)
    ]
    return [int(count) for count in group.sum(torch.stack(sums)).tolist()]


def _share_out(
    questions: Sequence[Sequence[Part]], ties: Sequence[Sequence[torch.Tensor]], left: Sequence[int], group: RankGroup
) -> list[list[int]]:
    """Return how many of the equal scores each part marks, so that all ranks mark `left`. Collective."""
    mine = [
        [[part.number, int(equal.sum())] for part, equal in zip(parts, of_question, strict=True)]
        for parts, of_question in zip(questions, ties, strict=True)
    ]
    ranks = group.gather(mine)
    shares = []
    for question, parts in enumerate(questions):
        rest, allowed = left[question], []
        for index, part in enumerate(parts):
            of_weight = dict(rank[question][index] for rank in ranks)
            before = sum(count for number, count in of_weight.items() if number < part.number)
            allowed.append(max(0, min(rest - before, of_weight[part.number])))
            rest = max(0, rest - sum(of_weight.values()))
        shares.append(allowed)
    return shares


def smallest_of_each(scores: torch.Tensor, m: int, num_zero: int) -> torch.Tensor:
    """Mark the `num_zero` smallest of each `m` neighbours along the inputs, the second dimension.

    The result is a bool tensor as `scores`. `m` divides the second dimension. Of equal scores the first are marked.
    """
    rows = scores.movedim(1, -1)
    order = rows.reshape(-1, m).argsort(dim=-1, stable=True)
    chosen = torch.zeros_like(order, dtype=torch.bool).scatter_(-1, order[:, :num_zero], True)
    return chosen.view(rows.shape).movedim(-1, 1).contiguous()
