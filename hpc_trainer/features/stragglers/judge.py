"""Choice of stragglers: from what each rank's own work took, look after look."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

LOOKS = 8
"""Number of looks in a row in which a rank must be slow to be named: other load on a machine passes."""
LEAST_SHARE = 0.05
"""Least share of a step by which a slow rank's own work is longer than the others': less is not worth a repair."""
_WORSE = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """News of one rank: it is slow, slower than reported (`is_slow`), or as quick as the others again.

    `factor`: its own work over the median of the other ranks', both over the last `LOOKS` looks. Seconds are of a step.
    """

    rank: int
    is_slow: bool
    factor: float
    own_s: float
    others_s: float
    is_data: bool
    """True if more than half of the extra time is the wait for data."""


class Judge:
    """Looks of one attempt, which every rank sees alike. A rank is slow above `factor` > 1."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._looks = deque[Sequence[tuple[float, float, float]]](maxlen=LOOKS)
        self._told: dict[int, float] = {}

    def see(self, ranks: Sequence[tuple[float, float, float]]) -> list[Verdict]:
        """Record a look, and return what is new.

        Args:
            ranks: for each of two ranks or more, seconds of a step: its own work, its wait for data in that, the step.
        """
        self._looks.append(ranks)
        if len(self._looks) < LOOKS:
            return []
        return [verdict for rank in range(len(ranks)) if (verdict := self._judge(rank)) is not None]

    def _judge(self, rank: int) -> Verdict | None:
        mine = [look[rank] for look in self._looks]
        own_s, data_s, step_s = (statistics.median(times[index] for times in mine) for index in range(3))
        others_s, others_data_s = (
            statistics.median(_of_others(look, rank, index) for look in self._looks) for index in range(2)
        )
        least = min(times[0] for times in mine)
        is_slow = least > self._factor * others_s and least - others_s > LEAST_SHARE * step_s
        factor, before = own_s / max(1e-9, others_s), self._told.get(rank)
        if is_slow and (before is None or factor > _WORSE * before):
            self._told[rank] = factor
        elif before is not None and factor < (1 + self._factor) / 2:
            del self._told[rank]
        else:
            return None
        return Verdict(
            rank=rank, is_slow=rank in self._told, factor=factor, own_s=own_s, others_s=others_s,
            is_data=data_s - others_data_s > (own_s - others_s) / 2,
        )  # fmt: skip


def _of_others(look: Sequence[tuple[float, float, float]], rank: int, index: int) -> float:
    """Return the median over all other ranks; including this rank would halve the deviation of one of two ranks."""
    return statistics.median(times[index] for other, times in enumerate(look) if other != rank)
