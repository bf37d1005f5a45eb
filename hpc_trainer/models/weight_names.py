"""Weights by patterns of their names, with * and ?, as keys of the configuration have them."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

from hpc_trainer.config.name_patterns import there_are
from hpc_trainer.errors import ConfigError


def match_weights(model: nn.Module, patterns: Iterable[str], key: str) -> dict[str, list[nn.Parameter]]:
    """Pattern -> the weights of a whole model that it fits; a tied weight by any of its names.

    Raises ConfigError: one fits none. `key` is where it stands.
    """
    weights = dict(model.named_parameters(remove_duplicate=False))
    found = {}
    for pattern in patterns:
        fits = {weight: None for name, weight in weights.items() if fnmatchcase(name, pattern)}
        if not fits:
            what = f"{key} has {pattern!r}, and no weight of {type(model).__name__} is called so."
            raise ConfigError(f"{what} {there_are(pattern, weights)}")
        found[pattern] = [*fits]
    return found
