"""Values that a condition may read from a point: the choice of a group, or the value of a key."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any

from hpc_trainer.config.keys import DECLARED
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.errors import ConfigError, did_you_mean


class PointValues:
    """Values of one composed point, by dotted key or name of a group."""

    def __init__(self, config: TrainConfig, choices: Callable[[], Mapping[str, str | None]]) -> None:
        self._config = config
        self._choices = choices

    def __call__(self, name: str) -> Any:
        """Return the value of `name`; a group gives its choice, an enum its name, a key of another variant None.

        Raises:
            ConfigError: no point has such a key or group; the message names the nearest one.
        """
        if "." not in name and name in self._choices():
            return self._choices()[name]
        value: Any = self._config
        for part in name.split("."):
            if isinstance(value, dict):
                value = value.get(part)
            elif dataclasses.is_dataclass(value) and part in {field.name for field in dataclasses.fields(value)}:
                value = getattr(value, part)
            else:
                self._check(name)
                return None
        if dataclasses.is_dataclass(value):
            keys = ", ".join(f"{name}.{field.name}" for field in dataclasses.fields(value))
            raise ConfigError(f"{name} in a condition is a section. Use one of its keys: {keys}.")
        return value.name if isinstance(value, enum.Enum) else value

    def _check(self, name: str) -> None:
        if name not in DECLARED:
            legal = sorted({*DECLARED, *self._choices()})
            raise ConfigError(f"{name} in a condition: no such key or group. {did_you_mean(name, legal)}".rstrip())
