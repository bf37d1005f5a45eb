"""Time of one rank by kind: each moment of its process belongs to exactly one kind. No torch.

    with run.spans.within(Kind.evaluation):
        ...

If spans are nested, the innermost one counts, so the seconds of all kinds add up to the life of the process by
construction. Clocks are monotonic: setting the wall clock back has no effect.
"""

from __future__ import annotations

import itertools
import operator
import os
import time
from collections import deque
from pathlib import Path
from typing import Any

from hpc_trainer.record.ledger import Kind, spent_so_far
from hpc_trainer.runtime.pace import job_start_time

_RECENT = 4096


class Spans:
    """The spans of one process, entered and left by its main thread; other threads may read.

    Args:
        age_s: seconds since the process began; they belong to `start_up`.
    """

    __slots__ = ("_open", "_recent", "_since", "_total", "_zero")

    def __init__(self, age_s: float = 0.0) -> None:
        now = time.monotonic()
        self._zero = time.time() - now
        self._total = dict.fromkeys(Kind, 0.0)
        self._since = now - age_s
        self._recent: deque[tuple[Kind, float, float, int | None]] = deque(maxlen=_RECENT)
        self._open = _Span(self, Kind.start_up, None)
        self._open.begin = self._since

    @classmethod
    def of_process(cls) -> Spans:
        """Return the spans of this process, including Python's own start; called once."""
        return cls(_age_s())

    def within(self, kind: Kind, step: int | None = None) -> _Span:
        """Return a context manager: the time of its block is of this kind, except for nested spans. Takes ≤ 1 µs."""
        return _Span(self, kind, step)

    def rest(self, kind: Kind) -> None:
        """Set the kind of the time outside all spans from now on; it begins as start_up and ends as shutdown."""
        span = self._open
        if span.outer is None:
            self._charge()
        while span.outer is not None:
            span = span.outer
        span.kind = kind

    def hang(self, silent_s: float) -> None:
        """Count the newest `silent_s` seconds as a hang, before the process ends. Any thread may call this.

        The main thread is then stuck, or has only just left the spans that it was stuck in.
        """
        now = self._charge()
        for kind, newest_s in self._newest(now - silent_s, now).items():
            taken_s = min(newest_s, self._total[kind])
            self._total[kind] -= taken_s
            self._total[Kind.hang] += taken_s
        self._open.kind = Kind.shutdown

    def seconds(self) -> dict[Kind, float]:
        """Return the seconds of each kind so far, also of kinds without any; their sum is the life of the process."""
        totals, span, since = dict(self._total), self._open, self._since
        totals[span.kind] += max(0.0, time.monotonic() - since)
        return totals

    def spent(self, steps_done: int) -> dict[str, Any]:
        """Return `seconds` in the form of the ledger (`record.ledger`), with the steps done in that time."""
        return spent_so_far(self.seconds().items(), steps_done=steps_done, allocated_time=job_start_time())

    def recent(self) -> list[tuple[Kind, float, float, int | None]]:
        """Return (kind, begin, end, step) of the newest spans, by their end, at most 4096, then of the open spans.

        Times are in seconds since the epoch; an open span ends now. Nested spans are listed besides the outer ones.
        """
        zero, closed = self._zero, [(kind, begin, end, step) for kind, begin, end, step in self._recent.copy()]
        span: _Span | None = self._open
        now, still = time.monotonic(), []
        while span is not None:
            still.append((span.kind, span.begin, now, span.step))
            span = span.outer
        return [(kind, zero + begin, zero + end, step) for kind, begin, end, step in (*closed, *reversed(still))]

    def enter(self, span: _Span) -> _Span:
        """Make `span` the innermost one, and return the previous innermost span. Only `_Span` calls this."""
        now = span.begin = time.monotonic()
        before = self._open
        self._total[before.kind] += now - self._since
        self._since, self._open = now, span
        return before

    def leave(self, span: _Span, outer: _Span) -> None:
        """End `span`, so that `outer` is the innermost one. Only `_Span` calls this."""
        now = time.monotonic()
        self._total[span.kind] += now - self._since
        self._since, self._open = now, outer
        self._recent.append((span.kind, span.begin, now, span.step))

    def _charge(self) -> float:
        """Add the time since the last change to its kind, and return the present time on the monotonic clock."""
        now = time.monotonic()
        self._total[self._open.kind] += now - self._since
        self._since = now
        return now

    def _newest(self, begin: float, end: float) -> dict[Kind, float]:
        """Return seconds by kind between two times on the monotonic clock, as far back as the ring keeps spans."""
        # Of two spans that began at the same time the inner one comes first: it ended first, or is nested deeper.
        spans = [(first, last, kind) for kind, first, last, _ in self._recent.copy()]
        span: _Span | None = self._open
        while span is not None:
            spans.append((span.begin, end, span.kind))
            span = span.outer
        moments = {begin, end}.union(*((first, last) for first, last, _ in spans if last > begin))
        seconds: dict[Kind, float] = {}
        for since, until in itertools.pairwise(sorted(moment for moment in moments if begin <= moment <= end)):
            around = [candidate for candidate in spans if candidate[0] <= since and candidate[1] >= until]
            if around:
                kind = max(around, key=operator.itemgetter(0))[2]
                seconds[kind] = seconds.get(kind, 0.0) + until - since
        return seconds


class _Span:
    """Span of time: a context manager, used once."""

    __slots__ = ("_spans", "begin", "kind", "outer", "step")

    def __init__(self, spans: Spans, kind: Kind, step: int | None) -> None:
        self._spans, self.kind, self.step = spans, kind, step
        self.begin = 0.0
        self.outer: _Span | None = None

    def __enter__(self) -> None:
        self.outer = self._spans.enter(self)

    def __exit__(self, *exception: object) -> None:
        assert self.outer is not None
        self._spans.leave(self, self.outer)


def _age_s() -> float:
    """Return the seconds since this process began (proc(5): starttime, in ticks since the boot); 0 if unknown."""
    try:
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
