"""Summaries of the files of completed runs in one file of the sweep: `results` of 10,000 runs opens one file.

A summary is a copy, written by whoever reads first. It counts only while the run's folder and result are unchanged,
which takes two `stat` a run in place of four files. Without the file, or with a damaged or foreign one, the runs' own
files are read. No command that acts on a state uses it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from hpc_trainer.errors import HpcTrainerError
from hpc_trainer.record.files import whole_file
from hpc_trainer.record.journal import Attempt
from hpc_trainer.record.layout import RESULT, SUBMISSIONS, RunPaths, SweepPaths
from hpc_trainer.record.metrics import SPEED
from hpc_trainer.record.reading import Faults, parse_record, parse_together, read_bytes, seal
from hpc_trainer.record.run_folder import RunFolder, job_of_run
from hpc_trainer.record.states import DONE, RunState
from hpc_trainer.record.submissions import Submission
from hpc_trainer.record.trust import check_place, is_ours

_FORMAT = 1
_MOST_BYTES = 2**29
# A run whose summary is longer, as after a hundred failed attempts, is read from its folder.
_LONGEST_LINE = 20_000
# With fewer runs, opening the folders is as cheap as keeping the file; and it is written when a tenth of it is new.
_LEAST_RUNS, _NEW_SHARE = 50, 0.1
# A folder that changed so recently may change again within one tick of its file system's clock.
_SETTLED_S = 5.0

_RUN = re.compile(rb'^\{"run_id": "([A-Za-z0-9._-]+)"', re.MULTILINE)
_OF_BEAT = ("time", "attempt", "step", "num_steps", "step_s", "save_s", *SPEED)

Stamp = tuple[int, ...]


def stamp_of(place: str, name: str | None = None) -> Stamp | None:
    """Return numbers that change with a folder's entries, or with a file in it; None if it is not there.

    Args:
        place: the folder.
        name: name of the file; None: the folder itself.
    """
    try:
        info = os.stat(place if name is None else f"{place}/{name}")  # noqa: PTH116  (20,000 of them)
    except OSError:
        return None
    return (info.st_mtime_ns, info.st_ino) if name is None else (info.st_mtime_ns, info.st_size)


@dataclass(slots=True)
class Summary:
    """Summary of one completed run; `figures` are values that `results` computed from other files of the run."""

    uuid: str
    stamp: Stamp
    attempts: Sequence[Mapping[str, Any]]
    heartbeat: Mapping[str, Any]
    result: Mapping[str, Any]
    figures: dict[str, Any]

    def folder(self, paths: RunPaths, latest: tuple[Submission, int]) -> RunFolder:
        """Return the run's folder as `read_folder` returned it."""
        submission, index = latest
        return RunFolder(
            paths=paths, submission=submission, element=index, job_id=job_of_run(submission, index, None),
            attempts=[_attempt(record) for record in self.attempts], heartbeat=self.heartbeat, result=self.result,
            markers=frozenset({DONE}), waits=None,
        )  # fmt: skip


