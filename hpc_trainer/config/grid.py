"""A command line with sweeps -> the points of its grid, in the order of the axes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.override_parser.types import Glob, Override

from hpc_trainer.config.compose import Composer, default_overrides, override_value
from hpc_trainer.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One point: all its overrides, and the value it has on each axis."""

    overrides: tuple[str, ...]
    axes: dict[str, str]
    num_fixed: int = 0
    """So many overrides, the first ones, are the same on all points."""


def expand(composer: Composer, overrides: Sequence[str]) -> list[Point]:
    """The points of a grid: the product of all axes, the first axis slowest.

    Axes are sweeps on the command line (`a=1,2`, `range()`, `choice()`, `glob()`) and those of `sweep.axes` in
    the configuration; an axis on the command line replaces one of the same key.

    Raises:
        ConfigError: an override does not parse, or an axis of the configuration is not a list with a value.
    """
    parsed = composer.parse(overrides)
    given = [override.input_line or "" for override in parsed if not override.is_sweep_override()]
    defaults = list(default_overrides(overrides))
    swept = [override for override in parsed if override.is_sweep_override()]
    axes = {override.get_key_element(): _sweep_values(composer, override) for override in swept}
    # A sweep over choices of sweep/ or experiment/ may bring axes of its own: those are read for each choice.
    heads = {key: values for key, values in axes.items() if key in ("sweep", "experiment")}
    tails = {key: values for key, values in axes.items() if key not in heads}
    points: list[Point] = []
    for head in _product(heads):
        base = [*given, *(f"{key}={value}" for key, value in head.items())]
        named = {key.split("@")[0] for key in tails} | {_key(line) for line in base}
        in_config = _config_axes(composer, [*defaults, *base, *_first(tails)], len(defaults) + len(given))
        from_config = {key: values for key, values in in_config.items() if key not in named}
        # The person's own file is the weakest: an axis of the configuration replaces its value.
        fixed = [*(line for line in defaults if _key(line) not in from_config), *given]
        for tail in _product({**tails, **from_config}):
            chosen = {**head, **tail}
            lines = (f"{key}={value}" for key, value in chosen.items())
            axes_of_point = {key.lstrip("+"): value for key, value in chosen.items()}
            points.append(Point(overrides=(*fixed, *lines), axes=axes_of_point, num_fixed=len(fixed)))
    return points


def _product(axes: dict[str, list[str]]) -> list[dict[str, str]]:
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def _first(axes: dict[str, list[str]]) -> list[str]:
    return [f"{key}={values[0]}" for key, values in axes.items()]


def _key(line: str) -> str:
    return line.split("=", 1)[0].lstrip("+~").split("@")[0]


def _sweep_values(composer: Composer, override: Override) -> list[str]:
    pattern: object = override.value()  # its annotation leaves Glob out
    if isinstance(pattern, Glob):
        # Hydra's own glob() offers the schemas too, and not what --config-dir adds.
        values = pattern.filter(composer.choices(override.key_or_group))
    else:
        values = list(override.sweep_string_iterator())
    if not values:
        raise ConfigError(f"{override.input_line}: an axis needs at least one value.")
    return values


def _config_axes(composer: Composer, overrides: Sequence[str], num_fixed: int) -> dict[str, list[str]]:
    axes: dict[str, list[str]] = {}
    for key, values in composer.fast.compose(overrides, num_fixed).config.sweep.axes.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"sweep.axes.{key}={values!r} must be a list with at least one value, as [1, 2].")
        axes[str(key)] = [str(value) if composer.is_group(str(key)) else override_value(value) for value in values]
    return axes
