"""Choices as a user types them, such as `parallel.sync` or `model=gpt|custom`, and whether a configuration makes them.

    key                 any value but its default
    key=a|b             one of these values, as on the command line
    key!=a|b            none of these values
    key<8, key>8        a number below, above
    choice & choice     both; the second is checked only if the first holds
    choice or choice    one of them; & binds more tightly

`model`, `data` and `optim` are identified by their kind (`model=resnet` is any of them); `precision`, `schedule` and
`parallel` by the key that a file of the group sets. Properties count as keys: `hardware.device_type=cpu`.
"""

from __future__ import annotations

import enum
import functools
import operator
import re
import shlex
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.store import VARIANTS

_KEY_OF_GROUP = {
    "schedule": "schedule.name",
    "precision": "precision.compute_dtype",
    "parallel": "parallel.strategy",
    "cluster": "cluster.executor",
}
"""Key that the files of a group set: `schedule=wsd` chooses a file that sets schedule.name."""
_GROUP_OF_KEY = {key: group for group, key in _KEY_OF_GROUP.items()}
_KINDS = {kind: name for variants in VARIANTS.values() for name, kind in variants.items()}
_OF_PROFILE = ("hardware.world_size", "hardware.device_type")
"""Properties that follow from a profile, so no user types them."""
_ORDERS = {"<": operator.lt, ">": operator.gt}
_PART = re.compile(r"([\w.]+)(!=|=|<|>|)(.*)")
Test = Callable[[TrainConfig], bool]


def holds(config: TrainConfig, choice: str) -> bool:
    """Return True if `config` makes `choice`."""
    return test_of(choice)(config)


@functools.cache
def test_of(choice: str) -> Test:
    """Return a test of whether a configuration makes `choice`, parsed once: a grid calls it for each of its points."""
    ways = [[_part(part) for part in way.split(" & ")] for way in choice.split(" or ")]
    if len(ways) == 1 and len(ways[0]) == 1:
        return ways[0][0]
    return lambda config: any(all(part(config) for part in parts) for parts in ways)


def split(part: str) -> tuple[str, str, str]:
    """Return key, sign and value of one part of a choice; sign and value are empty for a key alone."""
    match = _PART.fullmatch(part)
    if match is None:
        raise ValueError(f"{part!r} is not a choice")
    key, sign, value = match.groups()
    return key, sign, value


def _part(part: str) -> Test:
    key, sign, wanted = split(part)
    if not is_there(key):
        return lambda config: False
    read = reader(key)
    if not sign:
        return lambda config: bool(read(config) != default_of(config, key))
    if sign in _ORDERS:
        order, bound = _ORDERS[sign], float(wanted)
        return lambda config: bool(order(read(config), bound))
    values, is_not = frozenset(wanted.split("|")), sign == "!="
    return lambda config: (shown(read(config)) in values) is not is_not


@functools.cache
def is_there(key: str) -> bool:
    """Return False for a key of a feature that is not installed: no configuration makes a choice of it."""
    section, _, rest = _KEY_OF_GROUP.get(key, key).partition(".")
    kinds: list[Any] = [*VARIANTS.get(section, {}).values()] or [type(getattr(_fresh(TrainConfig), section, None))]
    name, _, inner = rest.partition(".")
    kinds = [kind for kind in kinds if not name or hasattr(kind, name)]
    return any(not inner or hasattr(getattr(_fresh(kind), name), inner) for kind in kinds)


@functools.cache
def reader(key: str) -> Callable[[TrainConfig], Any]:
    """Return a function that reads a key's value, or the kind of a group's choice, from a configuration."""
    key = _KEY_OF_GROUP.get(key, key)
    if key in VARIANTS:
        return lambda config: _KINDS.get(type(getattr(config, key)), "")
    return attrgetter(key)


def default_of(config: TrainConfig, key: str) -> Any:
    """Return the default of a key; for a section with variants, the default in the variant that `config` has."""
    section, _, rest = _KEY_OF_GROUP.get(key, key).partition(".")
    kind: Any = type(getattr(config, section))
    return attrgetter(rest)(_fresh(kind))


@functools.cache
def defaults_of(choice: str) -> str:
    """Return the overrides that set a choice's keys to their defaults; none for a section with variants."""
    keys = (key for key in keys_of(choice) if key not in VARIANTS and is_there(key))
    return " ".join(f"{typed(key)}={shown(default_of(TrainConfig(), key))}" for key in keys)


@functools.cache
def _fresh(kind: Any) -> Any:
    return kind()


@functools.cache
def keys_of(choice: str) -> tuple[str, ...]:
    """Return the keys that a choice names, in its order."""
    parts = (part for way in choice.split(" or ") for part in way.split(" & "))
    return tuple(dict.fromkeys(split(part)[0] for part in parts))


def state(config: TrainConfig, choice: str) -> str:
    """Return the values that `config` has for a choice's keys, as typed: `parallel=ddp train.compile=true`.

    If the choice holds, only the alternatives that hold are used.
    """
    return " ".join(_stated(config, key) for key in keys_of(held(config, choice)))


def held(config: TrainConfig, choice: str) -> str:
    """Return the alternatives of a choice that `config` makes; all of them if it makes none."""
    ways = choice.split(" or ")
    return " or ".join([way for way in ways if holds(config, way)] or ways)


def _stated(config: TrainConfig, key: str) -> str:
    """Return a key's value as typed: a model by its name (`resnet18`), a profile's value with the profile's name."""
    if key in VARIANTS:
        return f"{key}={getattr(config, key).name}"
    value = shown(reader(key)(config))
    if key in _OF_PROFILE:
        return f"{key.partition('.')[2]}={value} (hardware={config.hardware.name})"
    return f"{typed(key)}={value}"


def typed(key: str) -> str:
    """Return a key as the user types it on the command line."""
    return _GROUP_OF_KEY.get(key, key)


def shown(value: Any) -> str:
    """Return a value as the user types it on the command line."""
    if isinstance(value, enum.Enum):
        return str(value.name)
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def typed_words(overrides: Iterable[str]) -> str:
    """Return the words of a command as a user types them in a shell, with as few quotes as possible."""
    return " ".join(map(_typed_word, overrides))


def _typed_word(word: str) -> str:
    quoted = _QUOTED.fullmatch(word)
    if quoted is not None and quoted["value"].lower() not in _OTHER_TYPES:
        return f"{quoted['key']}{quoted['value']}"
    if "'" in word and not _SPECIAL.search(word):
        return f'"{word}"'
    return shlex.quote(word)


_QUOTED = re.compile(r"(?P<key>[+~]*[\w.@/-]+=)'(?P<value>[A-Za-z_][\w./-]*)'")
"""Override whose quotes for Hydra are not needed."""
_OTHER_TYPES = frozenset({"null", "true", "false", "nan", "inf"})
_SPECIAL = re.compile(r'["$`\\!\n]')
"""Characters that a shell interprets within double quotes."""