class Summaries:
    """Summaries of a sweep: those of the file, and those of runs that this command has read."""

    def __init__(self, sweep: SweepPaths) -> None:
        self._sweep = sweep
        self._lines: dict[str, tuple[int, int]] | None = None
        self._data = b""
        self._records: dict[str, dict[str, Any]] | None = None
        self._figures: dict[str, dict[str, Any]] = {}
        self._new: dict[str, Summary] = {}

    def read(self, paths: RunPaths, latest: tuple[Submission, int], read: Callable[[str], RunFolder]) -> RunFolder:
        """Return a completed run's folder, from its summary if that fits this submission and the present files.

        Args:
            paths: paths of the run.
            latest: the run's newest submission, and the run's index in it.
            read: reads the folder of a run, given its id.
        """
        run_id = paths.run_id
        stamp = _stamp(paths)  # before the folder is read: what changes meanwhile must not pass for what was read
        summary = self._new.get(run_id) or self._parsed(run_id)
        if summary is not None and summary.uuid == latest[0].uuid and summary.stamp == stamp:
            self._figures[run_id] = summary.figures
            return summary.folder(paths, latest)
        folder = read(run_id)
        if stamp is not None and _is_final(folder, stamp):
            self._new[run_id] = summary = _summary(folder, stamp)
            self._figures[run_id] = summary.figures
        return folder

    def figures(self, run_id: str) -> Mapping[str, Any] | None:
        """Return the figures in the summary of a run that `read` has returned; None if it has no summary."""
        return self._figures.get(run_id)

    def add_figures(self, run_id: str, figures: Mapping[str, Any]) -> None:
        """Add figures that were computed from a run's files to its summary, if it has one."""
        if run_id in self._figures and run_id not in self._new and (summary := self._parsed(run_id)) is not None:
            self._new[run_id] = summary
        if run_id in self._new:
            self._new[run_id].figures.update(figures)
            self._figures[run_id] = self._new[run_id].figures

    def save(self) -> None:
        """Replace the file if enough of it is new.

        Never raises: after a failure, such as a full disk or a user who may only read, the next command takes longer.
        """
        lines = self._index()
        if len(lines.keys() | self._new.keys()) < _LEAST_RUNS or len(self._new) <= _NEW_SHARE * len(lines):
            return
        new = (_line(run_id, summary) for run_id, summary in self._new.items())
        kept = (self._data[slice(*lines[run_id])] for run_id in lines if run_id not in self._new)
        body = b"".join([*(f"{line}\n".encode() for line in new if len(line) <= _LONGEST_LINE), *kept])
        with contextlib.suppress(OSError, HpcTrainerError):
            if self._sweep.folder.stat().st_uid != os.getuid():
                return
            check_place(self._sweep.folder)
            head = seal(json.dumps({"format": _FORMAT, "body": f"{zlib.crc32(body):08x}"}))
            with whole_file(self._sweep.summaries, sync=False) as file:
                file.write(f"{head}\n".encode() + body)
            self._sweep.summaries.chmod(self._sweep.specs.stat().st_mode & 0o666)
            self._new.clear()
            self._lines, self._data, self._records = None, b"", None

    def _index(self) -> dict[str, tuple[int, int]]:
        """Return run id -> (begin, end) of its line in the file; {} if there is no file that can be trusted."""
        if self._lines is None:
            self._lines = {}
            with contextlib.suppress(HpcTrainerError, OSError, ValueError):
                data = None
                if is_ours(self._sweep.summaries, Faults()):
                    data = read_bytes(self._sweep.summaries, Faults(), limit=_MOST_BYTES)
                begin = (data or b"").find(b"\n") + 1
                head = parse_record(data[:begin]) if data and begin else {}
                if data and head.get("format") == _FORMAT and head.get("body") == f"{zlib.crc32(data[begin:]):08x}":
                    self._data = data
                    matches = [(match.start(), match[1].decode()) for match in _RUN.finditer(data, begin)]
                    ends = [*(start for start, _ in matches[1:]), len(data)]
                    self._lines = {run_id: (start, end) for (start, run_id), end in zip(matches, ends, strict=True)}
        return self._lines

    def _parsed(self, run_id: str) -> Summary | None:
        place = self._index().get(run_id)
        if place is None:
            return None
        if self._records is None:
            self._records = self._all_parsed()
        try:
            record = self._records.pop(run_id, None) or json.loads(self._data[slice(*place)])
            return Summary(
                uuid=record["uuid"], stamp=tuple(record["stamp"]), attempts=record["attempts"],
                heartbeat=record["heartbeat"], result=record["result"], figures=record["figures"],
            )  # fmt: skip
        except (KeyError, TypeError, ValueError):
            return None

    def _all_parsed(self) -> dict[str, dict[str, Any]]:
        """Return run id -> its line; {} if one cannot be parsed with the others."""
        records = parse_together([self._data[slice(*place)] for place in self._index().values()])
        return {record["run_id"]: record for record in records or ()}


def _is_final(folder: RunFolder, stamp: Stamp) -> bool:
    """Return True if a run's folder was read without a fault, and nothing that belongs to the run changes it again."""
    newest = folder.newest
    return (
        DONE in folder.markers
        and not (folder.faults or folder.doubt or folder.untold_job or folder.rivals or folder.is_claimed)
        and bool(folder.uuid)
        and folder.turn is None
        and newest is not None
        and newest.has_ended
        and 0 < max(stamp[0], stamp[2]) < (time.time() - _SETTLED_S) * 1e9
        and stamp_of(folder.paths.place, SUBMISSIONS) is None  # successor jobs, which decide what the run's job is
    )


def _summary(folder: RunFolder, stamp: Stamp) -> Summary:
    beat = {key: folder.heartbeat[key] for key in _OF_BEAT if key in folder.heartbeat}
    metrics = folder.heartbeat.get("metrics", {})
    if folder.result.get("metrics"):
        metrics = {key: metrics[key] for key in SPEED if key in metrics}
    return Summary(
        uuid=folder.uuid, stamp=stamp, attempts=[_record(attempt) for attempt in folder.attempts],
        heartbeat={**beat, **({"metrics": metrics} if metrics else {})}, result=folder.result, figures={},
    )  # fmt: skip


def _stamp(paths: RunPaths) -> Stamp | None:
    folder, result = stamp_of(paths.place), stamp_of(paths.place, RESULT)
    return None if folder is None or result is None else (*folder, *result)


def _line(run_id: str, summary: Summary) -> str:
    return json.dumps({
        "run_id": run_id, "uuid": summary.uuid, "stamp": summary.stamp, "attempts": summary.attempts,
        "heartbeat": summary.heartbeat, "result": summary.result, "figures": summary.figures,
    })  # fmt: skip


_FIELDS = tuple((field.name, field.default) for field in fields(Attempt) if field.name not in ("error", "guarded"))


def _record(attempt: Attempt) -> dict[str, Any]:
    values = ((name, getattr(attempt, name), default) for name, default in _FIELDS)
    record = {name: value for name, value, default in values if value is not default}
    more = {"error": attempt.error, "guarded": attempt.guarded}
    return record | {name: value for name, value in more.items() if value}


def _attempt(record: Mapping[str, Any]) -> Attempt:
    state = record.get("state")
    return Attempt(**{**record, "state": None if state is None else RunState(state)})
