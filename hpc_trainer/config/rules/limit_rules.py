"""Numbers within the limits that each key declares (`schema/key.py`)."""

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

# Of these another rule says more: what 0 means, or what else the limit hangs on.
_TOLD_ELSEWHERE = frozenset({
    "cluster.signal_lead_s", "schedule.warmup_steps", "train.logical_ranks", "train.early_stop.patience",
    "train.ema_decay",
})  # fmt: skip
SECTIONS = tuple(name for name, is_section in ROOT_KEYS.items() if is_section and name not in FREE_KEYS)


def limit_problems(config: TrainConfig, memo: Memo) -> Iterator[str]:
    """Numbers outside of their limits, a line each. A section that several points share is looked at once."""
    for name in SECTIONS:
        yield from memo.of(section_problems, name, getattr(config, name))


def section_problems(name: str, section: Any) -> list[str]:
    """The same of one section, which may stand elsewhere than in a configuration, as those of `replay.data`."""
    kind: Any = type(section)
    return [line for each in keys_of(kind, name) for line in _of_key(each, _value(section, each.name))]


def _of_key(each: Declared, value: Any) -> Iterator[str]:
    if each.key.limits is None or each.name in _TOLD_ELSEWHERE:
        return
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from within(f"{each.name}[{index}]", item, each.key.limits, each.default[min(index, 1)])
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from within(f"{each.name}[{name}]", item, each.key.limits, 1)
    elif isinstance(value, (int, float)):  # not null, nor a word as auto
        yield from within(each.name, value, each.key.limits, each.default)


@functools.cache
def keys_of(kind: Any, section: str) -> tuple[Declared, ...]:
    """The keys of a section of this kind, nested ones too."""
    return tuple(each for each in all_keys(kind, f"{section}.") if each.section is None)


def _value(section: Any, name: str) -> Any:
    return attrgetter(name.partition(".")[2])(section)
