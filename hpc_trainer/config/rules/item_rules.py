"""Types of the items of lists and mappings: OmegaConf accepts a list of lists from the command line."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterator
from typing import Any

from hpc_trainer.config.checks import WORDS
from hpc_trainer.config.load import ROOT_KEYS, hints
from hpc_trainer.config.memo import Memo
from hpc_trainer.config.schema.train import TrainConfig


def item_problems(config: TrainConfig, memo: Memo) -> Iterator[str]:
    """Yield each item of a wrong type. A section that several points share is checked once."""
    for name, kind in _checked(TrainConfig):
        yield from _items(name, getattr(config, name), kind)
    for name in _sections():
        yield from memo.of(_of_section, name, getattr(config, name))


@functools.cache
def _sections() -> tuple[str, ...]:
    return tuple(name for name, is_section in ROOT_KEYS.items() if is_section)


def _of_section(section: str, part: Any) -> list[str]:
    kind_of: Any = type(part)
    kinds = _checked(kind_of) if dataclasses.is_dataclass(part) else ()
    return [line for name, kind in kinds for line in _items(f"{section}.{name}", getattr(part, name), kind)]


@functools.cache
def _checked(section: Any) -> tuple[tuple[str, type], ...]:
    """Return (key, type of its items) for the lists and mappings of a section."""
    kinds = {name: (typing.get_origin(hint), typing.get_args(hint)) for name, hint in hints(section).items()}
    return tuple(
        (name, args[-1]) for name, (kind, args) in kinds.items() if kind in (list, dict) and args[-1] in (str, float)
    )


def _items(key: str, value: Any, kind: type) -> Iterator[str]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for name, item in pairs:
        if not isinstance(item, (int, float) if kind is float else kind) or isinstance(item, bool):
            where = f"{key}.{name}" if isinstance(value, dict) else f"{key}[{name}]"
            yield f"{where}={item!r} must be {WORDS[kind]}."
