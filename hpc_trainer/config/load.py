"""The one crossing from untyped to typed: plain values in, `TrainConfig` out."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpc_trainer.config.memo import Memo
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.store import FREE_KEYS, VARIANTS, variant_of
from hpc_trainer.errors import ConfigError

# Key of the root -> whether it is a section: a dataclass, or a mapping of free names.
ROOT_KEYS = {
    each.name: each.name in FREE_KEYS or dataclasses.is_dataclass(each.default_factory)
    for each in dataclasses.fields(TrainConfig)
}


def to_typed(composed: DictConfig) -> TrainConfig:
    """A composed configuration as dataclasses, interpolations resolved.

    Raises:
        ConfigError: a value is missing (`???`), of the wrong type, or an interpolation leads nowhere.
    """
    try:
        missing = sorted(OmegaConf.missing_keys(composed))
        if missing:
            raise ConfigError(f"{missing[0]} has no value: it must be set, as {missing[0]}=VALUE.")
        OmegaConf.resolve(composed)
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key or 'configuration'}: {error.msg or error}") from error
    except AttributeError as error:  # `++` adds a key to a typed section, and only the dataclass notices
        raise ConfigError(f"a key was added that its section does not have: {error}.") from error
    if not isinstance(config, TrainConfig):
        raise ConfigError(f"the configuration must be a TrainConfig, not {type(config).__name__}")
    return config


def to_plain(config: TrainConfig, memo: Memo | None = None) -> dict[str, Any]:
    """The configuration as what JSON can hold: enums by name, nothing else changed.

    With a `memo`, configurations that share a section share its plain form too.
    """
    # By hand: OmegaConf's own way (to_container of structured) takes 16 ms a point, this 0.1 ms.
    of = (memo or Memo()).of
    return {
        name: of(_plain, getattr(config, name)) if is_section else _plain(getattr(config, name))
        for name, is_section in ROOT_KEYS.items()
    }


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def from_plain(plain: Mapping[str, Any]) -> TrainConfig:
    """The inverse of `to_plain`, for frozen specs.

    Raises:
        ConfigError: a key is unknown or a value of the wrong type.
    """
    try:
        root = OmegaConf.structured(TrainConfig)
        for group in VARIANTS:
            root[group] = OmegaConf.structured(variant_of(group, set(plain[group])))
        merged = OmegaConf.merge(root, dict(plain))
    except (OmegaConfBaseException, KeyError, TypeError) as error:
        raise ConfigError(f"the frozen configuration does not fit this version of hpc_trainer: {error}") from error
    assert isinstance(merged, DictConfig)
    return to_typed(merged)
