"""Rules that keys declare in the schema: limits of numbers, items of lists and mappings, keys without an effect."""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

from hpc_trainer.config.load import ROOT_KEYS, Memo, hints
from hpc_trainer.config.schema.key import Declared, declared_keys
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.store import FREE_KEYS
from hpc_trainer.config.table.choice import holds, shown, state, typed

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
    return tuple(declared for declared in declared_keys(kind, f"{section}.") if declared.section is None)


def _value(section: Any, name: str) -> Any:
    return attrgetter(name.partition(".")[2])(section)


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


WORDS: Mapping[object, str] = {str: "one text", int: "a whole number", float: "a number", bool: "true or false"}
"""Description of the values of a type, as messages show it."""
# Larger than any real count, step or second; figures beyond it overflow where they are used.
LARGEST = 1e12


def figure(value: float) -> str:
    """Return a number as messages show it."""
    try:
        return f"{value:g}"
    except OverflowError:  # an int of hundreds of digits
        return f"{str(value)[:20]}..."


def at_least(key: str, value: float | None, least: float, most: float = LARGEST) -> Iterator[str]:
    """Yield a problem unless `least` ≤ value ≤ `most`."""
    if value is None:
        yield f"{key} must be set."
    elif not least <= value <= most:  # nan is neither
        rule = f"at least {least:g}" if not value >= least else f"at most {most:.12g}"
        yield f"{key}={figure(value)} must be {rule}. Use {least if not value >= least else most:.12g}."


def _shown(value: float | None) -> str:
    return "null" if value is None else f"{value:g}"


_INTERVAL = re.compile(r"([\[(])(\S+), (\S+)([\])])")


def within(key: str, value: float, limits: str, usual: Any = None) -> Iterator[str]:
    """Yield a problem unless `value` is within `limits`, as a key declares them.

    Args:
        limits: `≥ 1`, `> 0`, `0 to 7`, `18, 34 or 50`, `[0, 1)`; `0 or ≥ 10`.
        usual: a legal value, or None for null; the message suggests it if no limit is itself legal.
    """
    if limits.startswith("0 or ") and value == 0:
        return
    limits = limits.removeprefix("0 or ")
    interval = _INTERVAL.fullmatch(limits)
    if limits.startswith("≥ "):
        yield from at_least(key, value, float(limits[2:]))
    elif limits.startswith("> "):
        if not float(limits[2:]) < value < float("inf"):
            yield f"{key}={figure(value)} must be greater than {limits[2:]} and finite. Use {_shown(usual)}."
    elif interval is not None:
        low, high = float(interval[2]), float(interval[3])
        is_above = low <= value if interval[1] == "[" else low < value
        is_below = value <= high if interval[4] == "]" else value < high
        if not is_above:
            yield f"{key}={figure(value)} must be in {limits}. Use {_shown(low if interval[1] == '[' else usual)}."
        elif not is_below:
            nearest = f"{high:g}" if interval[4] == "]" else f"less than {high:g}"
            yield f"{key}={figure(value)} must be in {limits}. Use {nearest}."
    else:
        numbers = [int(number.replace(",", "")) for number in re.split(" to | or |, ", limits)]
        if " to " in limits:
            yield from at_least(key, value, numbers[0], most=numbers[1])
        elif value not in numbers:
            yield f"{key}={figure(value)} must be {limits}. Use {min(numbers, key=lambda number: abs(number - value))}."
