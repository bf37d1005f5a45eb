"""ledger.jsonl: lines of attempts; a killed attempt's heartbeat is kept; damage costs a line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_trainer.record.files import write_json
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.ledger import Kind, Spent, append_spent, keep_spent, read_spent, spent_so_far
from hpc_trainer.record.reading import Faults

TOLD = spent_so_far([(Kind.start_up, 2.0), (Kind.step, 10.00049), (Kind.hang, 0.0004)], steps_done=5)
SECONDS = {"start_up": 2.0, "step": 10.0}


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    tmp_path.chmod(0o700)
    return RunPaths(tmp_path)


def beat(paths: RunPaths, attempt: int, step: int, time: float = 1000.0) -> None:
    write_json(paths.heartbeat, {"attempt": attempt, "step": step, "time": time, "spent": TOLD})


def test_no_file_is_an_empty_ledger(paths: RunPaths) -> None:
    assert read_spent(paths) == {}


def test_a_line_of_an_attempt(paths: RunPaths) -> None:
    append_spent(paths, 0, 7, TOLD)
    (spent,) = read_spent(paths).values()
    assert (spent.attempt, spent.step, spent.steps_done, spent.is_last, spent.seconds) == (0, 7, 5, True, SECONDS)
    assert spent.begin_time == pytest.approx(spent.time - 12.0)


def test_the_heartbeat_has_what_no_line_has_yet(paths: RunPaths) -> None:
    beat(paths, 0, 7)
    found = read_spent(paths)
    assert found == {0: Spent(attempt=0, time=1000.0, step=7, steps_done=5, seconds=SECONDS)}
    append_spent(paths, 0, 9, TOLD)
    beat(paths, 0, 8, time=2e9)
    assert read_spent(paths)[0].step == 9, "the last line stays the last word"


def test_a_killed_attempt_is_kept_when_the_next_begins(paths: RunPaths) -> None:
    beat(paths, 0, 7)
    keep_spent(paths, 1)
    keep_spent(paths, 1)
    assert len(paths.ledger.read_text().splitlines()) == 1
    beat(paths, 1, 3)
    found = read_spent(paths)
    assert [(each.attempt, each.step, each.is_last) for each in found.values()] == [(0, 7, False), (1, 3, False)]


def test_an_attempt_that_told_its_end_is_not_kept_once_more(paths: RunPaths) -> None:
    append_spent(paths, 0, 9, TOLD)
    beat(paths, 0, 7)
    keep_spent(paths, 1)
    assert [json.loads(line)["step"] for line in paths.ledger.read_text().splitlines()] == [9]


@pytest.mark.parametrize(
    "line",
    [
        "not JSON", "[1]", '{"event": "spent"}', '{"event": "later"}',
        '{"event": "spent", "attempt": 0, "time": 1, "step": 1, "steps_done": 1, "seconds": {"step": -1}}',
        '{"event": "spent", "attempt": 0, "time": 1, "step": 1, "steps_done": 1, "seconds": {"step": "many"}}',
        '{"event": "spent", "attempt": 0, "time": 1, "step": 1, "steps_done": 1, "seconds": 3}',
        '{"event": "spent", "attempt": 0, "time": 1, "step": 1, "steps_done": 1, "seconds": {"step": 1.7e308}}',
        '{"event": "spent", "attempt": -1, "time": 1, "step": 1, "steps_done": 1, "seconds": {}}',
    ],
)  # fmt: skip
def test_a_damaged_line_costs_itself_only(paths: RunPaths, line: str) -> None:
    append_spent(paths, 0, 7, TOLD)
    with paths.ledger.open("a") as file:
        file.write(line + "\n")
    append_spent(paths, 1, 9, TOLD)
    faults = Faults()
    assert sorted(read_spent(paths, faults)) == [0, 1]
    assert len(faults) == 1
    assert "ledger.jsonl line 2" in faults[0]


def test_a_line_that_was_changed_is_not_believed(paths: RunPaths) -> None:
    append_spent(paths, 0, 7, TOLD)
    paths.ledger.write_text(paths.ledger.read_text().replace("10.0", "99.0"))
    faults = Faults()
    assert read_spent(paths, faults) == {}
    assert "checksum" in faults[0]


def test_a_line_that_a_kill_cut_costs_nothing_else(paths: RunPaths) -> None:
    append_spent(paths, 0, 7, TOLD)
    with paths.ledger.open("ab") as file:
        file.write(b'{"event": "spent", "att')
    append_spent(paths, 1, 9, TOLD)
    faults = Faults()
    assert sorted(read_spent(paths, faults)) == [0, 1]
    assert faults == []


def test_a_heartbeat_without_it_or_with_another_thing_is_passed_over(paths: RunPaths) -> None:
    faults = Faults()
    for more in ({}, {"spent": {}}, {"spent": None}):
        write_json(paths.heartbeat, {"attempt": 0, "step": 7, "time": 1000.0, **more})
        assert read_spent(paths, faults) == {}
    assert faults == []
    write_json(paths.heartbeat, {"attempt": 0, "step": 7, "time": 1000.0, "spent": {"seconds": {"step": None}}})
    assert read_spent(paths, faults) == {}
    assert "heartbeat.json" in faults[0]


def test_a_place_that_takes_no_line_matters_to_nobody(paths: RunPaths) -> None:
    paths.ledger.mkdir()
    append_spent(paths, 0, 7, TOLD)
    keep_spent(paths, 1)
    assert read_spent(paths) == {}


def test_another_s_file_gets_no_line(paths: RunPaths) -> None:
    paths.ledger.write_text("")
    paths.ledger.chmod(0o666)
    append_spent(paths, 0, 7, TOLD)
    assert paths.ledger.read_text() == ""
