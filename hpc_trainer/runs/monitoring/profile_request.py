"""profile/request.json and profile/rank-N.json: a profile asked of a run at work, and what each rank made of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hpc_trainer.errors import RunStateError
from hpc_trainer.runs.files import check_trusted, write_json
from hpc_trainer.runs.layout import RunPaths
from hpc_trainer.runs.modes import make_folder
from hpc_trainer.runs.reading import Faults, parsed_file
from hpc_trainer.runs.record_values import as_count, as_table, as_text, as_time, tuple_of, typed

MAX_STEPS = 1000
"""A step of a large model leaves 1 MB of spans."""
WATCHING, DONE, FAILED = "watching", "done", "failed"
# Clocks of a login node and of a compute node may differ by so much.
_SKEW_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """`num_steps` steps of `ranks`, asked at `time` (s since the epoch). After `keep_s` seconds nobody waits for it."""

    id: str
    time: float
    keep_s: float
    num_steps: int
    ranks: tuple[int, ...]

    def is_wanted(self, now: float | None = None) -> bool:
        """False for one that an attempt before has left, and whoever asked has long gone."""
        age = (time.time() if now is None else now) - self.time
        return -_SKEW_S <= age <= self.keep_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileAnswer:
    """What a rank has made of the request `id`. `figures` and `lines` are of a profile that is done, as its table's."""

    id: str
    state: str
    attempt: int
    step: int
    figures: Mapping[str, Any] = field(default_factory=dict)
    lines: tuple[str, ...] = ()
    error: str | None = None


def write_request(paths: RunPaths, request: ProfileRequest) -> None:
    """Asks, in the place of what was asked before. Raises OSError."""
    make_folder(paths.profile)
    write_json(paths.profile_request, asdict(request), sync=False)


def read_request(paths: RunPaths) -> ProfileRequest | None:
    """What is asked; None: nothing, or nothing that `write_request` would write, or others may have written it."""
    request = parsed_file(paths.profile_request, lambda record: ProfileRequest(**typed(record, _REQUEST)), Faults())
    if request is None or not request.ranks or not 1 <= request.num_steps <= MAX_STEPS:
        return None
    try:
        check_trusted(paths.profile_request)
    except (OSError, RunStateError):
        return None
    return request


def withdraw(paths: RunPaths, request: ProfileRequest) -> None:
    """Nobody waits for it any more; another one in its place stays."""
    found = read_request(paths)
    if found is not None and found.id == request.id:
        paths.profile_request.unlink(missing_ok=True)


def write_answer(paths: RunPaths, rank: int, answer: ProfileAnswer) -> None:
    """Raises OSError."""
    write_json(paths.profile_answer(rank), asdict(answer), sync=False)


def read_answer(paths: RunPaths, rank: int) -> ProfileAnswer | None:
    """The newest answer of a rank; None: it has given none that can be read."""
    return parsed_file(paths.profile_answer(rank), lambda record: ProfileAnswer(**typed(record, *_ANSWER)), Faults())


_REQUEST = {"id": as_text, "time": as_time, "keep_s": as_time, "num_steps": as_count, "ranks": tuple_of(as_count)}
_ANSWER = (
    {"id": as_text, "state": as_text, "attempt": as_count, "step": as_count},
    {"figures": as_table, "lines": tuple_of(as_text), "error": as_text},
)
