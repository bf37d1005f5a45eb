"""Expansion of a command line with sweeps to the points of its grid, in the order of the axes."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, Override, RangeSweep, Sweep

from hpc_trainer.config.compose.condition import Condition, read_condition
from hpc_trainer.config.compose.fast_compose import GridComposer
from hpc_trainer.config.compose.overrides import default_overrides, in_full, override_value, parse_common
from hpc_trainer.config.rules.declared_rules import figure
from hpc_trainer.config.schema.train import SweepBlock, SweepConfig
from hpc_trainer.config.store import declared_at
from hpc_trainer.domains import contributions
from hpc_trainer.errors import ConfigError

_GRID_KEYS = frozenset(("axes", "zip", "exclude", "blocks"))
"""Keys of the section `sweep` that describe a grid of runs."""
STAGES = "stages"


def read_stages(composer: GridComposer, given_words: Sequence[str]) -> SweepConfig | None:
    """Return the section `sweep` if the command line chooses a file with stages; None otherwise.

    A configuration that does not compose returns None: the grid reports the problem.
    """
    overrides = [in_full(line) for line in given_words]
    if not any(_key(line) == "sweep" for line in overrides):
        return None
    with contextlib.suppress(ConfigError):
        parsed = composer.parse(overrides)
        given = [
            override.input_line or ""
            for override in parsed
            if not override.is_sweep_override() and not _items(override)
        ]
        sweep = composer.compose_point([*default_overrides(overrides), *given], 0).config.sweep
        return sweep if sweep.stages else None
    return None


@dataclass(slots=True, kw_only=True)  # not frozen: 10,000 instances would take 15 ms more
class Point:
    """Point of a grid: all its overrides, and its value on each axis. Treat it as read-only."""

    overrides: tuple[str, ...]
    axes: dict[str, str]
    num_fixed: int = 0
    """Number of overrides, at the beginning, that are the same on all points of its block."""
    exclude: tuple[Condition, ...] = ()
    """Conditions that need the composed point, which is left out if one is true."""

    def on_each(self) -> list[Point]:
        """Return the point once for each item of its lists of hardware (`hardware=first:a,b`); itself without one.

        Raises:
            ConfigError: a list has an empty item or an item twice, or the lists make too many points.
        """
        lists = {key: items for key, text in self.axes.items() if (items := list_of(key, text)) is not None}
        if not lists:
            return [self]
        for key, items in lists.items():
            if not all(items) or len(set(items)) < len(items):
                raise ConfigError(
                    f"{key}={self.axes[key]}: a list names each choice once, separated by single commas. "
                    f"Use {key}={FIRST}{','.join(dict.fromkeys(filter(None, items))) or 'A,B'}."
                )
        if math.prod(map(len, lists.values())) > _MOST_ITEMS:
            raise ConfigError(
                f"the lists of a run make more than {_MOST_ITEMS} shapes. Shorten {', '.join(lists)}={FIRST}.."
            )
        points = []
        for chosen in itertools.product(*lists.values()):
            lines = {f"{key}={self.axes[key]}": f"{key}={item}" for key, item in zip(lists, chosen, strict=True)}
            points.append(dataclasses.replace(self, overrides=tuple(lines.get(line, line) for line in self.overrides)))
        return points


@dataclass(frozen=True, slots=True, kw_only=True)
class Expansion:
    """Points of a grid, and the number that a condition over its axes has already left out."""

    points: list[Point]
    num_excluded: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    """Values to step through: those of one key, or of several together."""

    keys: tuple[str, ...]
    steps: list[tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Product of axes, and the overrides that every one of its points has in front."""

    fixed: tuple[str, ...]
    axes: list[_Axis]
    exclude: tuple[Condition, ...]

    @property
    def num_points(self) -> int:
        return math.prod(len(axis.steps) for axis in self.axes)


def expand_grid(composer: GridComposer, overrides: Sequence[str]) -> Expansion:
    """Expand a grid to its points: the product of all axes, the first axis slowest; blocks one after the other.

    Axes are sweeps on the command line (`a=1,2`, `range()`, `choice()`, `glob()`) and those of the section `sweep`; a
    key on the command line replaces an axis of the same key.

    Raises:
        ConfigError: an override does not parse, an axis is not a list with a value, axes that step together differ in
            length, a condition cannot be read, or there are more than `MAX_POINTS`.
    """
    blocks = list(_blocks(composer, overrides))
    _check_size(blocks)
    points: list[Point] = []
    num_excluded = 0
    for block in blocks:
        on_axes, on_point = _split_conditions(composer, block)
        for lines, axes in _steps(block.axes):
            if any(test(axes) for test in on_axes):
                num_excluded += 1
                continue
            points.append(
                Point(overrides=(*block.fixed, *lines), axes=axes, num_fixed=len(block.fixed), exclude=on_point)
            )
    return Expansion(points=points, num_excluded=num_excluded)


