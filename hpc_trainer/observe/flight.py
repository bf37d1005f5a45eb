"""logs/attempt-NNN.rank-N.flight.json: a rank's last operations, written if it fails, hangs or exits without a save."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from hpc_trainer.record.files import write_json
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.reading import (
    Faults,
    as_bool,
    as_count,
    as_table,
    as_text,
    as_time,
    list_folder,
    parsed_file,
    tuple_of,
    typed,
)

T = TypeVar("T")

MAX_KEPT = 256
"""Largest number of spans, and of collectives, in a file: 40 kB."""
_MAX_TEXT, _MAX_STACK, _MAX_RANKS = 2_000, 30, 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightSpan:
    """Time that the rank spent in `kind` (`record.ledger.Kind`), in seconds since the epoch; `end` None: not over."""

    kind: str
    begin: float
    end: float | None
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A collective that the rank has entered: number `seq` of its process group, from 1, equal on all ranks.

    `is_open`: True if the rank was still in it. `during`: the kind of span in which it was entered (`FlightSpan.kind`).
    `step`: the run's step at that time. A message from one rank to another (`is_p2p`) is not counted by `seq`.
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
    """Flight record of one rank. Lists begin with the oldest item; `stack`, the main thread's, ends with the innermost.

    `frame`: the innermost line of the user's own code in it. `error`: class of the exception that ended the rank.
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
    """Write a flight record atomically, so that no reader sees half of it; raise OSError if the file system refused."""
    record = asdict(flight)
    record["spans"], record["collectives"] = record["spans"][-MAX_KEPT:], record["collectives"][-MAX_KEPT:]
    record["stack"] = [line[:_MAX_TEXT] for line in flight.stack[-_MAX_STACK:]]
    record["why"] = flight.why[:_MAX_TEXT]
    write_json(paths.flight(flight.attempt, flight.rank), record, sync=False)


def read_flights(paths: RunPaths, attempt: int, faults: Faults | None = None) -> dict[int, Flight]:
    """Return the flight records of an attempt by rank; an unreadable file is a fault, and left out."""
    reported = Faults() if faults is None else faults
    name = re.compile(rf"attempt-{attempt:03d}\.rank-(\d{{1,6}})\.flight\.json")
    ranks = sorted(int(match[1]) for file in list_folder(paths.logs, reported) or () if (match := name.fullmatch(file)))
    flights = {rank: _read(paths, attempt, rank, reported) for rank in ranks}
    return {rank: flight for rank, flight in flights.items() if flight is not None}


def _read(paths: RunPaths, attempt: int, rank: int, faults: Faults) -> Flight | None:
    def parse(record: Mapping[str, Any]) -> Flight:
        flight = Flight(**typed(record, *_FLIGHT))
        if (flight.rank, flight.attempt) != (rank, attempt):
            raise ValueError("it is of another rank or attempt")
        return flight

    return parsed_file(paths.flight(attempt, rank), parse, faults)


def _as_text(value: object) -> str:
    return as_text(value)[:_MAX_TEXT]


def _as_size(value: object) -> int:
    if (size := as_count(value)) > _MAX_RANKS:
        raise ValueError("no run has that many ranks")
    return size


def _newest_of(convert: Callable[[Any], T]) -> Callable[[object], tuple[T, ...]]:
    as_tuple = tuple_of(convert)
    return lambda value: as_tuple(value[-MAX_KEPT:] if isinstance(value, list) else value)


def _or_none(value: object) -> float | None:
    return None if value is None else as_time(value)


_SPAN = ({"kind": _as_text, "begin": as_time, "end": _or_none}, {"step": as_count})
_COLLECTIVE = (
    {"group": _as_text, "seq": as_count, "name": _as_text, "shape": _as_text, "num_bytes": as_count, "begin": as_time,
     "is_open": as_bool, "is_p2p": as_bool},
    {"step": as_count, "during": _as_text},
)  # fmt: skip
_FLIGHT = (
    {"rank": as_count, "node": _as_text, "attempt": as_count, "world_size": _as_size, "time": as_time, "why": _as_text},
    {
        "step": as_count, "error": _as_text, "frame": _as_text, "stack": _newest_of(_as_text),
        "spans": _newest_of(lambda record: FlightSpan(**typed(as_table(record), *_SPAN))),
        "collectives": _newest_of(lambda record: Collective(**typed(as_table(record), *_COLLECTIVE))),
    },
)  # fmt: skip
