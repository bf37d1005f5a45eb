"""The journals of attempts; the number of an attempt; restarts that led nowhere."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.record import journal as journal_module
from hpc_trainer.record.files import write_json
from hpc_trainer.record.journal import (
    OVERHEATED,
    Attempt,
    FirstWeights,
    Journal,
    Move,
    failures_of_storage,
    failures_untold,
    read_first_weights,
    read_heartbeat,
    read_move,
    read_result,
    restarts_without_progress,
    successor_jobs,
    write_first_weights,
    write_move,
    write_result,
)
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.reading import Faults, read_lines
from hpc_trainer.record.states import RunState
from hpc_trainer.record.submissions import SUCCESSOR, write_confirmation, write_dropped, write_intent


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
    with RunPaths(tmp_path).journal(0).open("a") as file:
        file.write('{"event": "end", "attempt": 0, "ti')
    assert not journal.read()[0].has_ended
    journal.resume(0, 5)
    assert journal.read()[0].resumed_step == 5


def test_a_start_that_stands_there_twice_takes_no_end_back(tmp_path: Path, journal: Journal) -> None:
    _start(journal, 0)
    journal.end(0, state=RunState.FAILED, cause="exception")
    path = RunPaths(tmp_path).journal(0)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, lines[0]]))
    (attempt,) = journal.read()
    assert attempt.state is RunState.FAILED


def test_what_an_earlier_attempt_still_writes_is_in_no_way_of_the_newer_one(tmp_path: Path, journal: Journal) -> None:
    """A node that Slurm has given up may live on: its file is another one, whatever it does to it."""
    _start(journal, 0)
    _start(journal, 1, restart_count=1)
    journal.resume(1, 30)
    newer = RunPaths(tmp_path).journal(1).read_bytes()
    journal.end(0, state=RunState.FAILED, cause="exception")
    RunPaths(tmp_path).journal(0).write_bytes(b"\0" * 4096 + b"\n")
    faults = Faults()
    story = journal.read_story(faults)
    assert [(each.attempt, each.resumed_step) for each in story.attempts] == [(1, 30)]
    assert story.is_whole
    assert str(faults[0]).startswith("attempt-000.jsonl line 1 cannot be read")
    assert RunPaths(tmp_path).journal(1).read_bytes() == newer


@pytest.mark.parametrize("is_listable", [True, False])
def test_the_journal_of_an_earlier_release_is_read_and_goes_on(
    is_listable: bool, tmp_path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier versions wrote one file, attempts.jsonl. A run that one of them began is retried by this one."""
    _start(journal, 0)
    journal.end(0, state=RunState.REQUEUED, cause="preempted", action="requeue")
    _start(journal, 1, restart_count=1)
    journal.end(1, state=RunState.FAILED, cause="exception")
    parts = [RunPaths(tmp_path).journal(number) for number in (0, 1)]
    (tmp_path / "attempts.jsonl").write_bytes(b"".join(path.read_bytes() for path in parts))
    for path in parts:
        path.unlink()
    assert journal.attempt_number("7_0", 1) == 1
    assert journal.attempt_number("9_0", 0) == 2
    _start(journal, 2, "9_0")
    if not is_listable:  # a folder of mode 0300; root may list it all the same
        monkeypatch.setattr(journal_module, "list_folder", lambda path, faults: None)
    states = [(each.attempt, each.job_id, each.state) for each in journal.read()]
    assert states == [(0, "7_0", RunState.REQUEUED), (1, "7_0", RunState.FAILED), (2, "9_0", None)]


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
        ([("1", None), ("1", None)], 0),
    ],
)
def test_restarts_without_progress(rows: list[tuple[str, int | None]], count: int) -> None:
    assert restarts_without_progress(_attempts(*rows), ()) == count


# --- the budgets of a run whose jobs succeed each other ---


def _succeed(paths: RunPaths, job_id: str) -> None:
    """An attempt asks for another job to go on with the run, and sbatch accepts it as `job_id`."""
    intent = write_intent(paths, executor="slurm", hardware="cpu_x1", run_ids=[paths.run_id], kind=SUCCESSOR)
    write_confirmation(paths, intent, job_id)


def _fail(journal: Journal, paths: RunPaths, attempt: int, job_id: str, exit_code: int = 74) -> None:
    """An attempt that resumes at step 30 and fails."""
    _start(journal, attempt, job_id)
    journal.resume(attempt, 30)
    write_json(paths.failure(attempt), {"exit_code": exit_code})
    journal.end(attempt, state=RunState.REQUEUED, cause="storage", action="requeue")