def _blocks(composer: GridComposer, given_overrides: Sequence[str]) -> Iterator[_Block]:
    overrides = [in_full(line) for line in given_overrides]
    parsed = composer.parse(overrides)
    given = [override.input_line or "" for override in parsed if not (override.is_sweep_override() or _items(override))]
    defaults = list(default_overrides(overrides))
    last = {_key(override.input_line or ""): override for override in parsed}  # of one key the last override counts
    swept = [
        override
        for override in parsed
        if override.is_sweep_override() and last[_key(override.input_line or "")] is override
    ]
    axes = {override.get_key_element(): sweep_values(override, composer.choices) for override in swept}
    listed = [override for override in parsed if _items(override) and last[_key(override.input_line or "")] is override]
    axes |= {override.get_key_element(): [FIRST + ",".join(_items(override))] for override in listed}
    # A sweep over choices of sweep/ or experiment/ may bring axes of its own: they are read for each choice.
    heads = [_axis(key, values) for key, values in axes.items() if key in ("sweep", "experiment")]
    tails = [_axis(key, values) for key, values in axes.items() if key not in ("sweep", "experiment")]
    for head in itertools.product(*(axis.steps for axis in heads)):
        of_head = [_axis(axis.keys[0], list(step)) for axis, step in zip(heads, head, strict=True)]
        base = [*given, *(f"{axis.keys[0]}={axis.steps[0][0]}" for axis in of_head)]
        first = [f"{axis.keys[0]}={_first_item(axis.keys[0], axis.steps[0][0])}" for axis in tails]
        sweep = _sweep_section(composer, [*defaults, *base], first, len(defaults) + len(given))
        named = {_key(axis.keys[0]) for axis in tails} | {_key(line) for line in base}
        for from_config, conditions in _axes_of(composer, sweep, named):
            keys = {_key(key) for axis in from_config for key in axis.keys}
            # The user's own file is the weakest: an axis of the configuration replaces its value.
            fixed = (*(line for line in defaults if _key(line) not in keys), *given)
            yield _Block(fixed=fixed, axes=[*of_head, *tails, *from_config], exclude=conditions)


def _sweep_section(composer: GridComposer, base: list[str], first: list[str], num_fixed: int) -> SweepConfig:
    """Compose the section `sweep`, with the first values of the axes if these are compatible.

    If they are not, a condition may exclude their point; otherwise the composition of that point reports the problem.
    """
    groups = [line for line in first if composer.is_group(_key(line))]
    # Each set of lines once: the same lines would fail again, and that takes 0.3 s.
    most, *fewer = dict.fromkeys((tuple(first), tuple(groups), ()))
    try:
        return composer.compose_point([*base, *most], num_fixed).config.sweep
    except ConfigError as error:
        for lines in fewer:
            with contextlib.suppress(ConfigError):
                return composer.compose_point([*base, *lines], num_fixed).config.sweep
        raise error from None


def _axes_of(
    composer: GridComposer, sweep: SweepConfig, named: set[str]
) -> Iterator[tuple[list[_Axis], tuple[Condition, ...]]]:
    """Yield axes and conditions of each block of the section `sweep`, without the keys that the command line gives."""
    _refuse_other_keys(sweep)
    shared = _axes_in(composer, sweep, "sweep")
    for index, block in enumerate(sweep.blocks or [SweepBlock()]):
        own = _axes_in(composer, block, f"sweep.blocks[{index}]")
        replaced = {_key(key) for axis in own for key in axis.keys}
        axes = [*_without(shared, named | replaced), *_without(own, named)]
        yield axes, tuple(read_condition(text) for text in [*sweep.exclude, *block.exclude])


