"""Progress of a rank: the optimizer steps of its attempt, and where the time went."""

from __future__ import annotations

import operator
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hpc_trainer.errors import LoopError
from hpc_trainer.runtime.spans import Spans
from hpc_trainer.training.rank_view import RankView

_KEPT_STEPS = 256


@dataclass(slots=True, kw_only=True)
class RankProgress(RankView):
    """Part of a RunContext that counts steps and seconds. `step` is the last step that a method was given."""

    spans: Spans = field(default_factory=Spans)
    """Record of this rank's time by kind: `with run.spans.within(Kind.evaluation):`."""
    step_ends: deque[tuple[float, int]] = field(default_factory=partial(deque, maxlen=_KEPT_STEPS))
    """End of each of the newest steps on this rank (seconds since the epoch) and its number; first, the start."""
    step: int = 0
    first_step: int = 0
    """Step at which steps begin, after a start or a `rewind`."""
    _done_before: int = 0

    @property
    def steps_done(self) -> int:
        """Optimizer steps of this attempt, including those that a `rewind` undid."""
        return self._done_before + self.step - self.first_step

    def spent(self, step: int) -> dict[str, Any]:
        """Return the time that this rank spent until `step`, in the form of `Spans.spent`."""
        return self.spans.spent(self._done_before + step - self.first_step)

    def _count_from(self, step: int) -> None:
        self._done_before = self.steps_done
        self.step = self.first_step = step
        self._see(step)

    def _count(self, step: int) -> int:
        """Record `step` and return it as an int.

        Raises:
            LoopError: it is less than an earlier step.
        """
        step = operator.index(step)
        if step < self.step:
            raise LoopError(f"step {step} comes after step {self.step}: steps never go down. Count optimizer steps.")
        self.step = step
        self._see(step)
        return step

    def _see(self, step: int) -> None:
        if not self.step_ends or self.step_ends[-1][1] != step:
            self.step_ends.append((time.time(), step))
