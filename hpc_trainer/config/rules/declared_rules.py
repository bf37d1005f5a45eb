"""Rules that keys declare in the schema: limits of numbers, items of lists and mappings, keys without an effect."""

from __future__ import annotations

import functools
import re
import typing
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from hpc_trainer.config.load import ROOT_KEYS, Memo, hints
from hpc_trainer.config.schema.key import Declared, declared_keys
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.store import FREE_KEYS
from hpc_trainer.config.table.choice import holds, shown, state, typed

# Keys for which another rule says more: what 0 means, or what else the limit depends on.
_CHECKED_ELSEWHERE = frozenset({
    "cluster.signal_lead_s", "schedule.warmup_steps", "train.logical_ranks", "train.early_stop.patience",
    "train.ema_decay",
})  # fmt: skip
_SECTIONS = tuple(name for name, is_section in ROOT_KEYS.items() if is_section and name not in FREE_KEYS)


class _Declarations(NamedTuple):
    """Declarations of one kind of section, as the rules below read them."""

    items: tuple[tuple[str, type], ...]
    """Name of each list or mapping, and the type of its items."""
    limited: tuple[Declared, ...]
    """Keys with limits, nested ones too."""
    conditional: tuple[Declared, ...]
    """Keys that have an effect only with other values, nested ones too."""


@functools.cache
def _declarations(kind: Any, section: str) -> _Declarations:
    keys = declared_keys(kind, f"{section}.")
    return _Declarations(
        items=_item_types(kind),
        limited=tuple(key for key in keys if key.key.limits is not None and key.name not in _CHECKED_ELSEWHERE),
        conditional=tuple(key for key in keys if key.key.needs),
    )


@functools.cache
def _item_types(kind: Any) -> tuple[tuple[str, type], ...]:
    types = {name: (typing.get_origin(hint), typing.get_args(hint)) for name, hint in hints(kind).items()}
    return tuple(
        (name, args[-1])
        for name, (origin, args) in types.items()
        if origin in (list, dict) and args[-1] in (str, float)
    )


def value_problems(config: TrainConfig, memo: Memo) -> tuple[list[str], list[str]]:
    """Return the problems with wrong types of items in lists and mappings, and with numbers beyond their limits.

    A section that several points share is checked once.
    """
    wrong_items = [
        line for name, kind in _item_types(TrainConfig) for line in _items(name, getattr(config, name), kind)
    ]
    beyond_limits: list[str] = []
    for name in _SECTIONS:
        of_items, of_numbers = memo.of(_section_problems, name, getattr(config, name))
        wrong_items += of_items
        beyond_limits += of_numbers
    return wrong_items, beyond_limits


def section_problems(name: str, section: Any) -> list[str]:
    """Return the problems with values of one section; it may also be one of `replay.data`."""
    wrong_items, beyond_limits = _section_problems(name, section)
    return wrong_items or beyond_limits


def _section_problems(name: str, section: Any) -> tuple[list[str], list[str]]:
    declarations = _declarations(section.__class__, name)
    wrong_items = [
        line for key, kind in declarations.items for line in _items(f"{name}.{key}", getattr(section, key), kind)
    ]
    if wrong_items:  # their limits cannot be checked
        return wrong_items, []
    return [], [
        line
        for declared in declarations.limited
        for line in _limit_problems(declared, attrgetter(declared.name.partition(".")[2])(section))
    ]


def _limit_problems(declared: Declared, value: Any) -> Iterator[str]:
    name, limits, default = declared.name, declared.key.limits or "", declared.default
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from within(f"{name}[{index}]", item, limits, default[min(index, 1)] if default else 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from within(f"{name}[{key}]", item, limits, 1)
    elif isinstance(value, (int, float)):  # neither null nor a text such as auto
        yield from within(name, value, limits, default)


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
    for section in _SECTIONS:
        for declared in _declarations(getattr(config, section).__class__, section).conditional:
            key, value, default = declared.name, attrgetter(declared.name)(config), declared.default
            needs = declared.key.needs or ()
            if value != default and not any(holds(config, need) for need in needs):
                yield (
                    f"{key}={shown(value)} is for {_listed(needs)}, and has no effect with "
                    f"{state(config, ' or '.join(needs))}. Use {key}={shown(default)}, its default, or {_first(needs)}."
                )


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
