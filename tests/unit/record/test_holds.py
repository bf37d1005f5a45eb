"""Holds and rungs: files that keep a run from starting, or let it train further."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from hpc_trainer.record.holds import Hold, read_hold, write_hold
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.reading import Faults
from hpc_trainer.record.rungs import pause_step, promote, promotions
from hpc_trainer.slurm.commands import user_name


def test_a_hold_names_who_when_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    write_hold(tmp_path / "HOLD", "the disk is full", user="anna")
    assert json.loads((tmp_path / "HOLD").read_text()) == {"user": "anna", "time": 1000.0, "why": "the disk is full"}
    hold = read_hold(tmp_path / "HOLD", Faults())
    assert hold == Hold(user="anna", time=1000.0, why="the disk is full")
    clock = time.strftime("%Y-%m-%d %H:%M", time.localtime(1000))
    assert hold.words == f"held by anna since {clock}: the disk is full"
    write_hold(tmp_path / "HOLD")
    assert read_hold(tmp_path / "HOLD", Faults()) == Hold(user=user_name(), time=1000.0)
    assert Hold(user="bob", time=1000.0).words == f"held by bob since {clock}"


@pytest.mark.parametrize("text", ["{", '{"user": "anna"}', '{"time": 3, "why": ""}', '{"user": 3, "time": 3}'])
def test_a_hold_that_cannot_be_read_holds_all_the_same(tmp_path: Path, text: str) -> None:
    (tmp_path / "HOLD").write_text(text)
    os.utime(tmp_path / "HOLD", (500, 500))
    assert read_hold(tmp_path / "HOLD", Faults()) == Hold(user="an unknown user", time=500.0)


def test_a_hold_that_was_released_meanwhile(tmp_path: Path) -> None:
    before = time.time()
    hold = read_hold(tmp_path / "HOLD", Faults())
    assert hold.user == "an unknown user"
    assert before <= hold.time <= time.time()


def test_one_process_lets_a_run_train_to_a_step(tmp_path: Path) -> None:
    paths = SweepPaths(tmp_path / "sweep").run("a")
    assert promote(paths, 20, 3)
    assert not promote(paths, 20, 4)
    assert promote(paths, 10, 9)
    record = json.loads(paths.until(20).read_text())
    assert (record["until"], record["results"]) == (20, 3)
    names = [path.name for path in paths.folder.iterdir()]
    assert promotions([*names, "until-1.json", "until-000000030.json.tmp", "summary.json"]) == [10, 20]


@pytest.mark.parametrize(
    ("rungs", "until", "step"),
    [((), (), None), ((10, 30), (), 10), ((10, 30), (30,), 30), ((10, 30), (90,), None), ((), (90,), None),
     ((10, 30), (10,), 10), ((10, 30), (30, 90), None)],
)  # fmt: skip
def test_a_run_pauses_at_the_last_step_it_was_let_train_to(
    rungs: tuple[int, ...], until: tuple[int, ...], step: int | None
) -> None:
    assert pause_step(rungs, [f"until-{number:09}.json" for number in until]) == step
