"""Choice of the weights of a model that become zero, by size, and the masks that keep them zero.

The smallest weights are found exactly, to one weight, over all ranks; or the smallest channels of whole layers.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hpc_trainer.config.name_patterns import fits_any
from hpc_trainer.errors import ConfigError
from hpc_trainer.features.prune import PruneConfig, PruneMethod, final_sparsity
from hpc_trainer.models.channels import Group, groups_of, shrink, tensors_of
from hpc_trainer.models.parts import match_weights
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.runtime.tensors import is_sharded, local_tensor
from hpc_trainer.training.optim.build import decaying


def weights_to_prune(model: nn.Module, prune: PruneConfig) -> tuple[list[str], list[str]]:
    """Return (names of the pruned weights, names of those whose inputs `prune.m` does not divide).

    `model` is whole. Weights whose inputs `prune.m` does not divide stay whole. Without `prune.include` the pruned
    weights are those of two dimensions or more that are trained, except for norms and embeddings.

    Raises:
        ConfigError: a pattern fits no weight that can be pruned, or no weight is left to prune.
    """
    match_weights(model, [*prune.include, *prune.exclude], "prune.include or prune.exclude")
    decays, names = decaying(model), dict(model.named_parameters())
    embeddings = {module.weight for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))}
    able = [name for name, weight in names.items() if decays.get(weight)]
    for pattern in prune.include:
        if not any(fits_any(name, [pattern]) for name in able):
            raise ConfigError(
                f"prune.include has {pattern!r}, which names no matrix or filter that is trained, and only those are "
                "pruned: norms and biases are not. Name others, or leave it out."
            )
    if prune.include:
        wanted = [name for name in able if fits_any(name, prune.include)]
    else:
        wanted = [name for name in able if names[name] not in embeddings]
    wanted = [name for name in wanted if not fits_any(name, prune.exclude)]
    uneven: list[str] = []
    if prune.method.name == "n_m":
        uneven = [name for name in wanted if names[name].shape[1] % prune.m]
        wanted = [name for name in wanted if name not in uneven]
    if not wanted:
        why = f", whose inputs prune.m={prune.m} divides" if uneven else ""
        raise ConfigError(
            f"prune.include and prune.exclude leave no weight of {type(model).__name__}{why}. Name others, or use "
            "prune.method=none."
        )
    return wanted, uneven


def groups_to_prune(model: nn.Module, prune: PruneConfig) -> list[Group]:
    """Return the groups of channels that lose some: without patterns, all trained ones of more than one unit.

    A pattern that fits a weight of a layer that makes the channels names the group.

    Raises:
        ConfigError: the model does not say its groups, a pattern fits none of their weights, or none is left.
    """
    candidates = {group.channels.name: (group, [*tensors_of(model, group)]) for group in groups_of(model)}
    every = [name for _, names in candidates.values() for name in names]
    for pattern in (*prune.include, *prune.exclude):
        if not any(fits_any(name, [pattern]) for name in every):
            raise ConfigError(
                f"prune.include or prune.exclude has {pattern!r}, which names no layer whose channels can be removed. "
                f"There are {', '.join(candidates)}."
            )
    groups = [
        group
        for group, names in candidates.values()
        if (not prune.include or _any(names, prune.include)) and not _any(names, prune.exclude)
    ]
    groups = [group for group in groups if group.num_units > 1]
    groups = [group for group in groups if all(weight.requires_grad for weight in tensors_of(model, group).values())]
    if not groups:
        raise ConfigError(
            f"prune.method=channels finds no channel of {type(model).__name__} to remove: one unit of each group must "
            "stay, and a unit has the channels of one group of a GroupNorm. Use more channels, other patterns, or "
            "prune.method=none."
        )
    return groups


def _any(names: Collection[str], patterns: Collection[str]) -> bool:
    return any(fits_any(name, patterns) for name in names)


class Masks:
    """Mask of zeroed elements for each named weight; alike on all ranks, sharded where the weights are.

    Each weight has a bool tensor, `pruned`, of the weight's shape and placement: a byte for each element.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter]) -> None:
        self.weights = dict(weights)
        self.pruned = {name: torch.zeros_like(weight.detach(), dtype=torch.bool) for name, weight in weights.items()}
        self.share = 0.0
        """Largest share requested so far: zero elements stay zero, even if the schedule has changed."""
        self.sparsity = 0.0
        """The share that is zero, 0 to 1; of channels if channels are pruned."""
        self._others: dict[str, torch.Tensor] = {}

    def also_mask(self, others: Mapping[str, torch.Tensor]) -> None:
        """Make `apply` zero these tensors too, which replace the weights of the same names and are placed like them."""
        self._others |= {name: tensor for name, tensor in others.items() if name in self.pruned}

    @torch.no_grad()
    def apply(self) -> None:
        """Set pruned elements to zero, NaN included. Sends nothing, and waits for no device."""
        for name, weight in (*self.weights.items(), *self._others.items()):
            local_tensor(weight.detach()).masked_fill_(local_tensor(self.pruned[name]), 0.0)

    @torch.no_grad()
    def apply_to_gradients(self) -> None:
        """Set pruned elements of existing gradients to zero, as if the forward pass multiplied weights by masks."""
        for name, weight in self.weights.items():
            if weight.grad is not None:
                local_tensor(weight.grad).masked_fill_(local_tensor(self.pruned[name]), 0.0)

    def take(self, name: str, chosen: torch.Tensor) -> None:
        """Replace the mask of a weight by `chosen`, a bool tensor as this rank's shard of the weight."""
        local_tensor(self.pruned[name]).copy_(chosen)

    def tensors(self) -> Iterable[torch.Tensor]:
        """Return the mask tensors."""
        return self.pruned.values()

    def state_dict(self) -> dict[str, Any]:
        """Return the mask tensors in use, the share asked for, and the sparsity."""
        return {"pruned": dict(self.pruned), "share": self.share, "sparsity": self.sparsity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned. Raises KeyError if a weight is missing."""
        for name, mine in self.pruned.items():
            local_tensor(mine).copy_(local_tensor(state["pruned"][name]))
        self.share, self.sparsity = state["share"], state["sparsity"]


_LARGEST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Part:
    """Shard of a weight that this rank holds.

    `scores`: int32, of any shape; the larger the score, the larger the weight; -1 for elements that are zero already.
    `number`: index of the shard, in the order of the weight's rows; shards of one number are the same. `counts`: true
    on one of the ranks that hold the shard.
    """

    scores: torch.Tensor
    number: int
    counts: bool


def scores_of(weight: torch.Tensor, pruned: torch.Tensor) -> torch.Tensor:
    """Return the scores of this rank's shard of a weight, plain or a DTensor.

    The bits of fp32 values ≥ 0, read as integers, have the same order as the values. fp32 holds all formats of weights.

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
            (part.scores < threshold) | (tied & (tied.flatten().cumsum(0).view(tied.shape) <= count))
            for part, tied, count in zip(parts, equal, allowed, strict=True)
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


def whole(tensor: Any) -> torch.Tensor:
    """Return a whole tensor on the CPU, gathered if it is sharded. Collective if ranks hold shards."""
    gathered: torch.Tensor = tensor.detach()
    if is_sharded(gathered):
        is_bool = gathered.dtype is torch.bool
        gathered = (gathered.to(torch.uint8) if is_bool else gathered).full_tensor()  # type: ignore[attr-defined]
        gathered = gathered.bool() if is_bool else gathered
    return gathered.cpu()


def sizes_of(group: Group, weights: Mapping[str, torch.Tensor], pruned: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the root mean square of each unit's weights, float64 [units]; -1 for units that are zero already.

    Only convolutions and linear layers count: some norms begin with a gain of 0. Collective if ranks hold shards.
    """
    squares, count = torch.zeros(group.num_channels, dtype=torch.float64), 0
    is_gone = torch.ones(group.num_channels, dtype=torch.bool)
    for name, weight in weights.items():
        is_gone &= whole(pruned[name]).flatten(1).all(1) if weight.ndim > 1 else whole(pruned[name])
        if weight.ndim > 1:
            rows = whole(weight).double().flatten(1)
            squares += rows.square().sum(1)
            count += rows.shape[1]
    sizes = (squares.view(group.num_units, -1).mean(1) / count).sqrt()
    return sizes.masked_fill(is_gone.view(group.num_units, -1).all(1), -1.0)


def smallest_units(sizes: Sequence[torch.Tensor], share: float, *, together: bool) -> list[torch.Tensor]:
    """Return the units of each group to remove, bool [units]; one unit of each group always stays.

    `share` is that of each group, or of all groups `together`. Of equal units the first are removed.
    """
    if not together:
        return [_smallest(size, min(round(share * len(size)), len(size) - 1)) for size in sizes]
    lasting = [size.clone() for size in sizes]
    for size in lasting:
        size[len(size) - 1 - int(size.flip(0).argmax())] = torch.inf
    total = sum(map(len, sizes))
    chosen = _smallest(torch.cat(lasting), min(round(share * total), total - len(sizes)))
    return list(torch.split(chosen, [len(size) for size in sizes]))


def _smallest(sizes: torch.Tensor, count: int) -> torch.Tensor:
    chosen = torch.zeros(len(sizes), dtype=torch.bool)
    chosen[sizes.argsort(stable=True)[:count]] = True
    return chosen


def rows_like(weight: Any, rows: torch.Tensor) -> torch.Tensor:
    """Return `rows`, bool [channels], as this rank's shard of a mask of `weight`."""
    full = rows.to(weight.device).view(-1, *[1] * (weight.ndim - 1)).expand(weight.shape).contiguous()
    if not is_sharded(weight):
        return full
    from torch.distributed.tensor import distribute_tensor  # late: it takes half a second, and FSDP has it by now

    cut: torch.Tensor = distribute_tensor(full, weight.device_mesh, weight.placements, src_data_rank=None).to_local()
    return cut


NamedGroup = tuple[Group, Sequence[str]]
"""A group, and the names of the tensors that make its channels."""


def pruned(model: nn.Module, prune: PruneConfig) -> nn.Module:
    """Return a pruned copy of `model`, which is whole and on the CPU, without pruned channels.

    The smallest weights become zero all at once.

    Raises:
        ConfigError: the model has nothing to prune in this way.
    """
    made = copy.deepcopy(model).requires_grad_(True)
    groups: list[NamedGroup] = []
    if prune.method is PruneMethod.channels:
        groups = [(group, [*tensors_of(made, group)]) for group in groups_to_prune(made, prune)]
        names = [name for _, of_group in groups for name in of_group]
    else:
        names, _ = weights_to_prune(made, prune)
    here = dict(made.named_parameters())
    masks = Masks({name: here[name] for name in names})
    masks.share = final_sparsity(prune)
    choose(masks, prune, groups, RankGroup())
    return (shrink(made) if groups else made).requires_grad_(False)


@torch.no_grad()
def choose(masks: Masks, prune: PruneConfig, groups: Sequence[NamedGroup], group: RankGroup) -> None:
    """Make the share `masks.share` zero, including all that is zero already. Collective.

    Args:
        groups: with `method=channels`, those whose tensors `masks` holds.
    """
    if prune.method is PruneMethod.channels:
        _choose_channels(masks, prune, groups, group)
    elif prune.method is PruneMethod.n_m:
        _choose_of_each(masks, prune)
    else:
        _choose_weights(masks, prune, group)
    masks.apply()


def _choose_weights(masks: Masks, prune: PruneConfig, group: RankGroup) -> None:
    is_one = prune.scope.name == "global"
    parts = [part_of(weight, masks.pruned[name], group) for name, weight in masks.weights.items()]
    counts = [weight.numel() for weight in masks.weights.values()]
    total, questions = sum(counts), [parts] if is_one else [[part] for part in parts]
    wanted = [round(masks.share * count) for count in ([total] if is_one else counts)]
    chosen = [mask for question in smallest(questions, wanted, group) for mask in question]
    for name, mask in zip(masks.weights, chosen, strict=True):
        masks.take(name, mask)
    masks.sparsity = sum(wanted) / total


def _choose_of_each(masks: Masks, prune: PruneConfig) -> None:
    num_zero = round(masks.share * prune.m)
    for name, weight in masks.weights.items():
        masks.take(name, smallest_of_each(scores_of(weight, masks.pruned[name]), prune.m, num_zero))
    masks.sparsity = num_zero / prune.m


def _choose_channels(masks: Masks, prune: PruneConfig, groups: Sequence[NamedGroup], ranks: RankGroup) -> None:
    sizes = [sizes_of(group, {name: masks.weights[name] for name in names}, masks.pruned) for group, names in groups]
    mine = [units.tolist() for units in smallest_units(sizes, masks.share, together=prune.scope.name == "global")]
    chosen = [torch.tensor(units, dtype=torch.bool) for units in ranks.broadcast(mine)]
    for (group, names), units in zip(groups, chosen, strict=True):
        rows = units.repeat_interleave(group.unit)
        for name in names:
            masks.take(name, rows_like(masks.weights[name], rows))
    masks.sparsity = sum(int(units.sum()) for units in chosen) / sum(map(len, chosen))
