"""Weights by patterns of their names, with * and ?, as keys of the configuration have them."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

from hpc_trainer.config.name_patterns import unfit
from hpc_trainer.errors import ConfigError


def match_weights(model: nn.Module, patterns: Iterable[str], key: str) -> dict[str, list[nn.Parameter]]:
    """Pattern -> the weights of a whole model that it fits; a tied weight by any of its names.

    Raises ConfigError: one fits none. `key` is where it stands.
    """
    weights = dict(model.named_parameters(remove_duplicate=False))
    found = {}
    for pattern in patterns:
        for problem in unfit(key, [pattern], weights, f"weight of {type(model).__name__}"):
            raise ConfigError(problem)
        found[pattern] = [*dict.fromkeys(weight for name, weight in weights.items() if fnmatchcase(name, pattern))]
    return found
