"""attempts.jsonl: the story of a run; the number of an attempt; restarts that led nowhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.runs.journal import Attempt, Journal, restarts_without_progress
from hpc_trainer.runs.layout import RunPaths
from hpc_trainer.runs.states import RunState


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(RunPaths(tmp_path))


def _start(journal: Journal, attempt: int, job_id: str = "7_0", restart_count: int = 0) -> None:
    journal.start(
        attempt, job_id=job_id, restart_count=restart_count, node="n1", pid=42, executor="slurm", world_size=4
    )


def test_the_story_of_a_run(journal: Journal) -> None:
    assert journal.read() == []
    _start(journal, 0)
    (attempt,) = journal.read()
    assert (attempt.job_id, attempt.node, attempt.pid, attempt.executor) == ("7_0", "n1", 42, "slurm")
    assert (attempt.has_ended, attempt.state, attempt.resumed_step) == (False, None, None)
    journal.resume(0, 0)
    journal.end(0, state=RunState.REQUEUED, cause="timeout", step=30, saved_step=30, action="requeue", signal="SIGUSR2")
    _start(journal, 1, restart_count=1)
    journal.resume(1, 30)
    journal.end(1, state=RunState.FAILED, cause="exception", error={"type": "ValueError", "message": "x"})
    first, second = journal.read()
    assert (first.state, first.cause, first.saved_step, first.action, first.signal) == (
        RunState.REQUEUED, "timeout", 30, "requeue", "SIGUSR2",
    )  # fmt: skip
    assert first.has_ended
    assert first.end_time is not None
    assert first.end_time >= first.start_time
    assert (second.attempt, second.restart_count, second.resumed_step) == (1, 1, 30)
    assert second.error == {"type": "ValueError", "message": "x"}


def test_the_number_is_the_same_before_and_after_rank_0_wrote(journal: Journal) -> None:
    assert journal.attempt_number("7_0", 0) == 0
    _start(journal, 0)
    assert journal.attempt_number("7_0", 0) == 0, "a rank that comes late"
    assert journal.attempt_number("7_0", 1) == 1, "after a requeue"
    _start(journal, 1, restart_count=1)
    journal.end(1, state=RunState.FAILED, cause="exception")
    assert journal.attempt_number("7_0", 1) == 1
    assert journal.attempt_number("9_3", 0) == 2, "submitted again"


def test_a_torn_line_hides_itself_only(tmp_path: Path, journal: Journal) -> None:
    _start(journal, 0)
    with RunPaths(tmp_path).attempts.open("a") as file:
        file.write('{"event": "end", "attempt": 0, "ti')
    assert not journal.read()[0].has_ended
    journal.resume(0, 5)
    assert journal.read()[0].resumed_step == 5


def test_a_start_that_stands_there_twice_takes_no_end_back(tmp_path: Path, journal: Journal) -> None:
    _start(journal, 0)
    journal.end(0, state=RunState.FAILED, cause="exception")
    path = RunPaths(tmp_path).attempts
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, lines[0]]))
    (attempt,) = journal.read()
    assert attempt.state is RunState.FAILED


def test_an_end_without_a_start_is_passed_over(journal: Journal) -> None:
    journal.end(3, state=RunState.FAILED, cause="x")
    journal.resume(3, 1)
    assert journal.read() == []


def _attempts(*rows: tuple[str, int | None]) -> list[Attempt]:
    common: dict[str, Any] = {"restart_count": 0, "node": "", "pid": 0, "start_time": 0.0}
    return [
        Attempt(attempt=number, job_id=job_id, resumed_step=step, **common)
        for number, (job_id, step) in enumerate(rows)
    ]


@pytest.mark.parametrize(
    ("rows", "count"),
    [
        ([], 0),
        ([("1", 0)], 0),
        ([("1", None)], 0),
        ([("1", 0), ("1", 0)], 1),
        ([("1", 0), ("1", 0), ("1", 0)], 2),
        ([("1", 0), ("1", 10)], 0),
        ([("1", 0), ("1", 10), ("1", 10)], 1),
        ([("1", 10), ("1", None), ("1", 10)], 2),
        ([("1", 0), ("1", 10), ("1", None), ("1", 10)], 2),
        ([("1", 10), ("1", 10), ("2", 10)], 0),
        ([("1", 10), ("2", 10), ("2", 10)], 1),
        ([("1", 10), ("1", 10), ("1", None)], 0),
    ],
)
def test_restarts_without_progress(rows: list[tuple[str, int | None]], count: int) -> None:
    assert restarts_without_progress(_attempts(*rows)) == count
