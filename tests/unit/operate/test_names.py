"""Names of sweeps and runs for completion: bounded, and never an error."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hpc_trainer.operate import find
from hpc_trainer.operate.find import run_names, sweep_names
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk


def _made(folder: Path, name: str, runs: list[str], age_s: float = 0.0) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "sweep.json").write_text(json.dumps({"run_ids": runs}))
    stamp = 2_000_000_000 - age_s
    os.utime(folder / name, (stamp, stamp))


def test_sweeps_come_newest_first_and_other_folders_are_none(tmp_path: Path) -> None:
    _made(tmp_path, "older", [], age_s=100)
    _made(tmp_path, "newer", [])
    (tmp_path / "data").mkdir()
    (tmp_path / "notes.txt").write_text("")
    _made(tmp_path, "$(touch x)", [])
    assert sweep_names(tmp_path) == ["newer", "older"]
    assert sweep_names(tmp_path / "nowhere") == []


def test_runs_that_wait_and_runs_that_began(tmp_path: Path) -> None:
    sweep = SweepOnDisk(tmp_path / "real", make_specs(2))
    sweep.start(0)
    began, waits = (spec.run_id for spec in sweep.specs)
    assert run_names(tmp_path, "real", "") == [began]
    sweep.paths.sweep.write_text(json.dumps({"run_ids": [began, waits]}))
    assert run_names(tmp_path, "real", "") == [began, waits]
    assert run_names(tmp_path, None, waits[:-1]) == [waits]
    assert run_names(tmp_path, "real", "nothing") == []
    assert run_names(tmp_path, "nowhere", "") == []


def test_without_a_beginning_it_is_the_newest_sweep_alone(tmp_path: Path) -> None:
    _made(tmp_path, "older", ["mlp-a-0123456789"], age_s=100)
    _made(tmp_path, "newer", ["mlp-b-0123456789"])
    assert run_names(tmp_path, None, "") == ["mlp-b-0123456789"]
    assert run_names(tmp_path, None, "mlp") == ["mlp-b-0123456789", "mlp-a-0123456789"]


def test_after_enough_names_older_sweeps_are_not_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        _made(tmp_path, f"s{number}", [f"mlp-{number}-{each:010x}" for each in range(10)], age_s=number)
    monkeypatch.setattr(find, "_MOST_NAMES", 15)
    assert len(run_names(tmp_path, None, "mlp")) == 20


@pytest.mark.parametrize("text", ["", "[]", "{", '{"run_ids": 3}', '{"run_ids": [3, "a b", "$(x)"]}'])
def test_a_damaged_file_offers_nothing(tmp_path: Path, text: str) -> None:
    _made(tmp_path, "odd", [])
    (tmp_path / "odd" / "sweep.json").write_text(text)
    assert run_names(tmp_path, "odd", "") == []
