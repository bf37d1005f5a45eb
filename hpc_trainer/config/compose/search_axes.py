"""Axes of a search among the overrides of a command line: ranges and lists, in Hydra's grammar of sweeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import (
    ChoiceSweep,
    Glob,
    IntervalSweep,
    Override,
    QuotedString,
    RangeSweep,
    Sweep,
)

from hpc_trainer.config.compose.composer import Composer
from hpc_trainer.config.compose.overrides import in_full
from hpc_trainer.config.store import declared_at
from hpc_trainer.errors import ConfigError

_SCALARS = (int, float, str, bool, type(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchAxis:
    """Axis of a search: a range from `low` to `high`, or `choices`."""

    key: str
    line: str
    """The override as the user typed it."""
    low: float = 0.0
    high: float = 0.0
    step: float | None = None
    """Distance of two values of `range(..)`; None for an interval."""
    is_log: bool = False
    is_whole: bool = False
    choices: tuple[Any, ...] = ()
    is_group: bool = False
    """True if the choices are files of a group of `conf/`."""


def split_axes(
    overrides: Sequence[str], config_dirs: Sequence[Path] = (), *, is_of_app: bool = False
) -> tuple[list[str], list[SearchAxis]]:
    """Return the overrides with one value, and the axes; if a key is given twice, the last override counts.

    Args:
        overrides: overrides of a command line.
        config_dirs: folders of your own conf/ files.
        is_of_app: True for overrides of a Hydra app, whose keys have nothing to do with those of hpc_trainer.

    Raises:
        ConfigError: an override does not parse, or an axis has no bounds or no values to draw from.
    """
    with Composer(config_dirs) as composer:
        parsed = composer.parse([line if is_of_app else in_full(line) for line in overrides])
        last = {override.get_key_element(): override for override in parsed}
        kept = [override for override in parsed if last[override.get_key_element()] is override]
        fixed = [override.input_line or "" for override in kept if not override.is_sweep_override()]
        return fixed, [
            _axis(override, None if is_of_app else composer) for override in kept if override.is_sweep_override()
        ]


def conditions_of(overrides: Sequence[str]) -> list[str]:
    """Return the items of the last `search.when=[...]` among the overrides; [] if there is none.

    Raises:
        ConfigError: the value is not a list of texts.
    """
    lines = [line for line in overrides if line.partition("=")[0] == WHEN]
    if not lines:
        return []
    with Composer([]) as composer:
        value = composer.parse(lines[-1:])[0].value()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError(
            f"{lines[-1]}: the value must be a list of texts, as {WHEN}=[\"optim.momentum if optim == 'sgd'\"]."
        )
    return value


WHEN = "search.when"
"""Key with the conditions of axes, given on the command line beside them."""


def _axis(override: Override, composer: Composer | None) -> SearchAxis:
    """Return the axis of an override; `composer` knows our groups and keys, None stands for an app's own."""
    pattern: Any = override.value()
    line, key = override.input_line or "", override.get_key_element()
    group: list[str] = [] if composer is None else composer.choices(override.key_or_group)
    if isinstance(pattern, Glob):
        if composer is None:
            raise ConfigError(f"{line}: name the values of an axis of the app one by one, as {key}=a,b.")
        return SearchAxis(key=key, line=line, choices=tuple(pattern.filter(group)), is_group=True)
    declared = None if composer is None else declared_at(override.key_or_group)
    of_key = declared.default if declared is not None else None
    if isinstance(pattern, ChoiceSweep):
        values = tuple(_value(item, line) for item in pattern.list)
        if isinstance(of_key, float):
            values = tuple(float(value) if type(value) is int else value for value in values)
        return SearchAxis(key=key, line=line, choices=values, is_group=bool(group))
    is_whole_key = isinstance(of_key, int) and not isinstance(of_key, bool)
    if isinstance(pattern, IntervalSweep):
        if pattern.start is None or pattern.end is None:
            raise ConfigError(f"{line}: an interval has two bounds. Use {key}=interval(LOW,HIGH).")
        _check_tags(pattern, line)
        return SearchAxis(
            key=key, line=line, low=pattern.start, high=pattern.end, is_log="log" in pattern.tags,
            is_whole=is_whole_key or (type(pattern.start) is int and type(pattern.end) is int),
        )  # fmt: skip
    assert isinstance(pattern, RangeSweep)
    start, stop, step = pattern.start or 0, pattern.stop, pattern.step or 1
    if stop is None or step <= 0 or start + step >= stop:
        raise ConfigError(f"{line}: a range of a search has two values or more, and a step above 0. Use range(1,10).")
    count = -int(-(stop - start) // step)  # the end is not included
    whole = all(type(number) is int for number in (start, stop, step))
    _check_tags(pattern, line)
    if "log" in pattern.tags and whole and step == 1:
        return SearchAxis(key=key, line=line, low=start, high=stop - 1, is_log=True, is_whole=True)
    if "log" in pattern.tags:
        raise ConfigError(f"{line}: a log axis has no steps. Use {key}=tag(log,interval({start},{stop})), or no tag.")
    return SearchAxis(key=key, line=line, low=start, high=start + (count - 1) * step, step=step, is_whole=whole)


def _check_tags(pattern: Any, line: str) -> None:
    unknown = sorted(pattern.tags - {"log"})
    if unknown:
        raise ConfigError(f"{line}: an axis has only the tag log, not {unknown[0]}.")


def _value(item: Any, line: str) -> Any:
    value = item.text if isinstance(item, QuotedString) else item
    if isinstance(value, (Sweep, Glob)) or not isinstance(value, _SCALARS):
        raise ConfigError(f"{line}: a list of a search holds numbers, texts, true, false or null. List all values.")
    return value
