"""Line charts as SVG text: no scripts, no other files, colours from the page's style sheet. All text is escaped."""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

_X = TypeVar("_X", int, float)
Point = tuple[float, float]
NUM_COLOURS = 8
"""Number of colours (classes c0 to c7 of the style sheet), one per run; further lines are grey."""
INK = "ink"
"""Colour of text, for a line that belongs to no run."""
_WIDTH, _HEIGHT = 560, 320
_FARTHEST = 1e300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 14, 46
_LONGEST_NAME = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Line of a chart. `colour` is c<colour>, `INK`, or None for grey. An ideal line is dashed and has no dots."""

    name: str
    points: Sequence[Point]
    colour: int | str | None
    is_ideal: bool = False
    has_dots: bool = False
    is_scattered: bool = False
    """True for small dots without a line and without their values."""
    names: Sequence[str] = ()
    """Names of the dots that are scattered, one for each point; else all have the line's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Mapping from values to pixels, linear or by the base-2 logarithm; `ticks` are the labelled values."""

    low: float
    high: float
    start: float
    end: float
    ticks: Sequence[float]
    is_log: bool = False

    def place(self, value: float) -> float:
        """Return the position of a value in pixels."""
        low, high = (math.log2(self.low), math.log2(self.high)) if self.is_log else (self.low, self.high)
        share = ((math.log2(value) if self.is_log else value) - low) / (high - low)
        return self.start + share * (self.end - self.start)


