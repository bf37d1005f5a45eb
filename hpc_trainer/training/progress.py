"""How far a rank is: the optimizer steps of its attempt, and where the time went."""

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
    """What of a RunContext counts steps and seconds. `step` is the last that was heard of."""

    spans: Spans = field(default_factory=Spans)
    """Where this rank's time goes: `with run.spans.within(Kind.evaluation):`."""
    step_ends: deque[tuple[float, int]] = field(default_factory=partial(deque, maxlen=_KEPT_STEPS))
    """When the newest steps ended on this rank, seconds since the epoch, and which; first, where it began."""
    step: int = 0
    first_step: int = 0
    """Where steps begin, after a start or a `rewind`."""
    _done_before: int = 0

    @property
    def steps_done(self) -> int:
        """Optimizer steps of this attempt, also those that `rewind` went back behind."""
        return self._done_before + self.step - self.first_step

    def spent(self, step: int) -> dict[str, Any]:
        """What this rank spent so far, as files have it (`Spans.spent`); it is at this step now."""
        return self.spans.spent(self._done_before + step - self.first_step)

    def _count_from(self, step: int) -> None:
        self._done_before = self.steps_done
        self.step = self.first_step = step
        self._see(step)

    def _count(self, step: int) -> int:
        """The step, as an int. Raises LoopError: it is less than one before."""
        step = operator.index(step)
        if step < self.step:
            raise LoopError(f"step {step} comes after step {self.step}: steps never go down. Count optimizer steps.")
        self.step = step
        self._see(step)
        return step

    def _see(self, step: int) -> None:
        if not self.step_ends or self.step_ends[-1][1] != step:
            self.step_ends.append((time.time(), step))
