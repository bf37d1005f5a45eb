"""The only conversion of a configuration from untyped to typed: plain values in, `TrainConfig` out."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from hpc_trainer.config.schema.key import ONCE_SET, PASSED_OVER, declared, without_secrets
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.store import FREE_KEYS, VARIANTS, variant_of
from hpc_trainer.errors import ConfigError

if TYPE_CHECKING:  # its import takes 0.1 s, for which ranks and `status` need not wait
    from omegaconf import DictConfig


T = TypeVar("T")


class Memo:
    """Cache that calls a function once for each distinct set of argument objects, which must not change afterwards."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], tuple[Any, tuple[object, ...]]] = {}

    def of(self, compute: Callable[..., T], *parts: object) -> T:
        """Return `compute(*parts)`, computed once for the same objects.

        Equal arguments that are other objects are computed again.
        """
        key = (compute, *map(id, parts))
        kept = self._kept.get(key)
        if kept is None:
            # The arguments are kept as well: Python may give the id of a dead object to another one.
            kept = self._kept[key] = (compute(*parts), parts)
        result: T = kept[0]
        return result


# Key of the root -> True if it is a section: a dataclass, or a mapping of free names.
ROOT_KEYS = {
    field.name: field.name in FREE_KEYS or dataclasses.is_dataclass(field.default_factory)
    for field in dataclasses.fields(TrainConfig)
}

BUT_SEED = tuple(name for name in ROOT_KEYS if name != "seed")

_LATER = frozenset(
    name for name in VARIANTS if (own := declared(TrainConfig, name)) is not None and own.identity is ONCE_SET
)
"""Groups that older specs lack; for such a spec, they have their defaults."""


def to_typed(composed: DictConfig) -> TrainConfig:
    """Return a composed configuration as dataclasses, with interpolations resolved.

    Raises:
        ConfigError: a value is missing (`???`).
        OmegaConfBaseException: a value is of the wrong type, or an interpolation cannot be resolved.
        AttributeError: a section has a key (by `++`) that its dataclass lacks.
    """
    from omegaconf import OmegaConf

    missing = sorted(OmegaConf.missing_keys(composed))
    if missing:
        raise ConfigError(f"{missing[0]} has no value: it must be set, as {missing[0]}=VALUE.")
    config = OmegaConf.to_object(composed)  # also resolves; a second pass would resolve an escaped `\\${`
    if not isinstance(config, TrainConfig):
        raise ConfigError(f"the configuration must be a TrainConfig, not {type(config).__name__}")
    return config


def to_plain(config: TrainConfig, memo: Memo | None = None) -> dict[str, Any]:
    """Return the configuration as values that JSON can hold: enums by name, nothing else changed.

    With a `memo`, configurations that share a section share its plain form too.
    """
    # By hand: OmegaConf's own conversion (to_container of structured) takes 16 ms a point, this one 0.1 ms.
    memo = memo or Memo()
    shared = memo.of(_plain_but_seed, memo, *but_seed(config))
    return {**shared, "seed": config.seed}


def but_seed(config: TrainConfig) -> list[Any]:
    """Return the values of all root keys but `seed`. Most grids have many seeds, and handle all other keys once."""
    return [getattr(config, name) for name in BUT_SEED]


def _plain_but_seed(memo: Memo, *parts: Any) -> dict[str, Any]:
    values = dict(zip(BUT_SEED, parts, strict=True))
    return {name: memo.of(plain_value, values.get(name)) for name in ROOT_KEYS}


def plain_value(value: Any) -> Any:
    """Return a value or a section of a configuration as values that JSON can hold."""
    if dataclasses.is_dataclass(value):
        return {field.name: plain_value(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, dict):
        return {key: plain_value(item) for key, item in value.items()}
    return [plain_value(item) for item in value] if isinstance(value, list) else value


def from_plain(plain: Mapping[str, Any]) -> TrainConfig:
    """Return the configuration of a frozen spec, as the inverse of `to_plain`.

    Keys that an older version did not have get their defaults. Values are read by the types of the dataclasses, without
    OmegaConf: a frozen configuration is resolved and was checked before.

    Raises:
        ConfigError: a key is unknown or a value of the wrong type.
    """
    try:
        nodes = {
            group: variant_of(group, dict(plain[group])) for group in VARIANTS if group in plain or group not in _LATER
        }
        config: TrainConfig = _typed(TrainConfig, plain, "", nodes)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"the frozen configuration does not fit this version of hpc_trainer: {error}") from error
    return config


def section_from_plain(kind: type[T], values: Mapping[str, Any]) -> T:
    """Return a section as the dataclass `kind`; fields that it lacks get their defaults.

    Raises:
        ValueError: a key is unknown or a value of the wrong type.
    """
    made: T = _typed(kind, values, "")
    return made


def _typed(hint: Any, value: Any, key: str, nodes: Mapping[str, Any] = {}) -> Any:
    """Return a deep copy of `value` as the type that `hint` says.

    Raises:
        ValueError: a key is unknown or a value of the wrong type; the message names the key.
    """
    if hint is Any:
        return copy.deepcopy(value)
    if isinstance(hint, types.UnionType):
        kinds = kinds_of(hint)
        fitting = next((kind for kind in kinds if type(value) is kind), kinds[0])  # such as a number or a text
        return None if value is None else _typed(fitting, value, key)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        inner = hints(hint)
        unknown = sorted(value.keys() - inner.keys())
        if unknown:
            raise ValueError(f"{_join(key, unknown[0])} is not a key of {hint.__name__}")
        made = {name: _typed(nodes.get(name, inner[name]), item, _join(key, name)) for name, item in value.items()}
        return hint(**made)
    if typing.get_origin(hint) is list and isinstance(value, list):
        return [_typed(typing.get_args(hint)[0], item, key) for item in value]
    if typing.get_origin(hint) is dict and isinstance(value, Mapping):
        return {name: _typed(typing.get_args(hint)[1], item, _join(key, name)) for name, item in value.items()}
    if hint is float and type(value) is int:
        return float(value)
    if isinstance(hint, enum.EnumMeta) and value in hint.__members__:
        return hint[value]
    if type(value) is not hint or value == "???":
        raise ValueError(f"{key}={value!r} is not of type {getattr(hint, '__name__', hint)}")
    return value


@functools.cache
def hints(kind: Any) -> dict[str, Any]:
    """Return the types of the fields of a dataclass."""
    return typing.get_type_hints(kind)


def kinds_of(hint: Any) -> list[Any]:
    """Return the types that a value may have, without None."""
    if not isinstance(hint, types.UnionType):
        return [hint]
    return [kind for kind in typing.get_args(hint) if kind is not type(None)]


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def hyperparameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of a configuration that determine the computation: no environment, no set-up commands.

    Trackers get them, so secrets are redacted, as in the names of runs.
    """
    return {name: without_secrets(name, value) for name, value in config.items() if name not in PASSED_OVER}
