"""logs/attempt-NNN.rank-N.flight.json: what a rank did last, written when it fails, hangs, or leaves without a save."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hpc_trainer.runs.files import write_json
from hpc_trainer.runs.layout import RunPaths
from hpc_trainer.runs.reading import Faults, list_folder, read_json, tell
from hpc_trainer.runs.record_values import as_count, as_text, as_time, typed

MAX_KEPT = 256
"""Spans, and collectives, of a file: 40 kB."""
_MAX_TEXT, _MAX_STACK, _MAX_RANKS = 2_000, 30, 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightSpan:
    """The rank was at `kind` (`runtime.spans.Kind`) from `begin` to `end`, s since the epoch; None: it still was."""

    kind: str
    begin: float
    end: float | None
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One that the rank has entered: the `seq`-th of its process group, counted from 1, as its ranks count alike.

    `is_open`: the rank was in it. `during`: what it was at when it entered, as `FlightSpan.kind`. A message from one
    rank to another (`is_p2p`) has no place in that count. `step`: of the run, in which it was entered.
    """

    group: str
    seq: int
    name: str
    shape: str
    num_bytes: int
    begin: float
    is_open: bool
    is_p2p: bool = False
    step: int | None = None
    during: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """What one rank told. Lists have the oldest first. `stack`: of the main thread, the innermost line last.

    `frame`: the innermost line of the person's own code in it. `error`: the class of the exception that ended the rank.
    """

    rank: int
    node: str
    attempt: int
    world_size: int
    time: float
    why: str
    step: int | None = None
    error: str | None = None
    frame: str | None = None
    stack: tuple[str, ...] = ()
    spans: tuple[FlightSpan, ...] = ()
    collectives: tuple[Collective, ...] = ()


def write_flight(paths: RunPaths, flight: Flight) -> None:
    """Whole or not at all: who reads it sees no half file. Raises OSError."""
    record = asdict(flight)
    record["spans"], record["collectives"] = record["spans"][-MAX_KEPT:], record["collectives"][-MAX_KEPT:]
    record["stack"] = [line[:_MAX_TEXT] for line in flight.stack[-_MAX_STACK:]]
    record["why"] = flight.why[:_MAX_TEXT]
    write_json(paths.flight(flight.attempt, flight.rank), record, sync=False)


def read_flights(paths: RunPaths, attempt: int, faults: Faults | None = None) -> dict[int, Flight]:
    """What the ranks of an attempt told, by rank; a file that cannot be read is a fault, and left out."""
    told = Faults() if faults is None else faults
    name = re.compile(rf"attempt-{attempt:03d}\.rank-(\d{{1,6}})\.flight\.json")
    ranks = sorted(int(match[1]) for each in list_folder(paths.logs, told) or () if (match := name.fullmatch(each)))
    found = {rank: _read(paths, attempt, rank, told) for rank in ranks}
    return {rank: flight for rank, flight in found.items() if flight is not None}


def _read(paths: RunPaths, attempt: int, rank: int, faults: Faults) -> Flight | None:
    path = paths.flight(attempt, rank)
    record = read_json(path, faults)
    if record is None:
        return None
    try:
        found = typed(
            record,
            {"rank": as_count, "node": _as_text, "attempt": as_count, "world_size": _as_size, "time": as_time,
             "why": _as_text},
            {"step": as_count, "error": _as_text, "frame": _as_text},
        )  # fmt: skip
        if (found["rank"], found["attempt"]) != (rank, attempt):
            raise ValueError("it is of another rank or attempt")
        return Flight(
            **found,
            stack=tuple(map(_as_text, _items(record, "stack"))),
            spans=tuple(FlightSpan(**typed(each, *_SPAN)) for each in map(_as_record, _items(record, "spans"))),
            collectives=tuple(
                Collective(**typed(each, *_COLLECTIVE)) for each in map(_as_record, _items(record, "collectives"))
            ),
        )
    except KeyError as error:
        tell(faults, path, f"it has no {error}")
    except ValueError as error:
        tell(faults, path, error)
    return None


def _as_text(value: object) -> str:
    return as_text(value)[:_MAX_TEXT]


def _as_size(value: object) -> int:
    if (size := as_count(value)) > _MAX_RANKS:
        raise ValueError("no run has so many ranks")
    return size


def _as_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError("one of its values is neither true nor false")


def _as_record(value: object) -> Mapping[str, Any]:
    if isinstance(value, dict):
        return value
    raise ValueError("one of its entries is no JSON object")


def _items(record: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = record.get(key, [])
    if not isinstance(value, list):
        raise ValueError(f"{key} is no list")
    return value[-MAX_KEPT:]


def _or_none(value: object) -> float | None:
    return None if value is None else as_time(value)


_SPAN = ({"kind": _as_text, "begin": as_time, "end": _or_none}, {"step": as_count})
_COLLECTIVE = (
    {"group": _as_text, "seq": as_count, "name": _as_text, "shape": _as_text, "num_bytes": as_count, "begin": as_time,
     "is_open": _as_bool, "is_p2p": _as_bool},
    {"step": as_count, "during": _as_text},
)  # fmt: skip
