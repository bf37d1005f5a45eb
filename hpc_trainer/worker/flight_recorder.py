"""Record of what this rank did last, written when it fails, hangs, or leaves without a save.

No step records anything for this: spans and steps are kept for other reasons, and collectives by torch. A thread that
holds Python's lock lets no other thread write: then faulthandler's stacks in the rank's log are all there is.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import threading
import time
import traceback
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hpc_trainer.errors import PeerLostError
from hpc_trainer.runs.failure import own_frame
from hpc_trainer.runs.monitoring.flight import MAX_KEPT, Collective, Flight, FlightSpan, write_flight
from hpc_trainer.runs.shared_folder import is_there
from hpc_trainer.runtime.collectives import recent_collectives
from hpc_trainer.runtime.rank_group import is_lost_peer
from hpc_trainer.runtime.spans import Spans
from hpc_trainer.runtime.watchdog import STACKS_S
from hpc_trainer.training.context import RunContext
from hpc_trainer.worker.conclude import Stop

# A span that ended less than this many seconds ago is an open one (`Spans.recent`).
_JUST_S = 0.05
_ECHO_S = 30.0
# A driver or a disk that does not answer must not keep a rank that has to leave.
_MOST_S = 0.75 * STACKS_S
_OURS = str(Path(__file__).parents[1])


class FlightRecorder:
    """Flight recorder of one rank of one attempt. `run` is None until the run exists.

    Args:
        stop: identity and place of this rank.
        kept: spans of this process.
        collectives: returns the last collectives of this process.
    """

    def __init__(
        self, stop: Stop, kept: Spans, collectives: Callable[[], Sequence[Collective]] = recent_collectives
    ) -> None:
        self._stop, self._kept, self._collectives = stop, kept, collectives
        self._has_seen_failure = False
        self._last_time, self._last_step = -_ECHO_S, -1
        self.run: RunContext | None = None

    def write(self, why: str, error: BaseException | None = None) -> None:
        """Replace the file. Any thread may call this; an error is only logged, because the rank has worse to report.

        A call soon after a record, without a step between, writes nothing: its cause is mostly the same. For example,
        another rank's end has closed a connection, and the first record says more about it. Takes 3 s at the most.
        """
        now, step = time.monotonic(), self._newest_step()
        if now - self._last_time < _ECHO_S and step == self._last_step:
            return
        self._last_time, self._last_step = now, step
        thread = threading.Thread(target=self._write, args=(why, error), name="flight recorder", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads for this user
            self._write(why, error)
        else:
            thread.join(_MOST_S)

    def _write(self, why: str, error: BaseException | None) -> None:
        try:
            write_flight(self._stop.paths, self._flight(why, error))
        except Exception as failed:
            sys.stderr.write(f"the flight record could not be written: {type(failed).__name__}: {failed}\n")

    def look(self, silent_s: float) -> None:
        """Write the file if another rank has failed: Slurm soon ends this one too. For the watchdog's thread."""
        if self._has_seen_failure or self._stop.flag.time is None or silent_s < STACKS_S:
            return
        if is_there(self._stop.paths.failure(self._stop.attempt), parents=0):
            self._has_seen_failure = True
            self.write("another rank has failed, and this one waited for it")

    def _newest_step(self) -> int:
        return self.run.step_ends[-1][1] if self.run is not None and self.run.step_ends else -1

    def _flight(self, why: str, error: BaseException | None) -> Flight:
        now, run, env = time.time(), self.run, self._stop.env
        spans = [*_spans(self._kept)]
        ends = [] if run is None else [*run.step_ends]
        stack = traceback.format_exception(error) if error is not None else _stack()
        text = "".join(stack)
        try:
            collectives = [_placed(collective, ends, spans) for collective in self._collectives()]
        except Exception as failed:  # torch's recorder is not ours: its output may change
            sys.stderr.write(f"torch's flight recorder did not answer: {type(failed).__name__}: {failed}\n")
            collectives = []
        is_lost = error is not None and is_lost_peer(error)
        if is_lost and collectives:  # this rank waited there until the connection broke
            collectives[-1] = dataclasses.replace(collectives[-1], is_open=True)
        ended_by = None if error is None else PeerLostError.__name__ if is_lost else type(error).__name__
        return Flight(
            rank=env.rank, node=env.node, attempt=self._stop.attempt, world_size=env.world_size, time=now, why=why,
            step=ends[-1][1] if ends else None, error=ended_by,
            frame=own_frame(text, self._stop.config.trust), stack=tuple(text.splitlines()), spans=tuple(spans),
            collectives=tuple(collectives),
        )  # fmt: skip


def _spans(kept: Spans) -> Iterator[FlightSpan]:
    spans = kept.recent()[-MAX_KEPT:]
    now = max(end for _, _, end, _ in spans)  # by the spans' clock: the wall clock may have been set since
    for kind, begin, end, step in spans:
        yield FlightSpan(kind=kind.value, begin=begin, end=None if now - end < _JUST_S else end, step=step)


def _placed(collective: Collective, ends: Sequence[tuple[float, int]], spans: Sequence[FlightSpan]) -> Collective:
    """Return the collective with the step in which it was entered: the step that ended next, or the last one plus 1."""
    begin = collective.begin
    around = [span for span in spans if span.begin <= begin and (span.end is None or begin <= span.end)]
    during = max(around, key=lambda span: span.begin).kind if around else None
    if not ends or begin < ends[0][0]:
        return dataclasses.replace(collective, during=during)
    at = bisect_left(ends, (begin,))
    step = ends[at][1] if at < len(ends) else ends[-1][1] + 1
    return dataclasses.replace(collective, step=step, during=during)


def _stack() -> list[str]:
    """Return the present stack of the main thread, without the lines of code, which are on a disk that may hang."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)
    # Frames that started us are not the user's code.
    lines = itertools.dropwhile(lambda entry: not entry.filename.startswith(_OURS), reversed(frames))
    return [f'  File "{entry.filename}", line {entry.lineno}, in {entry.name}\n' for entry in lines]
