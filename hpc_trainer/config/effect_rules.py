"""Keys that would have no effect: each says in the schema what it goes with (`schema/key.py`)."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from hpc_trainer.config.schema.key import declared
from hpc_trainer.config.schema.train import TrainConfig

# As one types them: `schedule=wsd` chooses a file that sets schedule.name.
_CHOSEN_BY_GROUP = {
    "schedule.name": "schedule",
    "precision.compute_dtype": "precision",
    "parallel.strategy": "parallel",
}


class Limited(NamedTuple):
    """A key that counts with others only."""

    path: tuple[str, ...]
    """Below its section."""
    default: Any
    needs: tuple[str, ...]


def effect_problems(config: TrainConfig) -> Iterator[str]:
    """Keys that are not at their default and change nothing, a line each. A loop of one's own may read any key."""
    if config.train.main is not None:
        return
    for section in _SECTIONS:
        part = getattr(config, section)
        kind: Any = type(part)
        for limited in limited_keys(kind):
            value = _at(part, limited.path)
            if value != limited.default and not any(_holds(config, need) for need in limited.needs):
                key = ".".join((section, *limited.path))
                yield (
                    f"{key}={_shown(value)} is for {_listed(limited.needs)}, and has no effect with "
                    f"{_state(config, limited.needs)}. Use {key}={_shown(limited.default)}, its default, or "
                    f"{_first(limited.needs)}."
                )


@functools.cache
def limited_keys(kind: Any) -> tuple[Limited, ...]:
    """The keys of a section, nested ones too, that say what they go with."""
    found: list[Limited] = []
    fresh = kind()
    for each in dataclasses.fields(kind):
        value = getattr(fresh, each.name)
        said = declared(kind, each.name)
        if said is not None and said.needs:
            found.append(Limited((each.name,), value, said.needs))
        if dataclasses.is_dataclass(value):
            nested: Any = type(value)
            inner = limited_keys(nested)
            found += [limited._replace(path=(each.name, *limited.path)) for limited in inner]
    return tuple(found)


_FRESH: dict[str, Any] = {each.name: each.default_factory for each in dataclasses.fields(TrainConfig)}
_SECTIONS = tuple(name for name, kind in _FRESH.items() if dataclasses.is_dataclass(kind))


def _holds(config: TrainConfig, need: str) -> bool:
    key, _, wanted = need.partition("=")
    value, default = _value(config, key)
    return _shown(value) == wanted if wanted else bool(value != default)


def _value(config: TrainConfig, key: str) -> tuple[Any, Any]:
    """Of a dotted key: what it is, and its default."""
    section, *path = key.split(".")
    part = getattr(config, section)
    kind: Any = type(part)
    return _at(part, path), _at(_fresh(kind), path)


@functools.cache
def _fresh(kind: Any) -> Any:
    return kind()


def _at(part: Any, path: tuple[str, ...] | list[str]) -> Any:
    for name in path:
        part = getattr(part, name)
    return part


def _listed(needs: tuple[str, ...]) -> str:
    """`parallel.sync=post_local_sgd or diloco`."""
    values: dict[str, list[str]] = {}
    for need in needs:
        key, _, value = need.partition("=")
        values.setdefault(_typed(key), []).append(value)
    return " or ".join(f"{key}={' or '.join(given) or '...'}" for key, given in values.items())


def _first(needs: tuple[str, ...]) -> str:
    key, _, value = needs[0].partition("=")
    return f"{_typed(key)}={value}" if value else f"another value of {_typed(key)}"


def _state(config: TrainConfig, needs: tuple[str, ...]) -> str:
    keys = dict.fromkeys(need.partition("=")[0] for need in needs)
    return " ".join(f"{_typed(key)}={_shown(_value(config, key)[0])}" for key in keys)


def _typed(key: str) -> str:
    return _CHOSEN_BY_GROUP.get(key, key)


def _shown(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return str(value.name)
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