def number(value: float, digits: int = 3) -> str:
    """Return the label of a value with `digits` significant digits: `12k`, `1.5M`."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.{digits}g}{letter}"
    return f"{value:.{digits}g}"


def percent(value: float) -> str:
    """Return a fraction as a percentage with one decimal: `87.5%`."""
    return f"{round(100 * value, 1):g}%"


def _labels(ticks: Sequence[float], format_value: Callable[[float], str]) -> list[str]:
    """Return a label for each tick, with enough digits to tell the ticks apart; a single tick has four digits."""
    if format_value is number:
        shown = ([number(tick, digits) for tick in ticks] for digits in range(3 if len(ticks) > 1 else 4, 12))
        return next((labels for labels in shown if len(set(labels)) == len(ticks)), [*map(number, ticks)])
    return [*map(format_value, ticks)]


def _is_one(low: float, high: float) -> bool:
    """Return True if two values are too close for a chart to tell them apart."""
    return not high - low > max(5 / _FARTHEST, 1e-9 * max(abs(low), abs(high)))


def nice_ticks(low: float, high: float, count: int = 5, *, least: float = 0.0) -> list[float]:
    """Return round values (1, 2 or 5 times a power of ten) that cover `low` to `high`, at least `least` apart.

    If `low` and `high` are alike, `low` is the only value.
    """
    low, high = max(low, -_FARTHEST), min(high, _FARTHEST)
    if _is_one(low, high):
        return [low]
    rough = max((high - low) / count, least)
    exponent = math.floor(math.log10(rough))
    power = 10.0**exponent
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, max(12, 2 - exponent)) for index in range(first, last + 1)]


def line_chart(
    title: str, lines: Sequence[Line], *, x_label: str, y_label: str,
    from_zero: bool = False, is_log: bool = False, is_log_x: bool = False, x_ticks: Sequence[float] = (),
    x_names: Sequence[str] = (), format_y: Callable[[float], str] = number,
) -> str:  # fmt: skip
    """Return a chart as SVG text; lines without points are left out, and without lines the text is empty.

    Args:
        y_label: name of the values; "" if the title above the chart names them.
        from_zero: begin the axis of values at 0.
        is_log: draw both axes on a logarithmic scale, with ticks at `x_ticks` and at powers of two.
        is_log_x: draw only the horizontal axis on a logarithmic scale.
        x_ticks: ticks of the horizontal axis; without ticks, round values.
        x_names: labels of `x_ticks`; without labels, their numbers.
    """
    drawn = [line for line in lines if line.points]
    xs = [x for line in drawn for x, _ in line.points]
    ys = [y for line in drawn for _, y in line.points]
    if not drawn:
        return ""
    across = _scale(xs, _LEFT, _WIDTH - _RIGHT, is_log=is_log or is_log_x, ticks=x_ticks)
    upward = _scale([*ys, 0.0] if from_zero else ys, _HEIGHT - _BOTTOM, _TOP, is_log=is_log)
    body = [*_grid(across, upward, x_label, y_label, format_y, x_names)]
    # Grey lines first, so that coloured lines lie on top.
    body += [_line(line, across, upward, format_y) for line in sorted(drawn, key=lambda line: line.colour is not None)]
    return _svg(title, body)


def _svg(title: str, body: Iterable[str]) -> str:
    label = html.escape(title)
    head = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}"><title>{label}</title>'
    return f"{head}{''.join(body)}</svg>"


def _scale(values: Sequence[float], start: float, end: float, *, is_log: bool, ticks: Sequence[float] = ()) -> Scale:
    low, high = min(values), max(values)
    if is_log:
        first, last = math.floor(math.log2(low)), math.ceil(math.log2(high))
        last = max(last, first + 1)
        shown = ticks or [2.0**power for power in range(first, last + 1)]
        return Scale(low=2.0**first, high=2.0**last, start=start, end=end, ticks=shown, is_log=True)
    if ticks:
        margin = 0.06 * ((max(ticks) - min(ticks)) or 1)
        return Scale(low=min(low, *ticks) - margin, high=max(high, *ticks) + margin, start=start, end=end, ticks=ticks)
    # Whole numbers, as steps, have no ticks between them.
    round_ticks = nice_ticks(low, high, least=1.0 if all(isinstance(value, int) for value in values) else 0.0)
    if len(round_ticks) == 1:  # the value in the middle; 0 at the bottom, as for counts
        margin = 0.5 * abs(round_ticks[0])
        low, high = (round_ticks[0] - margin, round_ticks[0] + margin) if margin else (0.0, 1.0)
        return Scale(low=low, high=high, start=start, end=end, ticks=round_ticks)
    return Scale(low=round_ticks[0], high=round_ticks[-1], start=start, end=end, ticks=round_ticks)


def _grid(
    across: Scale, upward: Scale, x_label: str, y_label: str, format_y: Callable[[float], str], x_names: Sequence[str]
) -> list[str]:  # fmt: skip
    parts = []
    for tick, label in zip(upward.ticks, _labels(upward.ticks, format_y), strict=True):
        y = f"{upward.place(tick):.1f}"
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick end" x="{_LEFT - 8}" y="{y}" dy="0.35em">{html.escape(label)}</text>')
    for tick, label in zip(across.ticks, x_names or _labels(across.ticks, number), strict=True):
        x = f"{across.place(tick):.1f}"
        text = html.escape(label[:_LONGEST_NAME])
        parts.append(f'<text class="tick mid" x="{x}" y="{_HEIGHT - _BOTTOM + 18}">{text}</text>')
    bottom = _HEIGHT - _BOTTOM
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    middle, height = (_LEFT + _WIDTH - _RIGHT) / 2, (_TOP + bottom) / 2
    parts.append(f'<text class="label mid" x="{middle:.0f}" y="{_HEIGHT - 8}">{html.escape(x_label)}</text>')
    if y_label:
        turned = f'transform="translate(13 {height:.0f}) rotate(-90)"'
        parts.append(f'<text class="label mid" {turned}>{html.escape(y_label)}</text>')
    return parts


def _line(line: Line, across: Scale, upward: Scale, format_y: Callable[[float], str]) -> str:
    places = [(across.place(x), upward.place(y)) for x, y in line.points]
    kind = _kind(line)
    name = html.escape(line.name)
    drawn = ""
    if line.is_scattered:
        names = [html.escape(each) for each in line.names] or [name] * len(places)
        return "".join(
            f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"><title>{each}: {html.escape(format_y(value))}'
            "</title></circle>"
            for (x, y), each, (_, value) in zip(places, names, line.points, strict=True)
        )
    if len(places) > 1:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        drawn = f'<polyline class="{kind}" points="{path}"><title>{name}</title></polyline>'
    if line.has_dots or len(places) == 1:
        for (x, y), (_, value) in zip(places, line.points, strict=True):
            title = f"{name}: {html.escape(format_y(value))}"
            drawn += f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{title}</title></circle>'
            if line.has_dots:
                side = "end" if x > (_LEFT + _WIDTH) / 2 else "start"
                below = y + 20 if y + 24 < _HEIGHT - _BOTTOM else y - 10
                drawn += f'<text class="value {side}" x="{x:.1f}" y="{below:.1f}">{html.escape(format_y(value))}</text>'
    return drawn


def bar_chart(
    title: str, names: Sequence[str], stacks: Sequence[tuple[str, str, Sequence[float]]], y_label: str
) -> str:
    """Return stacked bars as SVG text.

    Args:
        names: label of each bar, from left to right.
        stacks: name, variable of the style sheet that is the colour, and height in each bar; the lowest part first.
    """
    heights = [math.fsum(values[at] for _, _, values in stacks) for at in range(len(names))]
    places = list(range(len(names)))
    across = Scale(low=-0.5, high=len(names) - 0.5, start=_LEFT, end=_WIDTH - _RIGHT, ticks=places)
    upward = _scale([0, *map(int, heights)], _HEIGHT - _BOTTOM, _TOP, is_log=False)
    body = _grid(across, upward, "", y_label, number, names)
    width = 0.7 * (_WIDTH - _RIGHT - _LEFT) / max(1, len(names))
    for at, x in enumerate(map(across.place, places)):
        below = 0.0
        for name, colour, values in stacks:
            if values[at]:
                top, foot = upward.place(below + values[at]), upward.place(below)
                words = html.escape(f"{names[at]}: {number(values[at])} {name}")
                body.append(
                    f'<rect style="fill:var(--{colour})" x="{x - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" '
                    f'height="{foot - top:.1f}"><title>{words}</title></rect>'
                )
                below += values[at]
        above = upward.place(below) - 5
        body.append(f'<text class="value mid" x="{x:.1f}" y="{above:.1f}">{number(below)}</text>')
    return _svg(title, body)


def parallel_chart(title: str, columns: Sequence[tuple[str, str, str]], lines: Sequence[Line]) -> str:
    """Return parallel coordinates as SVG text.

    Args:
        columns: name of each upright, and the labels of its lower and its upper end.
        lines: each with the number of the column, and the place from 0 to 1 on it.
    """
    bottom, top = _HEIGHT - _BOTTOM, _TOP + 16
    across = Scale(low=0, high=max(1, len(columns) - 1), start=_LEFT, end=_WIDTH - _LEFT, ticks=())
    upward = Scale(low=0, high=1, start=bottom, end=top, ticks=())
    body = []
    for at, (name, low, high) in enumerate(columns):
        x = f"{across.place(at):.1f}"
        body.append(f'<line class="axis" x1="{x}" x2="{x}" y1="{top}" y2="{bottom}"/>')
        for words, y in ((low, bottom + 16), (high, top - 6), (name, bottom + 34 - 6 * (at % 2))):
            body.append(f'<text class="tick mid" x="{x}" y="{y}">{html.escape(words[: 2 * _LONGEST_NAME])}</text>')
    body += [_line(line, across, upward, number) for line in sorted(lines, key=lambda line: line.colour is not None)]
    return _svg(title, body)


def _kind(line: Line) -> str:
    """Return the line's class in the style sheet."""
    if line.is_ideal or line.colour is None:
        return "ideal" if line.is_ideal else "rest"
    return line.colour if isinstance(line.colour, str) else f"c{line.colour}"


