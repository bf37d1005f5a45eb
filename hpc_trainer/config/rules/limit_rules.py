"""Rule for numbers: they lie within the limits that each key declares (`schema/key.py`)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from hpc_trainer.config.checks import within
from hpc_trainer.config.keys import Declared, all_keys
from hpc_trainer.config.load import ROOT_KEYS
from hpc_trainer.config.memo import Memo
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.store import FREE_KEYS

# Keys for which another rule says more: what 0 means, or what else the limit depends on.
_TOLD_ELSEWHERE = frozenset({
    "cluster.signal_lead_s", "schedule.warmup_steps", "train.logical_ranks", "train.early_stop.patience",
    "train.ema_decay",
})  # fmt: skip
SECTIONS = tuple(name for name, is_section in ROOT_KEYS.items() if is_section and name not in FREE_KEYS)


def limit_problems(config: TrainConfig, memo: Memo) -> Iterator[str]:
    """Yield each number outside of its limits. A section that several points share is checked once."""
    for name in SECTIONS:
        yield from memo.of(section_problems, name, getattr(config, name))


def section_problems(name: str, section: Any) -> list[str]:
    """Return each number of one section outside of its limits; the section may be one of `replay.data` too."""
    kind: Any = type(section)
    return [line for declared in keys_of(kind, name) for line in _of_key(declared, _value(section, declared.name))]


def _of_key(each: Declared, value: Any) -> Iterator[str]:
    if each.key.limits is None or each.name in _TOLD_ELSEWHERE:
        return
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from within(f"{each.name}[{index}]", item, each.key.limits, each.default[min(index, 1)])
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from within(f"{each.name}[{name}]", item, each.key.limits, 1)
    elif isinstance(value, (int, float)):  # neither null nor a text such as auto
        yield from within(each.name, value, each.key.limits, each.default)


@functools.cache
def keys_of(kind: Any, section: str) -> tuple[Declared, ...]:
    """Return the keys of a section of this kind, nested ones too."""
    return tuple(declared for declared in all_keys(kind, f"{section}.") if declared.section is None)


def _value(section: Any, name: str) -> Any:
    return attrgetter(name.partition(".")[2])(section)
