"""Values of one sweep in Hydra's grammar: `a=1,2`, `range()`, `choice()`, `glob()`; and sweeps that grids refuse."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable

from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, Override, RangeSweep, Sweep

from hpc_trainer.config.checks import figure
from hpc_trainer.config.keys import declared_at
from hpc_trainer.errors import ConfigError

# 10,000 points take 2 s and 50 MiB; a typing error (two axes of 1,000) is caught before it takes minutes.
MAX_POINTS = 100_000
_TRIED = 4  # number of suggested values for an interval


def sweep_values(override: Override, choices: Callable[[str], list[str]]) -> list[str]:
    """Return the values that `override` steps through, as they stand after the `=`.

    Args:
        override: the sweep.
        choices: returns the choices of a group of `conf/`, including those of `--config-dir`.

    Raises:
        ConfigError: the sweep has no value, more than `MAX_POINTS`, or is not a list of values.
    """
    pattern: object = override.value()  # its annotation leaves Glob out
    line = override.input_line
    if isinstance(pattern, Glob):
        # Hydra's own glob() offers the schemas too, and not what --config-dir adds.
        values = pattern.filter(choices(override.key_or_group))
    else:
        _check(override, pattern, choices)
        values = list(override.sweep_string_iterator())
    if not values:
        raise ConfigError(f"{line}: an axis needs at least one value.")
    return values


def _check(override: Override, pattern: object, choices: Callable[[str], list[str]]) -> None:
    line, key = override.input_line, override.get_key_element()
    if isinstance(pattern, IntervalSweep):
        declared = declared_at(override.key_or_group)
        is_whole = declared is not None and isinstance(declared.default, int)
        tried = choices(override.key_or_group) or _between(pattern, is_whole=is_whole)
        raise ConfigError(
            f"{line}: interval() is for programs that draw values from it, and a grid has values of its own. "
            f"Use values, as {key}={','.join(tried)}."
        )
    if isinstance(pattern, RangeSweep):
        _check_range(f"{line}", pattern)
    inner: list[object] = [*pattern.list] if isinstance(pattern, ChoiceSweep) else []
    nested = next((value for value in inner if isinstance(value, (Sweep, Glob))), None)
    if nested is not None:
        what = "range()" if isinstance(nested, RangeSweep) else "interval()"
        what = "glob()" if isinstance(nested, Glob) else "choice()" if isinstance(nested, ChoiceSweep) else what
        raise ConfigError(f"{line}: {what} stands alone, not among other values. Write all values out, as {key}=1,2,3.")


def _check_range(line: str, pattern: RangeSweep) -> None:
    start, stop, step = (value or 0 for value in (pattern.start, pattern.stop, pattern.step))
    if not all(map(math.isfinite, (start, stop, step))) or step == 0:
        raise ConfigError(
            f"{line}: range(FIRST,END,STEP) takes finite numbers, and a STEP other than 0. Use range(1,4)."
        )
    count = (stop - start) / step
    if count > MAX_POINTS:  # Hydra would write them all out, for hours
        raise ConfigError(
            f"{line}: this range has about {figure(count)} values, and a sweep takes at most {MAX_POINTS:,}. "
            "Use a larger step, as range(FIRST,END,STEP)."
        )


def _between(interval: IntervalSweep, *, is_whole: bool) -> Iterable[str]:
    """Return a few values from one end of the interval to the other; positive ones have equal ratios."""
    low, high = float(interval.start or 0), float(interval.end or 0)
    steps = [index / (_TRIED - 1) for index in range(_TRIED)]
    if 0 < low < high < math.inf:
        values = [low * (high / low) ** step for step in steps]
    else:
        values = [low + (high - low) * step for step in steps]
    texts = (str(round(value)) if is_whole else f"{value:.3g}" for value in values)
    return (text for text, _ in itertools.groupby(texts))
