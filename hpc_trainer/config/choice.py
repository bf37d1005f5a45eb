"""Choices as one types them, as `parallel.sync` or `model=gpt|custom`, and whether a configuration makes them.

    key             any value but its default
    key=a|b         one of these values, as on the command line
    choice & choice both

`model`, `data` and `optim` are told by their kind (`model=resnet` is any of them); `precision`, `schedule` and
`parallel` by the key that a file of the group sets. Properties count as keys: `hardware.device_type=cpu`.
"""

from __future__ import annotations

import enum
import functools
from typing import Any

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.store import VARIANTS

_KEY_OF_GROUP = {
    "schedule": "schedule.name",
    "precision": "precision.compute_dtype",
    "parallel": "parallel.strategy",
}
"""`schedule=wsd` chooses a file that sets schedule.name."""
GROUP_OF_KEY = {key: group for group, key in _KEY_OF_GROUP.items()}


def holds(config: TrainConfig, choice: str) -> bool:
    """True if `config` makes `choice`."""
    return all(_holds(config, part) for part in choice.split(" & "))


def _holds(config: TrainConfig, part: str) -> bool:
    key, _, wanted = part.partition("=")
    value, default = value_of(config, key)
    return shown(value) in wanted.split("|") if wanted else bool(value != default)


def value_of(config: TrainConfig, key: str) -> tuple[Any, Any]:
    """Of a dotted key, or of a group: what it is, and its default."""
    key = _KEY_OF_GROUP.get(key, key)
    section, *path = key.split(".")
    part = getattr(config, section)
    kind: Any = type(part)
    if not path and section in VARIANTS:
        return next((name for name, each in VARIANTS[section].items() if each is kind), ""), ""
    if not path:
        return part, getattr(_fresh(TrainConfig), section)
    return at(part, path), at(_fresh(kind), path)


@functools.cache
def _fresh(kind: Any) -> Any:
    return kind()


def at(part: Any, path: tuple[str, ...] | list[str]) -> Any:
    """The value below `part`."""
    for name in path:
        part = getattr(part, name)
    return part


def state(config: TrainConfig, choice: str) -> str:
    """What `config` says of the keys of a choice, as typed: `parallel=ddp train.compile=true`."""
    keys = dict.fromkeys(part.partition("=")[0] for part in choice.split(" & "))
    return " ".join(f"{typed(key)}={shown(_named(config, key))}" for key in keys)


def _named(config: TrainConfig, key: str) -> Any:
    """Of `model` the name that one types, as `resnet18`."""
    return getattr(config, key).name if key in VARIANTS else value_of(config, key)[0]


def typed(key: str) -> str:
    """A key as it stands on the command line."""
    return GROUP_OF_KEY.get(key, key)


def shown(value: Any) -> str:
    """A value as it stands on the command line."""
    if isinstance(value, enum.Enum):
        return str(value.name)
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
