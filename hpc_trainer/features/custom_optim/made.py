"""Construction of the optimizer of `optim=custom`, and refusals that only its class can decide."""

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
    """Return the groups of `recipe` with the class of `optim._target_`.

    Raises:
        ConfigError: now or when the optimizer is made: the target does not exist, is not trusted, or refuses its
            arguments.
    """
    kind: Any = locate("optim._target_", config._target_, trust)

    def make(groups: list[Group]) -> torch.optim.Optimizer:
        try:
            built: torch.optim.Optimizer = kind(groups, lr=config.lr, **config.kwargs)
        except ConfigError:  # a ConfigError is a ValueError too
            raise
        except (ValueError, TypeError) as error:
            raise _refusal(config, error) from error
        _check(config, built)
        begin_momenta(built)
        return built

    return Recipe(recipe.groups, make)


def _refusal(config: CustomOptimConfig, error: Exception) -> ConfigError:
    """Return the error of the optimizer's class, with the arguments that it was given."""
    said = str(error).rstrip(".")
    fix = "It is built as Class(groups, lr=optim.lr, **optim.kwargs): give it arguments that it takes."
    if config._target_.rpartition(".")[2] == "Muon":
        fix = "Use optim=muon, which gives AdamW what is no hidden matrix."
    return ConfigError(f"{_named(config)}: {said}. {fix}")


def _check(config: CustomOptimConfig, built: Any) -> None:
    """Check what `_target_` has built.

    Raises:
        ConfigError: it is no optimizer, its steps need a closure, or it lacks the weight decay that is configured.
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
