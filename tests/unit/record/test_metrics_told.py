"""What programs tell: lines are written whole, and read with whatever is wrong set aside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hpc_trainer
from hpc_trainer.record.metrics import MAX_LINE_BYTES, VARIABLE, NewLines, Told, log_metrics


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "told.jsonl"))
    for name in ("RANK", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "told.jsonl"


class _Tensor:
    def item(self) -> float:
        return 0.25


def test_what_is_told_is_read_once(path: Path) -> None:
    lines = NewLines(path)
    assert list(lines.read()) == []
    assert hpc_trainer.log_metrics(3, loss=_Tensor(), num_steps=9)
    assert hpc_trainer.log_metrics(4, {"loss": 1, "nan": float("nan")})
    first, second = lines.read()
    assert first == Told(3, 9, {"loss": 0.25})
    assert (second.step, second.metrics["loss"]) == (4, 1.0)
    assert second.metrics["nan"] != second.metrics["nan"]
    assert list(lines.read()) == []
    assert lines.problems == []


def test_only_the_first_rank_tells_and_nobody_outside_of_a_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert not hpc_trainer.log_metrics(1, loss=1.0)
    monkeypatch.delenv("RANK")
    monkeypatch.setenv("NODE_RANK", "1")  # of a program that is started once a node
    assert not hpc_trainer.log_metrics(1, loss=1.0)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv(VARIABLE)
    assert not hpc_trainer.log_metrics(1, loss=1.0)
    assert not path.exists()


def test_what_is_no_number_is_the_programs_error(path: Path) -> None:
    with pytest.raises((TypeError, ValueError)):
        hpc_trainer.log_metrics(1, loss="low")
    assert not path.exists()


def test_a_line_that_is_being_written_is_read_when_it_is_whole(path: Path) -> None:
    lines = NewLines(path)
    path.write_bytes(b'{"step": 1, "lo')
    assert list(lines.read()) == []
    with path.open("ab") as file:
        file.write(b'ss": 2}\n')
    assert list(lines.read()) == [Told(1, None, {"loss": 2})]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"loss 3", "not a record of metrics"),
        (b'{"loss": 3}', 'no "step"'),
        (b'{"step": -1}', "not a record of metrics"),
        (b'{"step": true}', "not a record of metrics"),
        (b'{"step": 1.5}', "not a record of metrics"),
        (b"[1]", "not a record of metrics"),
        (b"\xff\xfe", "not a record of metrics"),
        (b"[" * 5000, "not a record of metrics"),
    ],
)
def test_a_line_that_says_nothing_is_told_once_and_the_others_count(
    path: Path, capsys: pytest.CaptureFixture[str], line: bytes, says: str
) -> None:
    path.write_bytes(line + b"\n" + line + b'\n{"step": 2, "loss": 1, "word": "x"}\n')
    lines = NewLines(path)
    assert list(lines.read()) == [Told(2, None, {"loss": 1})]
    assert [says in problem for problem in lines.problems] == [True, False]
    assert lines.problems[1].startswith("word: not a number")
    assert capsys.readouterr().out.count("A line is JSON") == 2


def test_an_endless_line_is_passed_over(path: Path) -> None:
    path.write_bytes(b"x" * (MAX_LINE_BYTES + 1))
    lines = NewLines(path)
    assert list(lines.read()) == []
    with path.open("ab") as file:
        file.write(b'yz\n{"step": 5}\n')
    assert list(lines.read()) == [Told(5, None, {})]


def test_the_function_needs_python_alone() -> None:
    code = "import sys; from hpc_trainer import log_metrics; log_metrics(1, loss=2); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "omegaconf", "hydra", "numpy", "yaml"} & set(json.loads(done.stdout.replace("'", '"')))


def test_a_pipe_in_the_files_place_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    os.mkfifo(path)
    monkeypatch.setenv(VARIABLE, str(path))
    monkeypatch.delenv("RANK", raising=False)
    lines = NewLines(path)
    assert list(lines.read()) == []
    assert lines.problems == ["metrics.jsonl cannot be read: it is a pipe, not a file"]
    assert not log_metrics(1, loss=0.5)
