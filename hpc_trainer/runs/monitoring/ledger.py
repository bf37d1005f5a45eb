"""ledger.jsonl: seconds of each kind that attempts of a run spent.

Rank 0 appends a line when its attempt is about to end. Until then heartbeat.json has the same figures, so a kill loses
only the time after the last sign of life. The next attempt copies these figures into the file.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hpc_trainer.errors import HpcTrainerError
from hpc_trainer.runs.files import append_lines, check_trusted
from hpc_trainer.runs.layout import HEARTBEAT, RunPaths
from hpc_trainer.runs.reading import Faults, parsed_file, parsed_lines
from hpc_trainer.runs.record_values import as_count, as_table, as_time, typed

Seconds = Mapping[str, float]
"""Kind (`runtime.spans.Kind`) -> seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Seconds that rank 0 of one attempt had spent up to `time`, and its progress."""

    attempt: int
    time: float
    step: int
    steps_done: int
    """Optimizer steps that this attempt did, including steps that a rollback undid."""
    seconds: Seconds
    is_last: bool = False
    """True if the attempt was about to end."""
    allocated_time: float | None = None
    """Start of the job's script, in seconds since the epoch; None if neither Slurm nor the script says."""

    @property
    def begin_time(self) -> float:
        """Start of rank 0's process, in seconds since the epoch."""
        return self.time - sum(self.seconds.values())


def spent_so_far(
    seconds: Iterable[tuple[str, float]], *, steps_done: int, allocated_time: float | None = None
) -> dict[str, Any]:
    """Return the part of a heartbeat that records spent time; kinds without a millisecond are left out."""
    rounded = {str(getattr(kind, "value", kind)): round(spent_s, 3) for kind, spent_s in seconds}
    record = {"steps_done": steps_done, "seconds": {kind: spent_s for kind, spent_s in rounded.items() if spent_s > 0}}
    return record if allocated_time is None else {**record, "allocated_time": allocated_time}


def append_spent(paths: RunPaths, attempt: int, step: int, told: Mapping[str, Any]) -> None:
    """Append the last line of an attempt, with `told` from `spent_so_far`; an error of the file system is ignored."""
    _append(paths, {"attempt": attempt, "time": time.time(), "step": step, "is_last": True, **told})


def keep_spent(paths: RunPaths, attempt: int) -> None:
    """Append the heartbeat's figures if no line has them, before a new attempt replaces the heartbeat.

    Args:
        paths: paths of the run.
        attempt: the new attempt; only figures of earlier attempts are appended.
    """
    beat = _of_heartbeat(paths, Faults())
    if beat is not None and beat.attempt < attempt and beat.attempt not in _read_lines(paths, Faults()):
        record = spent_so_far(beat.seconds.items(), steps_done=beat.steps_done, allocated_time=beat.allocated_time)
        line = {"attempt": beat.attempt, "time": beat.time, "step": beat.step, "is_last": False}
        _append(paths, {**line, **record})


def read_spent(paths: RunPaths, faults: Faults | None = None) -> dict[int, Spent]:
    """Return attempt -> time spent, from ledger.jsonl, and from heartbeat.json for the newest; skip damaged lines."""
    spent, beat = _read_lines(paths, faults), _of_heartbeat(paths, faults)
    if beat is not None:
        spent.setdefault(beat.attempt, beat)
    return spent


def _read_lines(paths: RunPaths, faults: Faults | None) -> dict[int, Spent]:
    return {spent.attempt: spent for spent in parsed_lines(paths.ledger, _parse, faults)}


def _parse(record: Mapping[str, Any]) -> Spent:
    if record.get("event") != "spent":
        raise ValueError(f"event {str(record.get('event'))[:20]!r} is of a newer version")
    return _spent(record)


def _of_heartbeat(paths: RunPaths, faults: Faults | None) -> Spent | None:
    return parsed_file(paths.at(HEARTBEAT), _of_beat, faults)


def _of_beat(beat: Mapping[str, Any]) -> Spent | None:
    spent = beat.get("spent")
    return _spent({**beat, **spent}) if isinstance(spent, dict) and spent else None


def _spent(record: Mapping[str, Any]) -> Spent:
    return Spent(**typed(record, _SPENT, {"allocated_time": as_time}), is_last=record.get("is_last") is True)


def _append(paths: RunPaths, line: Mapping[str, Any]) -> None:
    """Append a line, unless the disk is full or something else is in the file's place."""
    with contextlib.suppress(OSError, HpcTrainerError):
        if os.path.lexists(paths.ledger):
            check_trusted(paths.ledger)  # otherwise our line would make another user's file look like ours
        append_lines(paths.ledger, [{"event": "spent", **line}], sync=False, sealed=True)


def _as_seconds(value: object) -> dict[str, float]:
    return {kind: as_time(seconds) for kind, seconds in as_table(value).items()}


_SPENT = {"attempt": as_count, "time": as_time, "step": as_count, "steps_done": as_count, "seconds": _as_seconds}
