"""Keys that would have no effect: each says in the schema what it goes with (`schema/key.py`)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, NamedTuple

from hpc_trainer.config.schema.key import declared
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.choice import holds, shown, state, typed


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
            value = attrgetter(".".join(limited.path))(part)
            if value != limited.default and not any(holds(config, need) for need in limited.needs):
                key = ".".join((section, *limited.path))
                yield (
                    f"{key}={shown(value)} is for {_listed(limited.needs)}, and has no effect with "
                    f"{state(config, ' or '.join(limited.needs))}. Use {key}={shown(limited.default)}, its default, or "
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


def _listed(needs: tuple[str, ...]) -> str:
    """`parallel.sync=post_local_sgd or diloco`."""
    values: dict[str, list[str]] = {}
    for need in needs:
        key, _, value = need.partition("=")
        values.setdefault(typed(key), []).append(value)
    return " or ".join(f"{key}={' or '.join(given) or '...'}" for key, given in values.items())


def _first(needs: tuple[str, ...]) -> str:
    key, _, value = needs[0].partition("=")
    return f"{typed(key)}={value}" if value else f"another value of {typed(key)}"
