"""Weights of a model that are pruned."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from hpc_trainer.config.name_patterns import fits_any
from hpc_trainer.config.schema.features.compress import PruneConfig
from hpc_trainer.errors import ConfigError
from hpc_trainer.models.channels import Group, groups_of, tensors_of
from hpc_trainer.models.weight_names import match_weights
from hpc_trainer.training.optim.decay import decaying


def weights_to_prune(model: nn.Module, prune: PruneConfig) -> tuple[list[str], list[str]]:
    """Return (names of the pruned weights, names of those whose inputs `prune.m` does not divide).

    `model` is whole. Weights whose inputs `prune.m` does not divide stay whole. Without `prune.include` the pruned
    weights are those of two dimensions or more that are trained, except for norms and embeddings.

    Raises:
        ConfigError: a pattern fits no weight, or none that can be pruned, or none is left.
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
            f"prune.method=channels finds no channel of {type(model).__name__} to remove: of each group one unit "
            "stays, and a unit is what one group of a GroupNorm has. Use more channels, other patterns, or "
            "prune.method=none."
        )
    return groups


def _any(names: Collection[str], patterns: Collection[str]) -> bool:
    return any(fits_any(name, patterns) for name in names)
