"""Plot of a range test as one SVG file, without scripts and without fonts or pictures from other files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from hpc_trainer.operate.find_lr.curve import Curve

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
        """Return True if `x` lies between the ends of the lower axis."""
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
