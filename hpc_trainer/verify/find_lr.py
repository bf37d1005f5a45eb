"""`hpc-trainer find-lr`: a learning-rate range test, its smoothed curve, and its plot as one SVG file.

The test is that of Smith 2017, arXiv:1506.01186. The SVG is only text: no script, font or picture from elsewhere. The
part of the ranks is verify/lr_range.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from hpc_trainer.errors import ConfigError
from hpc_trainer.record.journal import read_result
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.metrics import read_metrics
from hpc_trainer.record.states import RunState
from hpc_trainer.runtime.rank_env import PROBE_VARIABLE
from hpc_trainer.verify.own_runs import await_end, end_local, raise_failure

VARIABLE = "HPC_TRAINER_FIND_LR"
"""Environment variable with the plan of a run that tests learning rates instead of training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LrRange:
    """Plan of `num_steps` ≥ 2 steps, whose learning rates grow by a constant factor from `first` > 0 to `last`."""

    first: float
    last: float
    num_steps: int

    def lr(self, step: int) -> float:
        """Return the learning rate of the update after `step` others; `step` is in [0, num_steps - 1]."""
        share = step / (self.num_steps - 1)
        return float(self.first * (self.last / self.first) ** share)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the ranks that make the test."""
        return {PROBE_VARIABLE: "hpc_trainer.verify.lr_range", VARIABLE: self.to_text()}

    def to_text(self) -> str:
        """Return the plan as text for the environment, such as `1e-07:10:100`."""
        return f"{self.first!r}:{self.last!r}:{self.num_steps}"


def from_text(text: str) -> LrRange:
    """Parse the result of `to_text`; raise ValueError for other text."""
    first, last, steps = text.split(":")
    return LrRange(first=float(first), last=float(last), num_steps=int(steps))


# Points on each side used for a smoothed value and its slope, as a fraction of all points; at least two.
_WINDOW = 0.05
# Suggestions skip the first rates, where the slope is noise (fastai and Lightning skip ten points, too).
_LEFT_OUT = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Step of the test. `smoothed` is the loss on a line through nearby points, `slope` its change per decade of lr."""

    step: int
    lr: float
    loss: float
    smoothed: float
    slope: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """All points in order. `divergence_lr` is the rate at which the loss diverged; None if the loss never diverged."""

    points: tuple[Point, ...]
    divergence_lr: float | None

    @property
    def steepest_lr(self) -> float | None:
        """Rate at which the smoothed loss falls the fastest, before its minimum; None if the loss falls nowhere."""
        least = min(range(len(self.points)), key=lambda index: self.points[index].smoothed, default=0)
        falling = self.points[math.ceil(_LEFT_OUT * len(self.points)) : least + 1]
        steepest = min(falling, key=lambda point: point.slope, default=None)
        return steepest.lr if steepest is not None and steepest.slope < 0 else None

    @property
    def tenth_lr(self) -> float | None:
        """A tenth of the rate at which the loss diverged."""
        return None if self.divergence_lr is None else self.divergence_lr / 10

    @property
    def suggested_lr(self) -> float | None:
        """The smaller of `steepest_lr` and `tenth_lr`; None if the loss falls nowhere."""
        if self.steepest_lr is None or self.tenth_lr is None:
            return self.steepest_lr
        return min(self.steepest_lr, self.tenth_lr)


def curve_of(records: Sequence[Mapping[str, Any]], divergence_lr: float | None) -> Curve:
    """Return the curve of a run's metrics: records with step, lr and loss, in order."""
    xs = [math.log10(row["lr"]) for row in records]
    ys = [float(row["loss"]) for row in records]
    half = max(2, round(_WINDOW * len(records)))
    points = []
    for index, row in enumerate(records):
        near = range(max(0, index - half), min(len(records), index + half + 1))
        # A straight line through nearby points by weighted least squares; nearer points have more weight.
        weights = [1 - abs(other - index) / (half + 1) for other in near]
        value, slope = _line(weights, [xs[other] - xs[index] for other in near], [ys[other] for other in near])
        points.append(Point(step=int(row["step"]), lr=float(row["lr"]), loss=ys[index], smoothed=value, slope=slope))
    return Curve(points=tuple(points), divergence_lr=divergence_lr)