def _refuse_other_keys(sweep: SweepConfig) -> None:
    """Raise ConfigError if the section `sweep` sets a key that does not describe a grid, but is for another verb."""
    for field in dataclasses.fields(sweep):
        if field.name in _GRID_KEYS or not getattr(sweep, field.name):
            continue
        if field.name == STAGES:
            raise ConfigError(
                "sweep.stages is a chain of several grids (docs/chain.md), and excludes all other keys of `sweep`. "
                "Use `hpc-trainer plan` or `submit`, or in Python plan_chain or submit_chain. For one grid, choose "
                "another file of sweep/."
            )
        uses = (keys[field.name] for keys in contributions("sweep_keys") if field.name in keys)
        use = next(uses, "is not used by any part of this installation")
        raise ConfigError(
            f"sweep.{field.name} {use}. For a grid of runs, leave it out or choose another file of sweep/."
        )


def _axes_in(composer: GridComposer, block: SweepConfig | SweepBlock, where: str) -> list[_Axis]:
    axes = [_axis(key, _config_values(composer, f"{where}.axes", key, values)) for key, values in block.axes.items()]
    for index, together in enumerate(block.zip):
        place = f"{where}.zip[{index}]"
        lists = {key: _config_values(composer, place, key, values) for key, values in together.items()}
        lengths = {key: len(values) for key, values in lists.items()}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{key} {length}" for key, length in lengths.items())
            raise ConfigError(f"{place}: lists that step together must have the same length, but these have {listed}.")
        if lists:
            axes.append(_Axis(keys=tuple(lists), steps=list(zip(*lists.values(), strict=True))))
    keys = [_key(key) for axis in axes for key in axis.keys]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise ConfigError(f"{where}: {twice} is on two axes. Keep one of them.")
    return axes


def _without(axes: list[_Axis], keys: set[str]) -> list[_Axis]:
    """Return the axes without some keys; keys that were stepped together with them are still stepped."""
    left = []
    for axis in axes:
        kept = [index for index, key in enumerate(axis.keys) if _key(key) not in keys]
        if kept:
            steps = [tuple(step[index] for index in kept) for step in axis.steps]
            left.append(_Axis(keys=tuple(axis.keys[index] for index in kept), steps=steps))
    return left


def _axis(key: str, values: list[str]) -> _Axis:
    return _Axis(keys=(key,), steps=[(value,) for value in values])


def _key(line: str) -> str:
    return line.split("=", 1)[0].lstrip("+~").split("@")[0]


