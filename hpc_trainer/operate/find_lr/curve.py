"""Result of a range test: the smoothed loss over the learning rate, its steepest fall, and its divergence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Points on each side used for a smoothed value and its slope, as a fraction of all points; at least two.
_WINDOW = 0.05
# Suggestions skip the first rates, where the slope is noise (fastai and Lightning skip ten points, too).
_LEFT_OUT = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One step. `smoothed` is the loss by a line through nearby points; `slope` is per factor of 10 in lr."""

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