def _line(weights: Sequence[float], xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Return (value at 0, slope) of the weighted least-squares line."""
    total = sum(weights)
    x_mean = sum(w * x for w, x in zip(weights, xs, strict=True)) / total
    y_mean = sum(w * y for w, y in zip(weights, ys, strict=True)) / total
    spread = sum(w * (x - x_mean) ** 2 for w, x in zip(weights, xs, strict=True))
    if spread == 0:
        return y_mean, 0.0
    slope = sum(w * (x - x_mean) * (y - y_mean) for w, x, y in zip(weights, xs, ys, strict=True)) / spread
    return y_mean - slope * x_mean, slope


_WIDTH, _HEIGHT = 760, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 50, 50
_HIGHEST = 1.3  # times the first losses: an exploding loss would flatten the rest of the curve


def draw(curve: Curve, title: str) -> str:
    """Draw the loss of each step in grey, the smoothed loss above it, and the suggested rates as vertical lines.

    The left axis is the loss in nats, the lower axis the learning rate on a logarithmic scale. `curve` has at least two
    points.
    """
    points = curve.points
    xs = [math.log10(point.lr) for point in points]
    first = max(point.smoothed for point in points[: max(1, len(points) // 10)])
    low = min(*(point.smoothed for point in points), *(point.loss for point in points))
    high = max(first * _HIGHEST, low + 1e-9)
    plane = _Plane(min(xs), max(xs), low - 0.05 * (high - low), high)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="12" fill="#222">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="22" font-size="15">{escape(title)}</text>',
        *plane.grid(),
        plane.path(xs, [point.loss for point in points], colour="#bbb", width=1),
        plane.path(xs, [point.smoothed for point in points], colour="#0a5", width=2.5),
    ]
    marks = (("steepest", curve.steepest_lr, "#05a"), ("1/10 of divergence", curve.tenth_lr, "#a50"),
             ("divergence", curve.divergence_lr, "#a00"))  # fmt: skip
    row = 0
    for name, lr, colour in marks:
        if lr is not None and plane.holds(math.log10(lr)):
            lines.append(plane.mark(math.log10(lr), f"{name} {lr:.2g}", colour, row))
            row += 1
    return "\n".join([*lines, "</svg>", ""])


class _Plane:
    """Mapping from (log10 of the rate, loss) to pixels of the picture."""

    def __init__(self, left: float, right: float, low: float, high: float) -> None:
        self._left, self._right, self._low, self._high = left, max(right, left + 1e-9), low, high

    def holds(self, x: float) -> bool:
        """Return True if `x` is between the ends of the lower axis."""
        return self._left <= x <= self._right

    def _x(self, x: float) -> float:
        return _LEFT + (x - self._left) / (self._right - self._left) * (_WIDTH - _LEFT - _RIGHT)

    def _y(self, y: float) -> float:
        inside = min(max(y, self._low), self._high)
        return _HEIGHT - _BOTTOM - (inside - self._low) / (self._high - self._low) * (_HEIGHT - _TOP - _BOTTOM)

    def path(self, xs: Sequence[float], ys: Sequence[float], *, colour: str, width: float) -> str:
        """Draw a line through all points; values that are too high follow the upper edge."""
        places = " ".join(f"{self._x(x):.1f},{self._y(y):.1f}" for x, y in zip(xs, ys, strict=True))
        return f'<polyline fill="none" stroke="{colour}" stroke-width="{width}" points="{places}"/>'

    def mark(self, x: float, text: str, colour: str, row: int) -> str:
        """Draw a vertical line with its name in text row `row`."""
        at, y = self._x(x), _TOP + 14 * row
        is_left = at > _WIDTH - 200
        where = f'x="{at - 5 if is_left else at + 5:.1f}" y="{y + 10}"' + (' text-anchor="end"' if is_left else "")
        line = f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{y}" y2="{_HEIGHT - _BOTTOM}" stroke="{colour}"'
        return f'{line} stroke-dasharray="4 3"/><text {where} fill="{colour}">{escape(text)}</text>'

    def grid(self) -> Iterator[str]:
        """Draw the axes with their names: a tick for each power of ten, and five losses."""
        bottom = _HEIGHT - _BOTTOM
        for power in range(math.ceil(self._left - 1e-9), math.floor(self._right + 1e-9) + 1):
            at = self._x(power)
            yield f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{bottom}" stroke="#eee"/>'
            yield f'<text x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">1e{power}</text>'
        for index in range(5):
            value = self._low + index / 4 * (self._high - self._low)
            at = self._y(value)
            yield f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#eee"/>'
            yield f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{value:.3g}</text>'
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        yield f'<text x="{middle:.0f}" y="{_HEIGHT - 12}" text-anchor="middle">learning rate</text>'
        yield f'<text transform="translate(18 {_HEIGHT / 2:.0f}) rotate(-90)" text-anchor="middle">loss</text>'


_FEWEST_POINTS = 5


def find_lr(sweep: SweepPaths, run_id: str, start: Callable[[], object], *, timeout_s: float) -> Curve:
    """Start the test with `start`, wait for its end, and return its curve. No process is left, also after an error.

    Raises:
        ConfigError: the worker found the configuration wrong, or the loss diverged within the first steps.
        RunStateError: the test failed, or did not end in `timeout_s` seconds.
    """
    try:
        start()
        run = await_end(sweep, run_id, timeout_s)
    finally:
        end_local([sweep])
    paths = sweep.run(run_id)
    if run.state is not RunState.COMPLETED:
        raise_failure(sweep, run)
    records = [record for record in read_metrics(paths.metrics) if "loss" in record and "lr" in record]
    metrics = read_result(paths.result).get("metrics") or {}
    if len(records) < _FEWEST_POINTS:
        raise ConfigError(
            f"the loss diverged after {len(records)} steps: these are too few to suggest a rate. Use a smaller --from."
        )
    return curve_of(records, metrics.get("diverged_at_lr"))
