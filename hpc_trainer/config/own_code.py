"""Rules about a person's own code: which names may be used, and what its values may be. Imports none of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hpc_trainer.config.schema.optim import CustomOptimConfig
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.targets import check_target


def target_problems(config: TrainConfig) -> Iterator[str]:
    """Names of code that are not on the allow-list."""
    named = {"model._target_": config.model._target_, "data._target_": config.data._target_}
    if isinstance(config.optim, CustomOptimConfig):
        named["optim._target_"] = config.optim._target_
    if config.train.main is not None:
        named["train.main"] = config.train.main
    for key, target in named.items():
        problem = check_target(key, target, config.trust)
        if problem:
            yield problem


def param_problems(params: dict[str, Any]) -> tuple[str, ...]:
    """What a frozen run cannot hold of `params`."""
    return tuple(_not_json("params", params))


def _not_json(key: str, value: Any) -> Iterator[str]:
    """A frozen run is JSON: other keys and values would come back to the worker as something else."""
    if isinstance(value, dict):
        for name, item in value.items():
            if isinstance(name, str):
                yield from _not_json(f"{key}.{name}", item)
            else:
                yield f"{key} has the key {name!r}, and keys must be texts. Use '{name}' in quotes."
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _not_json(f"{key}[{index}]", item)
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        yield f"{key}={value!r} must be a number, a text, true, false, null, or lists and mappings of them."
