"""Watchdog that ends a silent rank: a hung collective or a stuck loader must not keep the allocation. No torch.

Every rank has its own watchdog. If one rank is stuck, the others wait for it in a collective. All of them fall silent
within a step, and all write the stacks of their threads into their logs before the first of them exits.
"""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterator

# Seconds that the first rank that gives up waits for the others to write their stacks too.
STACKS_S = 4.0
SHORTEST_S = 2 * STACKS_S
"""Shortest limit in seconds: a shorter limit would end before a step of some seconds does."""
# A thread that holds the interpreter's lock stops our thread too. Then faulthandler's own thread, which needs no lock,
# ends the process this many seconds after the limit.
_LOCKED_S = 15.0
_ARM_EVERY_S = 5.0
_STDERR = 2  # descriptor, which the worker has redirected to the rank's log


class Watchdog:
    """Watchdog of one rank. `beat` reports that the rank lives, and costs 0.1 µs.

    Args:
        limit_s: seconds without a beat after which the rank has ended, at least SHORTEST_S.
        has_failed: returns True if another rank of this attempt has recorded its failure.
        give_up: called once, in a separate thread, with a sentence; it must end the process.
        follows: True if this rank exits soon after another has failed, because nothing else ends it (no srun).
        look: called in every round with the seconds since the last beat; it may end the process.
        record: called with the sentence before `give_up`, when the stacks are written; must not take STACKS_S.
    """

    def __init__(
        self,
        limit_s: float,
        *,
        has_failed: Callable[[], bool],
        give_up: Callable[[str], None],
        follows: bool,
        look: Callable[[float], None] = lambda silent_s: None,
        record: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._look, self._record = look, record
        self._limit_s, self._follows = limit_s, follows
        self._has_failed, self._give_up = has_failed, give_up
        self._last = time.monotonic()
        self._ended = threading.Event()

    def beat(self) -> None:
        """Report that this rank lives."""
        self._last = time.monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds since the last beat."""
        return time.monotonic() - self._last

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the block runs; an error of the block is not hidden."""
        self.beat()
        self._arm()
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()
            faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        armed = time.monotonic()
        poll_s = min(1.0, self._limit_s / 10)
        while not self._ended.wait(poll_s):
            now = time.monotonic()
            if now - armed > min(_ARM_EVERY_S, self._limit_s / 2):
                armed = now
                self._arm()
            silent_s = now - self._last
            self._look(silent_s)
            if silent_s > self._limit_s - STACKS_S:
                self._leave("no sign of life for {silent_s:.0f} s")
            is_late = silent_s > min(self._limit_s / 2, STACKS_S)
            if is_late and (self._follows or silent_s > self._limit_s / 2) and self._has_failed():
                self._leave("another rank has failed, and this one waits for it")

    def _arm(self) -> None:
        faulthandler.dump_traceback_later(self._limit_s + _LOCKED_S, exit=True, file=_STDERR)

    def _leave(self, reason: str) -> None:
        last, why = self._last, reason.format(silent_s=self.silent_s)
        sys.stderr.write(f"watchdog: {why}. Every thread of this rank:\n")
        faulthandler.dump_traceback(file=_STDERR, all_threads=True)
        self._record(why)
        if self._ended.wait(STACKS_S):
            return
        if self._last > last:
            sys.stderr.write("watchdog: it gives signs of life again, and may continue.\n")
        else:
            self._give_up(reason.format(silent_s=self.silent_s))  # with the time that the stacks took
