"""A learning-rate range test (Smith 2017, arXiv:1506.01186): its plan, as a rank is told it, and its early end."""

from __future__ import annotations

import math
from dataclasses import dataclass

VARIABLE = "HPC_TRAINER_FIND_LR"
"""Environment of a run that tests learning rates instead of training: its plan."""
# Of fastai's finder: a smoothed loss of four times the best one has diverged.
_DIVERGED = 4.0
_KEPT = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class LrRange:
    """`num_steps` steps, ≥ 2, with learning rates from `first` to `last` (> first > 0), each the same multiple."""

    first: float
    last: float
    num_steps: int

    def lr(self, step: int) -> float:
        """Of the update after `step` others, 0 to num_steps - 1."""
        share = step / (self.num_steps - 1)
        return float(self.first * (self.last / self.first) ** share)

    def to_text(self) -> str:
        """For the environment: `1e-07:10:100`."""
        return f"{self.first!r}:{self.last!r}:{self.num_steps}"


def from_text(text: str) -> LrRange:
    """Undoes `to_text`. Raises ValueError for other text."""
    first, last, steps = text.split(":")
    return LrRange(first=float(first), last=float(last), num_steps=int(steps))


@dataclass(slots=True)
class DivergenceWatch:
    """Sees losses one after the other, smoothed by an exponential average whose beginning is corrected for."""

    _average: float = 0.0
    _count: int = 0
    _best: float = math.inf

    def see(self, loss: float) -> bool:
        """True if the loss has diverged: it is no number, or several times the best one so far."""
        if not math.isfinite(loss):
            return True
        self._count += 1
        self._average = _KEPT * self._average + (1 - _KEPT) * loss
        smoothed = self._average / (1 - _KEPT**self._count)
        self._best = min(self._best, smoothed)
        return smoothed > _DIVERGED * self._best
