"""ledger.jsonl: seconds of each kind that attempts of a run spent, and for how long Slurm gave them their nodes.

Rank 0 appends a line when its attempt comes to its end. Until then heartbeat.json has the same figures, so a kill loses
what came after the last sign of life; the attempt that follows copies them into the file. A look at the run adds what
Slurm's accounting says of an attempt's allocation, once: accountings forget.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpc_trainer.errors import HpcTrainerError
from hpc_trainer.runs.files import append_lines, check_trusted
from hpc_trainer.runs.layout import HEARTBEAT, RunPaths
from hpc_trainer.runs.reading import Faults, parsed_file, parsed_lines
from hpc_trainer.runs.record_values import as_count, as_table, as_text, as_time, typed

Seconds = Mapping[str, float]
"""Kind (`runtime.spans.Kind`) -> seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What rank 0 of one attempt had spent up to `time`, and how far it was."""

    attempt: int
    time: float
    step: int
    steps_done: int
    """Optimizer steps that this attempt did, also those that it went back behind."""
    seconds: Seconds
    is_last: bool = False
    """The attempt was about to end."""
    allocated_time: float | None = None
    """When the job's script began, where Slurm or that says so."""

    @property
    def begin_time(self) -> float:
        """When the process of rank 0 began, seconds since the epoch."""
        return self.time - sum(self.seconds.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Slurm gave a job its nodes once; times in seconds since the epoch, `elapsed_s` as sacct has it."""

    job_id: str
    start_time: float
    end_time: float
    elapsed_s: float
    state: str
    """Slurm's word."""


@dataclass(frozen=True, slots=True)
class LedgerFile:
    """What there is of a run: attempt -> what it spent, and allocations that have ended."""

    spent: Mapping[int, Spent]
    allocations: Sequence[Allocation] = field(default=())


def spent_so_far(
    seconds: Iterable[tuple[str, float]], *, steps_done: int, allocated_time: float | None = None
) -> dict[str, Any]:
    """The part of a heartbeat that tells what was spent; kinds without a millisecond are left out."""
    rounded = {str(getattr(kind, "value", kind)): round(each, 3) for kind, each in seconds}
    found = {"steps_done": steps_done, "seconds": {kind: each for kind, each in rounded.items() if each > 0}}
    return found if allocated_time is None else {**found, "allocated_time": allocated_time}


def append_spent(paths: RunPaths, attempt: int, step: int, told: Mapping[str, Any]) -> None:
    """An attempt is about to end: `told` is `spent_so_far`. Never raises for a file system that refuses."""
    _append(paths, [{"event": "spent", "attempt": attempt, "time": time.time(), "step": step, "is_last": True, **told}])


def keep_spent(paths: RunPaths, attempt: int) -> None:
    """A new attempt begins, and will replace the heartbeat: what that has of one before, and no line has, gets one."""
    beat = _of_heartbeat(paths, Faults())
    if beat is not None and beat.attempt < attempt and beat.attempt not in _read_lines(paths, Faults()).spent:
        told = spent_so_far(beat.seconds.items(), steps_done=beat.steps_done, allocated_time=beat.allocated_time)
        line = {"attempt": beat.attempt, "time": beat.time, "step": beat.step, "is_last": False}
        _append(paths, [{"event": "spent", **line, **told}])


def append_allocations(paths: RunPaths, allocations: Iterable[Allocation]) -> None:
    """The accounting has told of these. For whoever owns the run; never raises, as `append_spent`."""
    lines = [
        {"event": "allocation", "job_id": each.job_id, "start_time": each.start_time, "end_time": each.end_time,
         "elapsed_s": each.elapsed_s, "state": each.state}
        for each in allocations
    ]  # fmt: skip
    with contextlib.suppress(OSError):
        if lines and paths.folder.stat().st_uid == os.getuid():
            _append(paths, lines)


def read_ledger_file(paths: RunPaths, faults: Faults | None = None) -> LedgerFile:
    """What ledger.jsonl and, of the newest attempt, heartbeat.json tell; damaged lines are set aside, as faults."""
    file, beat = _read_lines(paths, faults), _of_heartbeat(paths, faults)
    if beat is None or beat.attempt in file.spent:
        return file
    return LedgerFile({**file.spent, beat.attempt: beat}, file.allocations)


def _read_lines(paths: RunPaths, faults: Faults | None) -> LedgerFile:
    spent: dict[int, Spent] = {}
    allocations: dict[tuple[str, float], Allocation] = {}
    for line in parsed_lines(paths.ledger, _parse, faults):
        if isinstance(line, Spent):
            spent[line.attempt] = line
        else:
            allocations[line.job_id, line.start_time] = line
    return LedgerFile(spent, list(allocations.values()))


def _parse(record: Mapping[str, Any]) -> Spent | Allocation:
    if record.get("event") == "allocation":
        return Allocation(**typed(record, _ALLOCATION))
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


def _append(paths: RunPaths, lines: Sequence[Mapping[str, Any]]) -> None:
    """A full disk, or something else in the file's place, must not matter."""
    with contextlib.suppress(OSError, HpcTrainerError):
        if os.path.lexists(paths.ledger):
            check_trusted(paths.ledger)  # or our line would make another's look like ours
        append_lines(paths.ledger, lines, sync=False, sealed=True)


def _as_seconds(value: object) -> dict[str, float]:
    return {kind: as_time(each) for kind, each in as_table(value).items()}


_SPENT = {"attempt": as_count, "time": as_time, "step": as_count, "steps_done": as_count, "seconds": _as_seconds}
_ALLOCATION = {
    "job_id": as_text, "start_time": as_time, "end_time": as_time, "elapsed_s": as_time, "state": as_text,
}  # fmt: skip
