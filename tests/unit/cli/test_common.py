"""Figures and durations as the verbs print them, and where sweeps live."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.cli.common import (
    counts_line,
    figure,
    gpu_hours,
    print_next,
    print_table,
    short_duration,
    short_number,
)  # fmt: skip
from hpc_trainer.cli.run_verbs import speed_words
from hpc_trainer.operate.find import configured_runs_dir
from hpc_trainer.record.states import RunState


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (200, "3m20s"), (3599.6, "1h00m"), (90_000, "25h00m")],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert short_duration(seconds) == text


@pytest.mark.parametrize(("value", "text"), [(0.123456, "0.1235"), (12345.6, "1.235e+04"), (3, "3"), ("x", "x")])
def test_figures(value: Any, text: str) -> None:
    assert figure(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.5213, "0.521"), (87.34, "87.3"), (999.6, "1k"), (1234, "1.23k"), (482_000, "482k"), (2e9, "2G")],
)
def test_short_numbers(value: float, text: str) -> None:
    assert short_number(value) == text


def test_speed_in_words() -> None:
    assert speed_words({}) == "-"
    assert speed_words({"steps_per_s": 2.0}) == "2 steps/s"
    assert speed_words({"steps_per_s": 2.0, "samples_per_s": 1280.0, "data_wait_share": 0.04}) == "1.28k samples/s"
    figures = {"samples_per_s": 470.0, "tokens_per_s": 481_280.0, "mfu": 0.417, "data_wait_share": 0.2}
    assert speed_words(figures) == "481k tokens/s mfu 42% data wait 20%"


def test_counts() -> None:
    assert counts_line({"RUNNING": 1, "COMPLETED": 3}) == "3 COMPLETED, 1 RUNNING"
    assert counts_line({}) == "no runs"


def test_where_sweeps_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert configured_runs_dir(None) == Path("runs")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "hpc_trainer").mkdir()
    (tmp_path / "hpc_trainer" / "config.yaml").write_text("paths.runs_dir: ~/own\n")
    assert configured_runs_dir(None) == Path("~/own").expanduser()
    monkeypatch.setenv("HPC_TRAINER_RUNS", "/env")
    assert configured_runs_dir(None) == Path("/env")
    assert configured_runs_dir(Path("/option")) == Path("/option")


@pytest.mark.parametrize(("value", "text"), [(0.5, "0.5"), (9.3333, "9.333"), (1000, "1,000"), (11520.4, "11,520")])
def test_hours_have_no_exponent(value: float, text: str) -> None:
    assert gpu_hours(value) == f"{text} GPU-hours"


def test_a_table_leaves_out_a_column_in_which_no_row_has_anything(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["RUN", "ETA", "STATE", "NODE"], [["a", "-", RunState.RUNNING, "n1"], ["b", "-", RunState.NEW, "-"]])
    assert capsys.readouterr().out == "RUN  STATE    NODE\na    RUNNING  n1\nb    NEW      -\n"
    print_table(["RUN", "ETA"], [])
    assert capsys.readouterr().out == "RUN  ETA\n"


def test_the_next_command_without_words_ends_with_its_verb(capsys: pytest.CaptureFixture[str]) -> None:
    print_next("submit ")
    assert capsys.readouterr().out.endswith("submit\n")
