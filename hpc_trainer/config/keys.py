"""Every key of the configuration, with what hangs on it, as the schemas declare it (`schema/key.py`)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from hpc_trainer.config.schema.key import Key, declared
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.store import VARIANTS


class Declared(NamedTuple):
    """One field of one schema."""

    name: str
    """As one types it."""
    kind: Any
    """The dataclass."""
    field: dataclasses.Field[Any]
    key: Key
    """What its section says is filled in."""

    @property
    def section(self) -> Any:
        """The dataclass that it holds; None of a key."""
        factory: Any = self.field.default_factory
        return factory if dataclasses.is_dataclass(factory) else None

    @property
    def default(self) -> Any:
        """What it is where nobody sets it; lists, mappings and sections are made anew."""
        factory = self.field.default_factory
        return self.field.default if factory is dataclasses.MISSING else factory()


def all_keys(kind: Any = TrainConfig, prefix: str = "", above: Key | None = None) -> Iterator[Declared]:
    """Sections and keys, each section before its keys; what several variants of a group have comes for each.

    Raises:
        TypeError: a field is declared without `key(...)` or `section(...)`.
    """
    for each in dataclasses.fields(kind):
        said = declared(kind, each.name)
        if said is None:
            raise TypeError(
                f"{kind.__name__}.{each.name} must say what hangs on it. Declare it with key(...) (schema/key.py)."
            )
        one = Declared(f"{prefix}{each.name}", kind, each, _filled_in(said, above))
        yield one
        if one.section is not None:
            variants = {} if prefix else VARIANTS.get(each.name, {})
            for inner in variants.values() or (one.section,):
                yield from all_keys(inner, f"{one.name}.", one.key)


def _filled_in(said: Key, above: Key | None) -> Key:
    if above is None:
        return said
    return dataclasses.replace(
        said,
        identity=said.identity or above.identity,
        resume=said.resume or above.resume,
        in_graph=above.in_graph if said.in_graph is None else said.in_graph,
    )


DECLARED: dict[str, Declared] = {each.name: each for each in all_keys()}
"""By name, sections too; of a key that several variants have, that of the last one."""
KEYS: dict[str, Key] = {name: each.key for name, each in DECLARED.items()}
"""Variants of a group agree on what hangs on a key that they share."""


def declared_at(key: str) -> Declared | None:
    """The key or section that `key` is, or is in: of `optim.betas[1]` that is `optim.betas`. None without one."""
    while key and key not in DECLARED:
        key = re.sub(r"(\[[^\[]*\]|(^|\.)[^.\[]*)$", "", key)
    return DECLARED.get(key)