def _counts(journal: Journal, paths: RunPaths) -> tuple[int, int]:
    return failures_of_storage(paths), restarts_without_progress(journal.read(), successor_jobs(paths))


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path)
    paths.logs.mkdir(mode=0o700)
    return paths


def test_the_budgets_go_on_in_a_successor_job_and_begin_anew_when_a_person_submits(
    journal: Journal, paths: RunPaths
) -> None:
    assert _counts(journal, paths) == (0, 0)
    _fail(journal, paths, 0, "7_0")
    assert _counts(journal, paths) == (1, 0)
    _fail(journal, paths, 1, "7_0")
    assert _counts(journal, paths) == (2, 1)
    _succeed(paths, "8")
    _fail(journal, paths, 2, "8")
    assert _counts(journal, paths) == (3, 2)
    _succeed(paths, "9")
    _fail(journal, paths, 3, "9")
    assert _counts(journal, paths) == (4, 3)
    _fail(journal, paths, 4, "20_3")  # `retry`: an array of the sweep
    assert _counts(journal, paths) == (1, 0)
    _succeed(paths, "21")
    _fail(journal, paths, 5, "21")
    assert _counts(journal, paths) == (2, 1)


def test_the_journals_own_word_is_enough(journal: Journal, paths: RunPaths) -> None:
    """The confirmation of the successor may be missing: its writer was killed."""
    _fail(journal, paths, 0, "7_0")
    journal.end(0, state=RunState.REQUEUED, cause="timeout", action="successor")
    _fail(journal, paths, 1, "8")
    assert _counts(journal, paths) == (2, 1)


def test_a_successor_that_never_was_is_no_link(journal: Journal, paths: RunPaths) -> None:
    _fail(journal, paths, 0, "7_0")
    intent = write_intent(paths, executor="slurm", hardware="cpu_x1", run_ids=[paths.run_id], kind=SUCCESSOR)
    write_dropped(paths, intent, "refused")
    _fail(journal, paths, 1, "8_0")
    assert _counts(journal, paths) == (1, 0)


@pytest.mark.parametrize("exit_code", [1, 75, 76, 78])
def test_only_failures_of_storage_count_against_their_budget(journal: Journal, paths: RunPaths, exit_code: int) -> None:
    _fail(journal, paths, 0, "7_0")
    _fail(journal, paths, 1, "7_0", exit_code)
    _start(journal, 2, "7_0")  # it has not failed
    _fail(journal, paths, 3, "7_0")
    assert failures_of_storage(paths) == 2


# --- what is read back ---


def test_only_starts_of_the_job_itself_end_a_row_of_failures_that_nobody_told(journal: Journal) -> None:
    for number, job_id in enumerate(("6_0", "8_0")):
        _start(journal, number, job_id, restart_count=1)
        journal.end(number, state=RunState.REQUEUED, cause="preempted")
    assert failures_untold(journal.read(), "7_0", 2) == 3
    _start(journal, 2, restart_count=1)
    journal.end(2, state=RunState.REQUEUED, cause="preempted")
    assert failures_untold(journal.read(), "7_0", 2) == 1


def test_the_end_tells_what_is_saved_and_when_it_was(tmp_path: Path, journal: Journal) -> None:
    """By the clock of whoever wrote it, not of whoever reads."""
    before = time.time()
    _start(journal, 0)
    journal.end(0, state=RunState.PREEMPTED, cause="preempted", step=37, saved_step=30)
    path = RunPaths(tmp_path).journal(0)
    lines = list(read_lines(path))
    for line in lines:
        line["time"] -= 5000.0
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (attempt,) = journal.read()
    assert (attempt.step, attempt.saved_step) == (37, 30)
    assert attempt.end_time is not None
    assert before - 5001 <= attempt.start_time <= attempt.end_time <= time.time() - 4999


def test_the_last_word_on_an_end_counts(journal: Journal) -> None:
    """A successor that was promised and refused, a requeue that came true another way."""
    _start(journal, 0)
    journal.end(0, state=RunState.REQUEUED, cause="timeout", action="successor", saved_step=5)
    journal.end(0, state=RunState.TIMEOUT, cause="timeout", action="none", saved_step=5)
    (attempt,) = journal.read()
    assert (attempt.state, attempt.action) == (RunState.TIMEOUT, "none")


