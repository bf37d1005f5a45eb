"""Rule for keys without an effect: each key declares in the schema what it goes with (`schema/key.py`)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from hpc_trainer.config.keys import Declared
from hpc_trainer.config.rules.limit_rules import SECTIONS, keys_of
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.choice import holds, shown, state, typed


def effect_problems(config: TrainConfig) -> Iterator[str]:
    """Yield each key that is not at its default and changes nothing. A user's own loop may read any key."""
    if config.train.main is not None:
        return
    for section in SECTIONS:
        kind: Any = type(getattr(config, section))
        for each in limited_keys(kind, section):
            value, needs = attrgetter(each.name)(config), each.key.needs or ()
            if value != each.default and not any(holds(config, need) for need in needs):
                yield (
                    f"{each.name}={shown(value)} is for {_listed(needs)}, and has no effect with "
                    f"{state(config, ' or '.join(needs))}. Use {each.name}={shown(each.default)}, its default, or "
                    f"{_first(needs)}."
                )


@functools.cache
def limited_keys(kind: Any, section: str) -> tuple[Declared, ...]:
    """Return the keys of a section, nested ones too, that declare what they go with."""
    return tuple(declared for declared in keys_of(kind, section) if declared.key.needs)


def _listed(needs: tuple[str, ...]) -> str:
    """Join needs for a message: `parallel.sync=post_local_sgd or diloco`."""
    values: dict[str, list[str]] = {}
    for need in needs:
        key, _, value = need.partition("=")
        values.setdefault(typed(key), []).append(value)
    return " or ".join(f"{key}={' or '.join(given) or '...'}" for key, given in values.items())


def _first(needs: tuple[str, ...]) -> str:
    key, _, value = needs[0].partition("=")
    return f"{typed(key)}={value}" if value else f"another value of {typed(key)}"
