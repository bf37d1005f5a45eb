"""Selection of weights by name patterns with * and ?, as in keys of the configuration."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

from hpc_trainer.config.name_patterns import unfit
from hpc_trainer.errors import ConfigError


def match_weights(model: nn.Module, patterns: Iterable[str], key: str) -> dict[str, list[nn.Parameter]]:
    """Return for each pattern the weights of a whole model that it matches; a tied weight matches by any of its names.

    Args:
        model: the whole model.
        patterns: name patterns.
        key: the configuration key of the patterns, for messages.

    Raises:
        ConfigError: a pattern matches no weight.
    """
    weights = dict(model.named_parameters(remove_duplicate=False))
    matched = {}
    for pattern in patterns:
        for problem in unfit(key, [pattern], weights, f"weight of {type(model).__name__}"):
            raise ConfigError(problem)
        matched[pattern] = [*dict.fromkeys(weight for name, weight in weights.items() if fnmatchcase(name, pattern))]
    return matched
