"""What a run printed, in order of its attempts and ranks; the tail; lines as they come."""

from __future__ import annotations

import os
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_trainer.operate.logs import follow_logs, log_files, read_logs
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import SweepStatus, read_status
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm


@pytest.fixture
def sweep(tmp_path: Path, fake_slurm: FakeSlurm) -> SweepOnDisk:
    fake_slurm.answer("squeue", "500_0|RUNNING|n1|None|x\n")
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(1, "cluster=slurm"))
    sweep.submit()
    return sweep


def _log(sweep: SweepOnDisk, attempt: int, rank: int, text: str) -> None:
    sweep.run().log(attempt, rank).write_text(text)


def _status(sweep: SweepOnDisk) -> SweepStatus:
    return read_status(sweep.paths)


def test_attempts_then_ranks_and_the_batch_shell_first(sweep: SweepOnDisk) -> None:
    for attempt, rank in ((10, 0), (2, 10), (2, 0), (2, 2), (1000, 0)):
        _log(sweep, attempt, rank, "x\n")
    (sweep.run().logs / "attempt-002.failure.json").write_text("{}")
    (sweep.run().logs / "notes.txt").write_text("x")
    sweep.paths.scripts.mkdir()
    (sweep.paths.scripts / "500_0.out").write_text("batch\n")
    status = _status(sweep)
    names = [path.name for path in log_files(status, status.runs[0], None)]
    assert names == [
        "500_0.out", "attempt-002.rank-0.log", "attempt-002.rank-2.log", "attempt-002.rank-10.log",
        "attempt-010.rank-0.log", "attempt-1000.rank-0.log",
    ]  # fmt: skip
    assert [path.name for path in log_files(status, status.runs[0], 2)] == ["500_0.out", "attempt-002.rank-2.log"]


def test_nothing_printed_yet(sweep: SweepOnDisk) -> None:
    status = _status(sweep)
    assert log_files(status, status.runs[0]) == []


def test_all_lines_or_the_last_of_each_file(sweep: SweepOnDisk) -> None:
    _log(sweep, 0, 0, "a\nb\nc\n")
    _log(sweep, 1, 0, "d\n")
    status = _status(sweep)
    files = log_files(status, status.runs[0])
    assert list(read_logs(files)) == [f"==> {files[0]} <==", "a", "b", "c", f"==> {files[1]} <==", "d"]
    assert list(read_logs(files, tail=2)) == [f"==> {files[0]} <==", "b", "c", f"==> {files[1]} <==", "d"]
    assert list(read_logs(files, tail=0)) == [f"==> {files[0]} <==", f"==> {files[1]} <=="]


def test_bytes_that_are_no_text_are_shown(sweep: SweepOnDisk) -> None:
    sweep.run().log(0, 0).write_bytes(b"ok \xff\n")
    status = _status(sweep)
    assert list(read_logs(log_files(status, status.runs[0])))[1] == "ok \ufffd"


def test_the_last_line_without_an_end_is_told_when_the_run_has_ended(
    sweep: SweepOnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep.start(resumed=0)
    _log(sweep, 0, 0, "one\nSegmentation fa")
    status = _status(sweep)
    sweep.end(state=RunState.FAILED, cause="x")
    clock = SimpleNamespace(sleep=lambda _: None, monotonic=time.monotonic)
    monkeypatch.setattr("hpc_trainer.operate.logs.time", clock)
    monkeypatch.setattr("hpc_trainer.operate.logs._ASK_EVERY_S", 0.0)
    sweep.done()
    log = sweep.run().log(0, 0)
    assert list(follow_logs(status, status.runs[0], 0)) == [f"==> {log} <==", "one", "Segmentation fa"]


def test_a_log_of_any_size_is_read_piece_by_piece(sweep: SweepOnDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    _log(sweep, 0, 0, "x\n" * 200_000)
    monkeypatch.setattr(Path, "read_text", None)  # it would hold all of a file, and more than once
    tracemalloc.start()
    try:
        lines = read_logs([sweep.run().log(0, 0)], tail=2)
        assert list(lines)[1:] == ["x", "x"]
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


def test_a_pipe_among_the_logs_keeps_nobody_waiting(sweep: SweepOnDisk) -> None:
    (sweep.run().logs / "attempt-000.rank-0.log").unlink(missing_ok=True)
    sweep.run().logs.mkdir(parents=True, exist_ok=True)
    os.mkfifo(sweep.run().log(0, 0))
    assert "it is a pipe" in list(read_logs([sweep.run().log(0, 0)]))[1]


def test_lines_as_they_come_across_attempts_to_the_end(sweep: SweepOnDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep.start(resumed=0)
    _log(sweep, 0, 0, "")
    first, second = sweep.run().log(0, 0), sweep.run().log(1, 0)

    def write(path: Path, text: str) -> None:
        with path.open("a") as file:
            file.write(text)

    story = iter(
        [
            lambda: None,
            lambda: write(first, "one\nhal"),
            lambda: write(first, "f\n"),
            lambda: (write(second, "two\n"), sweep.start(attempt=1)),
            lambda: (write(second, "last\n"), sweep.end(attempt=1, state=RunState.FAILED, cause="x"), sweep.done()),
        ]
    )
    # Each look at the run comes after the next part of the story; nobody waits. A clock of its own: subprocess sleeps
    # too where a command has closed its output and not ended yet.
    clock = SimpleNamespace(sleep=lambda _: next(story)(), monotonic=time.monotonic)
    monkeypatch.setattr("hpc_trainer.operate.logs.time", clock)
    monkeypatch.setattr("hpc_trainer.operate.logs._ASK_EVERY_S", 0.0)
    status = _status(sweep)
    lines = list(follow_logs(status, status.runs[0], 0))
    assert lines == [f"==> {first} <==", "one", "half", f"==> {second} <==", "two", "last"]
    assert next(story, None) is None
