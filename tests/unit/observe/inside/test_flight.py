"""Flight records on the disk: whole or not there, bounded, and damage is told."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.observe.flight import MAX_KEPT, FlightSpan, read_flights, write_flight
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.reading import Faults
from tests.unit.observe.inside.flights import END, entered, flight


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    found = RunPaths(tmp_path / "run")
    found.logs.mkdir(parents=True)
    return found


def test_what_is_written_is_read(paths: RunPaths) -> None:
    first = flight(0, 812, is_open=True, stack=('  File "a.py", line 3, in f',), frame="a.py:3 in f")
    second = flight(11, 811, error="ValueError", step=None)
    write_flight(paths, first)
    write_flight(paths, second)
    write_flight(paths, dataclasses.replace(second, attempt=1))
    faults = Faults()
    assert read_flights(paths, 0, faults) == {0: first, 11: second}
    assert [*read_flights(paths, 1, faults)] == [11]
    assert read_flights(paths, 2, faults) == {}
    assert faults == []
    assert not [each.name for each in paths.logs.iterdir() if each.name.startswith(".")]


def test_a_record_is_bounded(paths: RunPaths) -> None:
    long = flight(0, 1)
    spans = tuple(FlightSpan(kind="step", begin=END, end=END, step=step) for step in range(9000))
    collectives = tuple(entered(seq, name="x" * 50) for seq in range(9000))
    stack = tuple("y" * 5000 for _ in range(500))
    write_flight(paths, dataclasses.replace(long, spans=spans, collectives=collectives, stack=stack, why="z" * 9000))
    assert paths.flight(0, 0).stat().st_size < 200_000
    found = read_flights(paths, 0)[0]
    assert (len(found.spans), len(found.collectives), len(found.why)) == (MAX_KEPT, MAX_KEPT, 2000)
    assert (found.spans[-1].step, found.collectives[-1].seq) == (8999, 8999)


DAMAGE: list[Any] = [
    {"rank": 1}, {"attempt": 3}, {"time": "now"}, {"node": None}, {"spans": 3}, {"spans": [3]}, {"spans": [{}]},
    {"collectives": [{"group": "g"}]}, {"stack": [None]}, {"why": 3}, {"step": -1}, {"world_size": 2**62},
    {"collectives": [{"group": "g", "seq": 1, "name": "n", "shape": "", "num_bytes": 1, "begin": 1.0, "is_open": 1,
                      "is_p2p": False}]},
]  # fmt: skip


@pytest.mark.parametrize("changes", DAMAGE, ids=lambda each: json.dumps(each)[:40])
def test_damage_is_told_and_costs_one_rank(paths: RunPaths, changes: dict[str, Any]) -> None:
    write_flight(paths, flight(0, 5))
    write_flight(paths, flight(2, 5))
    record = json.loads(paths.flight(0, 0).read_text())
    paths.flight(0, 0).write_text(json.dumps({**record, **changes}))
    faults = Faults()
    assert [*read_flights(paths, 0, faults)] == [2]
    (fault,) = faults
    assert fault.startswith("attempt-000.rank-0.flight.json cannot be read: ")


def test_limits_of_a_record_themselves_are_read(paths: RunPaths) -> None:
    most = dataclasses.replace(flight(0, 5), world_size=2**20, stack=("x" * 2000,) * 30, why="y" * 2000)
    write_flight(paths, most)
    assert read_flights(paths, 0) == {0: most}
    write_flight(paths, dataclasses.replace(most, world_size=2**20 + 1))
    assert read_flights(paths, 0) == {}
    longer = dataclasses.replace(most, stack=(*"ab", *("x" * 2001,) * 30), why="y" * 2001)
    write_flight(paths, longer)
    assert read_flights(paths, 0) == {0: most}, "the innermost frames"


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"rank": 0}', "\x00"])
def test_a_torn_file_is_told(paths: RunPaths, text: str) -> None:
    write_flight(paths, flight(0, 5))
    paths.flight(0, 0).write_text(text)
    faults = Faults()
    assert read_flights(paths, 0, faults) == {}
    assert len(faults) == 1


def test_what_is_no_record_is_left_alone(paths: RunPaths) -> None:
    for name in ("attempt-000.rank-0.log", ".attempt-000.rank-0.flight.json.12.tmp", "attempt-000.rank-x.flight.json"):
        (paths.logs / name).write_text("{")
    faults = Faults()
    assert read_flights(paths, 0, faults) == {}
    assert faults == []
