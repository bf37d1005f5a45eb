"""Flight record of a rank: its last spans and collectives, written when it fails, hangs or exits without a save.

Torch's own flight recorder records each collective anyway, of all process groups: ours, DDP's and FSDP's. On gloo it
knows since torch 2.8 when a collective was entered and whether it is over, but not when it ended; by default the last
2,000 (`TORCH_FR_BUFFER_SIZE`). On NCCL the same recorder has another name.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
import threading
import time
import traceback
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch._C import _distributed_c10d as c10d

from hpc_trainer.errors import PeerLostError
from hpc_trainer.observe.flight import MAX_KEPT, Collective, Flight, FlightSpan, write_flight
from hpc_trainer.record.journal import own_frame
from hpc_trainer.record.reading import is_there
from hpc_trainer.runtime.rank_group import is_lost_peer
from hpc_trainer.runtime.spans import Spans
from hpc_trainer.runtime.watchdog import STACKS_S
from hpc_trainer.training.context import RunContext
from hpc_trainer.worker.conclude import Stop

_ASKED_BY = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
# Bytes of an element by number format, in torch's C++ names. A format that is not listed counts as 1 byte.
_BYTES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2, "ComplexFloat": 8}


def recent_collectives() -> list[Collective]:
    """Return the newest collectives, at most 256, the oldest first. Takes 0.2 s.

    The fields `step` and `during` are left for the caller to set. The list is empty if torch has no recorder, or if the
    recorder returns no entries.
    """
    collectives: list[Collective] = []
    for name in _ASKED_BY:
        ask = getattr(c10d, name, None)
        if ask is not None:
            collectives += _read(ask())
    return sorted(collectives, key=lambda collective: collective.begin)[-MAX_KEPT:]


def _read(dump: bytes | str) -> Iterator[Collective]:
    for entry in json.loads(dump).get("entries", [])[-MAX_KEPT:]:
        sizes, formats = entry.get("input_sizes") or [], entry.get("input_dtypes") or []
        is_p2p = bool(entry.get("is_p2p"))
        name, number = entry["process_group"][:2][::-1], entry["p2p_seq_id" if is_p2p else "collective_seq_id"]
        yield Collective(
            group=f"{name[0]} ({name[1]})", seq=int(number),
            name=str(entry["profiling_name"]).rpartition(":")[2], shape=_shape(sizes, formats),
            num_bytes=_num_bytes(sizes, formats), begin=entry["time_created_ns"] / 1e9, is_open=_is_open(entry),
            is_p2p=is_p2p,
        )  # fmt: skip


def _is_open(entry: Mapping[str, Any]) -> bool:
    return not entry.get("retired") and entry.get("state") != "completed"


def _shape(sizes: list[list[int]], formats: list[str]) -> str:
    texts = [f"{kind.lower()}{size}" for size, kind in zip(sizes[:3], formats[:3], strict=False)]
    return " ".join([*texts, f"and {len(sizes) - 3} more"] if len(sizes) > 3 else texts)


def _num_bytes(sizes: list[list[int]], formats: list[str]) -> int:
    return sum(math.prod(size) * _BYTES.get(kind, 1) for size, kind in zip(sizes, formats, strict=False))


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
        """Replace the file. Any thread may call this; an error is only logged, as the rank fails for another reason.

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