def legend(lines: Sequence[Line], more: int = 0) -> str:
    """Return the legend of coloured lines; `more` is the number of grey lines, which it does not name."""
    items = [
        f'<li><svg class="key" viewBox="0 0 22 10"><line class="{_kind(line)}" '
        f'x1="1" x2="21" y1="5" y2="5"/></svg>{html.escape(line.name)}</li>'
        for line in lines
        if line.colour is not None or line.is_ideal
    ]
    if more:
        items.append(
            f'<li><svg class="key" viewBox="0 0 22 10"><line class="rest" x1="1" x2="21" y1="5" y2="5"/></svg>'
            f"{more} more</li>"
        )
    return f'<ul class="legend">{"".join(items)}</ul>' if items else ""


def figure(title: str, svg: str, key: str) -> str:
    """Return a chart in its box, with a heading and a legend."""
    return f"<figure><h3>{html.escape(title)}</h3>{svg}{key}</figure>"


def thinned(points: Sequence[tuple[_X, float]], most: int) -> list[tuple[_X, float]]:
    """Return at most some `most` points: means of neighbours, and the last point unchanged."""
    size = math.ceil(len(points) / most)
    if size <= 1:
        return list(points)
    parts = [points[at : at + size] for at in range(0, len(points) - 1, size)]
    return [(part[-1][0], statistics.fmean(value for _, value in part)) for part in parts] + [points[-1]]


def colours_of(names: Sequence[str]) -> Mapping[str, int]:
    """Assign the colours to the first names, at most `NUM_COLOURS`."""
    return {name: index for index, name in enumerate(names[:NUM_COLOURS])}
