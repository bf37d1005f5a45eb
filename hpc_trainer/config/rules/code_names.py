"""Rules about a person's own code: which names may be used, and what its values may be. Imports none of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.targets import check_target

_MAY_NAME_CODE = (
    ("model", "_target_"), ("data", "_target_"), ("task", "_target_"), ("optim", "_target_"), ("train", "main"),
)  # fmt: skip


def targets_of(config: TrainConfig | Mapping[str, Any]) -> dict[str, str]:
    """Key -> name of the code that a configuration, typed or plain, is built from: `model._target_`, `train.main`."""
    if isinstance(config, TrainConfig):
        found = {f"{group}.{key}": getattr(getattr(config, group), key, None) for group, key in _MAY_NAME_CODE}
    else:
        found = {f"{group}.{key}": config.get(group, {}).get(key) for group, key in _MAY_NAME_CODE}
        replayed = config.get("replay", {}).get("data", [])
        found |= {f"replay.data[{place}]._target_": each.get("_target_") for place, each in enumerate(replayed)}
    return {key: str(target) for key, target in found.items() if target is not None}


def packages_of(config: TrainConfig) -> list[str]:
    """The top-level packages whose sources decide what a run does: ours, and those that it names."""
    named = {target.partition(".")[0] for target in targets_of(config).values()} - {"torch"}
    return sorted({"hpc_trainer", *named, *config.snapshot.packages})


def target_problems(config: TrainConfig) -> Iterator[str]:
    """Names of code that are not on the allow-list."""
    for key, target in targets_of(config).items():
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
