"""Choice by size of what becomes zero in a model, during a run or in a model that is taken out of one."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn

from hpc_trainer.config.schema.features.compress import PruneConfig, PruneMethod
from hpc_trainer.features.prune.magnitude import part_of, scores_of, smallest, smallest_of_each
from hpc_trainer.features.prune.masks import Masks
from hpc_trainer.features.prune.schedule import final_sparsity
from hpc_trainer.features.prune.targets import groups_to_prune, weights_to_prune
from hpc_trainer.features.prune.units import rows_like, sizes_of, smallest_units
from hpc_trainer.models.channels import Group, shrink, tensors_of
from hpc_trainer.runtime.rank_group import RankGroup

NamedGroup = tuple[Group, Sequence[str]]
"""A group, and the names of the tensors that make its channels."""


def pruned(model: nn.Module, prune: PruneConfig) -> nn.Module:
    """Return a pruned copy of `model`, which is whole and on the CPU, without pruned channels.

    The smallest weights become zero all at once.

    Raises:
        ConfigError: the model has nothing to prune so.
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
