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
from hpc_trainer.runs.reading import Faults, read_json
from hpc_trainer.runs.record_values import as_count, as_text, as_time, typed

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
    record = read_json(paths.profile_request, Faults())
    if record is None:
        return None
    try:
        check_trusted(paths.profile_request)
        kinds = {"id": as_text, "time": as_time, "keep_s": as_time, "num_steps": as_count, "ranks": _as_ranks}
        request = ProfileRequest(**typed(record, kinds))
    except (KeyError, ValueError, OSError, RunStateError):
        return None
    return request if 1 <= request.num_steps <= MAX_STEPS else None


def withdraw(paths: RunPaths, request: ProfileRequest) -> None:
    """Nobody waits for it any more; another one in its place stays."""
    found = read_request(paths)
    if found is not None and found.id == request.id:
        paths.profile_request.unlink(missing_ok=True)


def write_answer(paths: RunPaths, rank: int, answer: ProfileAnswer) -> None:
    """Raises OSError."""
    write_json(paths.profile_answer(rank), asdict(answer), sync=False)


def read_answer(paths: RunPaths, rank: int, faults: Faults | None = None) -> ProfileAnswer | None:
    """The newest answer of a rank; None: it has given none that can be read."""
    record = read_json(paths.profile_answer(rank), Faults() if faults is None else faults)
    if record is None:
        return None
    kinds = {"id": as_text, "state": as_text, "attempt": as_count, "step": as_count}
    optional = {"figures": _as_mapping, "lines": _as_lines, "error": as_text}
    try:
        return ProfileAnswer(**typed(record, kinds, optional))
    except (KeyError, ValueError):
        return None


def _as_ranks(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError("no list of ranks")
    return tuple(map(as_count, value))


def _as_lines(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError("no lines")
    return tuple(map(as_text, value))


def _as_mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("no mapping")
    return value