def test_attempts_are_in_order_whatever_the_order_of_their_lines(journal: Journal) -> None:
    """Two ranks 0 of one run may be alive for a moment: a node that was given up, and the next one."""
    _start(journal, 1, restart_count=1)
    _start(journal, 0)
    journal.resume(1, 30)
    journal.resume(0, 10)
    assert [(each.attempt, each.resumed_step) for each in journal.read()] == [(0, 10), (1, 30)]


def test_what_a_search_for_a_batch_found_is_told_and_nothing_else(journal: Journal) -> None:
    _start(journal, 0)
    journal.guard(0, action="skip", step=3, count=1, found={"not": "this"})
    journal.fit(0, {"micro_batch_size": 8})
    assert journal.fits() == [(0, {"micro_batch_size": 8})]
    (attempt,) = journal.read()
    assert [(each["action"], each["step"]) for each in attempt.guarded] == [("skip", 3)]


def test_a_result_is_written_before_the_mark_that_a_reader_relies_on(paths: RunPaths) -> None:
    write_result(
        paths,
        step=9,
        num_steps=10,
        attempt=2,
        world_size=4,
        cause="early_stop",
        reason="no gain",
        metrics={"loss": 0.5},
    )
    assert json.loads(paths.result.read_text()) == {
        "run_id": paths.run_id, "step": 9, "num_steps": 10, "attempts": 3, "world_size": 4, "cause": "early_stop",
        "reason": "no gain", "metrics": {"loss": 0.5},
    }  # fmt: skip
    assert read_result(paths.result) == {
        "step": 9,
        "cause": "early_stop",
        "reason": "no gain",
        "metrics": {"loss": 0.5},
    }
    assert json.loads(paths.marker("DONE").read_text())["time"] > 0
    assert paths.marker("DONE").stat().st_mtime_ns >= paths.result.stat().st_mtime_ns


def test_a_heartbeat_is_bounded(paths: RunPaths) -> None:
    remarks = {f"r{number}": "x" * 2_001 for number in range(9)}
    beat = {"step": 3, "num_steps": 10, "attempt": 1, "time": 1000.0, "steps_per_s": 2.5,
            "eta_s": float("inf"), "node": "n1", "metrics": {"loss": 0.5}}  # fmt: skip
    write_json(paths.heartbeat, {**beat, "remarks": {"number": 3, **remarks}})
    found = read_heartbeat(paths.heartbeat)
    assert found.pop("remarks") == {f"r{number}": "x" * 2_000 for number in range(8)}
    assert found == {key: beat[key] for key in ("step", "num_steps", "attempt", "time", "steps_per_s", "metrics")}
    write_json(paths.heartbeat, {**beat, "step": -1, "remarks": "none"})
    faults = Faults()
    assert "step" not in read_heartbeat(paths.heartbeat, faults)
    assert len(faults) == 1
    paths.heartbeat.unlink()
    assert read_heartbeat(paths.heartbeat) == read_result(paths.result) == {}


def test_a_move_is_read_as_it_was_written(paths: RunPaths) -> None:
    move = Move(node="n7", cause=OVERHEATED, why="the GPU of rank 3 is hot", time=1000.0)
    assert read_move(paths, 2) is None
    paths.telemetry.mkdir(parents=True)
    write_move(paths, 2, move)
    assert read_move(paths, 2) == move
    assert read_move(paths, 1) is None
    assert move.text == "overheated, it leaves n7: the GPU of rank 3 is hot"
    paths.move(2).write_text('{"node": "n7", "cause": "overheated", "why": "", "time": "now"}')
    faults = Faults()
    assert read_move(paths, 2, faults) is None
    assert len(faults) == 1


def test_what_a_run_began_with_is_said_in_one_line(paths: RunPaths) -> None:
    weights = FirstWeights(path="a.pt", digest="ab", loaded={"x": "y", "z": "z"})
    assert weights.line() == "init_from: 2 weights and buffers are from a.pt."
    write_first_weights(paths, weights)
    assert read_first_weights(paths) == weights
    weights = dataclasses.replace(weights, converted=("x",), begin_anew=("head",), unused=("old",))
    assert weights.line() == (
        "init_from: 2 weights and buffers are from a.pt; 1 of them in another number format; head began anew; "
        "not used: old."
    )
    write_first_weights(paths, weights)
    assert read_first_weights(paths) == weights
