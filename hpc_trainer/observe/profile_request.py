"""profile/request.json and profile/rank-N.json: a request to profile a running run, and each rank's answer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hpc_trainer.errors import RunStateError
from hpc_trainer.record.files import make_folder, write_json
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.reading import Faults, as_count, as_table, as_text, as_time, parsed_file, tuple_of, typed
from hpc_trainer.record.trust import check_trusted

MAX_STEPS = 1000
"""Largest number of steps in a request; a step of a large model takes 1 MB of spans."""
WATCHING, DONE, FAILED = "watching", "done", "failed"
# Seconds by which the clocks of a login node and a compute node may differ.
_SKEW_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """Request at `time` (s since the epoch) to profile `num_steps` steps of `ranks`; it expires after `keep_s` s."""

    id: str
    time: float
    keep_s: float
    num_steps: int
    ranks: tuple[int, ...]

    def is_wanted(self, now: float | None = None) -> bool:
        """Return False if the request has expired: an earlier attempt left it, and its command no longer waits."""
        age = (time.time() if now is None else now) - self.time
        return -_SKEW_S <= age <= self.keep_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileAnswer:
    """A rank's answer to the request `id`. `figures` and `lines` are those of the finished profile's table."""

    id: str
    state: str
    attempt: int
    step: int
    figures: Mapping[str, Any] = field(default_factory=dict)
    lines: tuple[str, ...] = ()
    error: str | None = None


def write_request(paths: RunPaths, request: ProfileRequest) -> None:
    """Write a request in the place of an earlier one; raise OSError if the file system refused."""
    make_folder(paths.profile)
    write_json(paths.profile_request, asdict(request), sync=False)


def read_request(paths: RunPaths) -> ProfileRequest | None:
    """Return the current request; None if there is none, if it is invalid, or if others may have written it."""
    request = parsed_file(paths.profile_request, lambda record: ProfileRequest(**typed(record, _REQUEST)), Faults())
    if request is None or not request.ranks or not 1 <= request.num_steps <= MAX_STEPS:
        return None
    try:
        check_trusted(paths.profile_request)
    except (OSError, RunStateError):
        return None
    return request


def withdraw(paths: RunPaths, request: ProfileRequest) -> None:
    """Remove a request for which no command waits any more; another request in its place stays."""
    current = read_request(paths)
    if current is not None and current.id == request.id:
        paths.profile_request.unlink(missing_ok=True)


def write_answer(paths: RunPaths, rank: int, answer: ProfileAnswer) -> None:
    """Replace a rank's answer; raise OSError if the file system refused."""
    write_json(paths.profile_answer(rank), asdict(answer), sync=False)


def read_answer(paths: RunPaths, rank: int) -> ProfileAnswer | None:
    """Return the newest answer of a rank; None if there is none that can be read."""
    return parsed_file(paths.profile_answer(rank), lambda record: ProfileAnswer(**typed(record, *_ANSWER)), Faults())


_REQUEST = {"id": as_text, "time": as_time, "keep_s": as_time, "num_steps": as_count, "ranks": tuple_of(as_count)}
_ANSWER = (
    {"id": as_text, "state": as_text, "attempt": as_count, "step": as_count},
    {"figures": as_table, "lines": tuple_of(as_text), "error": as_text},
)