def _steps(axes: Sequence[_Axis]) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Yield the lines and axis values of each point. Each text is built once: 10,000 points share a few dozen."""
    made = [
        [
            (
                tuple(f"{key}={value}" for key, value in zip(axis.keys, step, strict=True)),
                tuple((key.lstrip("+"), value) for key, value in zip(axis.keys, step, strict=True)),
            )
            for step in axis.steps
        ]
        for axis in axes
    ]
    for steps in itertools.product(*made):
        yield [line for lines, _ in steps for line in lines], dict([pair for _, pairs in steps for pair in pairs])


def _check_size(blocks: Sequence[_Block]) -> None:
    total = sum(block.num_points for block in blocks)
    if total > MAX_POINTS:
        largest = max(blocks, key=lambda block: block.num_points)
        sizes = " × ".join(f"{'+'.join(axis.keys)} {len(axis.steps)}" for axis in largest.axes)
        joined = f", the largest of {len(blocks)} blocks" if len(blocks) > 1 else ""
        raise ConfigError(
            f"the grid has {total:,} points ({sizes}{joined}), and a sweep takes at most {MAX_POINTS:,}. "
            "Give fewer values, or split it by sweep_name=NAME."
        )


def _split_conditions(
    composer: GridComposer, block: _Block
) -> tuple[list[Callable[[Mapping[str, str]], bool]], tuple[Condition, ...]]:
    """Split conditions into those over axes alone, and all others.

    Conditions over axes are decided before a point is composed, because it might not compose.
    """
    keys = {key.lstrip("+") for axis in block.axes for key in axis.keys}
    on_axes = [condition for condition in block.exclude if condition.names <= keys]
    return [_test(composer, condition) for condition in on_axes], tuple(
        condition for condition in block.exclude if condition not in on_axes
    )


def _test(composer: GridComposer, condition: Condition) -> Callable[[Mapping[str, str]], bool]:
    names = sorted(condition.names)
    values: dict[str, Any] = {}
    decided: dict[tuple[str, ...], bool] = {}

    def value(name: str, text: str) -> Any:
        line = f"{name}={text}"
        if line not in values:
            is_list = list_of(name, text) is not None
            values[line] = text if is_list else (parse_common(line) or composer.parse([line])[0]).value()
        return values[line]

    def holds(axes: Mapping[str, str]) -> bool:
        key = tuple([axes[name] for name in names])
        if key not in decided:
            decided[key] = condition.holds(lambda name: value(name, axes[name]))
        return decided[key]

    return holds


def _config_values(composer: GridComposer, where: str, key: str, values: object) -> list[str]:
    if not isinstance(values, list) or not values:
        raise ConfigError(f"{where}.{key}={values!r} must be a list with at least one value, as [1, 2].")
    is_group = composer.is_group(key)
    return [str(value) if is_group or list_of(key, str(value)) else override_value(value) for value in values]


# Lists of hardware: the values after `first:` belong to one point, which is submitted to each of them.

FIRST = "first:"
"""Beginning of a list of hardware profiles, or of values of a key of `hardware`."""
_MOST_ITEMS = 8


def list_of(key: str, text: str) -> list[str] | None:
    """Return the items of the list `first:a,b`; None if the text is not a list, or the key is not of `hardware`."""
    if not text.startswith(FIRST) or (key != "hardware" and not key.startswith("hardware.")):
        return None
    return text[len(FIRST) :].split(",")


def _first_item(key: str, text: str) -> str:
    items = list_of(key, text)
    return text if items is None else items[0]


def _items(override: Override) -> list[str]:
    """Return the items of a list that the command line gives as one value, in quotes or with one item; else []."""
    if override.is_sweep_override() or not isinstance(value := override.value(), str):
        return []
    return list_of(override.get_key_element(), value) or []


def _joined(key: str, values: list[str]) -> list[str]:
    """Join each value that begins a list with the values after it, up to the next list: Hydra splits at each comma."""
    plain = [value.replace("\\:", ":") for value in values]
    places = [place for place, value in enumerate(plain) if list_of(key, value) is not None]
    if not places:
        return values
    lists = [",".join(plain[begin:end]) for begin, end in itertools.pairwise([*places, len(plain)])]
    return [*values[: places[0]], *lists]


# 10,000 points take 2 s and 50 MiB; a typing error (two axes of 1,000) is caught before it takes minutes.
MAX_POINTS = 100_000
_TRIED = 4  # number of suggested values for an interval


def sweep_values(override: Override, choices: Callable[[str], list[str]]) -> list[str]:
    """Return the values that `override` steps through, as written after the `=`.

    Args:
        override: the sweep.
        choices: returns the choices of a group of `conf/`, including those of `--config-dir`.

    Raises:
        ConfigError: the sweep has no value, more than `MAX_POINTS`, or is not a list of values.
    """
    pattern: object = override.value()  # its annotation leaves Glob out
    line = override.input_line
    if isinstance(pattern, Glob):
        # Hydra's own glob() offers the schemas too, and not what --config-dir adds. As in a shell, * stays in a folder:
        # glob(gpu_*) takes no choice of a site's.
        depths = {text.count("/") for text in pattern.include}
        values = pattern.filter([name for name in choices(override.key_or_group) if name.count("/") in depths])
    else:
        _check(override, pattern, choices)
        values = list(override.sweep_string_iterator())
    if not values:
        raise ConfigError(f"{line}: an axis needs at least one value.")
    return _joined(override.get_key_element(), values)


def _check(override: Override, pattern: object, choices: Callable[[str], list[str]]) -> None:
    line, key = override.input_line, override.get_key_element()
    if isinstance(pattern, IntervalSweep):
        declared = declared_at(override.key_or_group)
        is_whole = declared is not None and isinstance(declared.default, int)
        tried = choices(override.key_or_group) or _between(pattern, is_whole=is_whole)
        raise ConfigError(
            f"{line}: interval() is a range to draw values from, but a grid needs a list of values. "
            f"Use values, as {key}={','.join(tried)}, or add search=random to draw from the range."
        )
    if isinstance(pattern, RangeSweep):
        _check_range(f"{line}", pattern)
    inner: list[object] = [*pattern.list] if isinstance(pattern, ChoiceSweep) else []
    nested = next((value for value in inner if isinstance(value, (Sweep, Glob))), None)
    if nested is not None:
        what = "range()" if isinstance(nested, RangeSweep) else "interval()"
        what = "glob()" if isinstance(nested, Glob) else "choice()" if isinstance(nested, ChoiceSweep) else what
        raise ConfigError(f"{line}: {what} cannot be one of several values. List all values, as {key}=1,2,3.")


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
