"""Learning-rate range test (Smith 2017, arXiv:1506.01186): its plan, as a rank gets it, and its early end."""

from __future__ import annotations

import math
from dataclasses import dataclass

VARIABLE = "HPC_TRAINER_FIND_LR"
"""Environment variable with the plan of a run that tests learning rates instead of training."""
# As in fastai's finder: a smoothed loss of more than four times the best one has diverged.
_DIVERGED = 4.0
_KEPT = 0.9


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

    def to_text(self) -> str:
        """Return the plan as text for the environment, such as `1e-07:10:100`."""
        return f"{self.first!r}:{self.last!r}:{self.num_steps}"


def from_text(text: str) -> LrRange:
    """Parse the result of `to_text`; raise ValueError for other text."""
    first, last, steps = text.split(":")
    return LrRange(first=float(first), last=float(last), num_steps=int(steps))


@dataclass(slots=True)
class DivergenceWatch:
    """Detector of divergence in a sequence of losses, by an exponential average with bias correction."""

    _average: float = 0.0
    _count: int = 0
    _best: float = math.inf

    def see(self, loss: float) -> bool:
        """Take the next loss, and return True if it has diverged.

        A loss has diverged if it is not finite, or if the average exceeds `_DIVERGED` times its best value so far.
        """
        if not math.isfinite(loss):
            return True
        self._count += 1
        self._average = _KEPT * self._average + (1 - _KEPT) * loss
        smoothed = self._average / (1 - _KEPT**self._count)
        self._best = min(self._best, smoothed)
        return smoothed > _DIVERGED * self._best
