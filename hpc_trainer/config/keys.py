"""Every key of the configuration with its metadata, as the schemas declare it (`schema/key.py`)."""

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
    """Dotted name, as a user types it."""
    kind: Any
    """Dataclass that declares the field."""
    field: dataclasses.Field[Any]
    key: Key
    """Metadata; what the field leaves open is filled in from its section."""

    @property
    def section(self) -> Any:
        """Dataclass that the field holds; None for a key."""
        factory: Any = self.field.default_factory
        return factory if dataclasses.is_dataclass(factory) else None

    @property
    def default(self) -> Any:
        """Default value; lists, mappings and sections are new objects on each access."""
        factory = self.field.default_factory
        return self.field.default if factory is dataclasses.MISSING else factory()


def all_keys(kind: Any = TrainConfig, prefix: str = "", above: Key | None = None) -> Iterator[Declared]:
    """Yield sections and keys, a section before its keys; a key of several variants of a group once for each variant.

    Raises:
        TypeError: a field is declared without `key(...)` or `section(...)`.
    """
    for field in dataclasses.fields(kind):
        said = declared(kind, field.name)
        if said is None:
            raise TypeError(
                f"{kind.__name__}.{field.name} must say what hangs on it. Declare it with key(...) (schema/key.py)."
            )
        one = Declared(f"{prefix}{field.name}", kind, field, _filled_in(said, above))
        yield one
        if one.section is not None:
            variants = {} if prefix else VARIANTS.get(field.name, {})
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
"""Keys and sections by name; a key of several variants has the declaration of the last one."""
KEYS: dict[str, Key] = {name: each.key for name, each in DECLARED.items()}
"""Metadata by name; variants of a group agree on the metadata of a key that they share."""


def declared_at(key: str) -> Declared | None:
    """Return the key or section that `key` is or is in, as `optim.betas` for `optim.betas[1]`; None without one."""
    while key and key not in DECLARED:
        key = re.sub(r"(\[[^\[]*\]|(^|\.)[^.\[]*)$", "", key)
    return DECLARED.get(key)
