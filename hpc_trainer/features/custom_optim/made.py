"""How the optimizer of `optim=custom` is made, and what it is refused for then: what only the class itself can tell."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from hpc_trainer.config.schema.optim import CustomOptimConfig
from hpc_trainer.config.targets import locate
from hpc_trainer.errors import ConfigError
from hpc_trainer.training.optim.build import Group, Recipe, begin_momenta


def recipe_of(config: CustomOptimConfig, recipe: Recipe, trust: Sequence[str] = ()) -> Recipe:
    """The groups of `recipe`, and the class of `optim._target_`.

    Raises ConfigError, now or when it is made: it leads nowhere, is not trusted, or refuses what it is given.
    """
    kind: Any = locate("optim._target_", config._target_, trust)

    def make(groups: list[Group]) -> torch.optim.Optimizer:
        try:
            built: torch.optim.Optimizer = kind(groups, lr=config.lr, **config.kwargs)
        except ConfigError:  # a ValueError too
            raise
        except (ValueError, TypeError) as error:
            raise _refusal(config, error) from error
        _check(config, built)
        begin_momenta(built)
        return built

    return Recipe(recipe.groups, make)


def _refusal(config: CustomOptimConfig, error: Exception) -> ConfigError:
    """What the optimizer's class said against its arguments, with what it was given."""
    said = str(error).rstrip(".")
    fix = "It is built as Class(groups, lr=optim.lr, **optim.kwargs): give it arguments that it takes."
    if config._target_.rpartition(".")[2] == "Muon":
        fix = "Use optim=muon, which gives AdamW what is no hidden matrix."
    return ConfigError(f"{_named(config)}: {said}. {fix}")


def _check(config: CustomOptimConfig, built: Any) -> None:
    """Of what `_target_` has built.

    Raises:
        ConfigError: it is no optimizer, its steps need a closure, or it has no weight decay and shall have one.
    """
    if not isinstance(built, torch.optim.Optimizer):
        raise ConfigError(
            f"{_named(config)} makes a {type(built).__name__}, and no torch.optim.Optimizer. Name a class of those."
        )
    closure = inspect.signature(type(built).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{_named(config)} needs a closure in each step, to ask for the loss again, and the loop tells it once. "
            "Use optim=adamw."
        )
    if config.weight_decay and "weight_decay" not in built.defaults:
        raise ConfigError(
            f"optim.weight_decay={config.weight_decay:g}: {config._target_} has no weight_decay among its defaults: "
            "nothing would decay. Use optim.weight_decay=0."
        )


def _named(config: CustomOptimConfig) -> str:
    given = f" optim.kwargs={config.kwargs}" if config.kwargs else ""
    return f"optim._target_={config._target_}{given}"
