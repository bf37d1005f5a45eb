"""Names in the checkpoints folder: what is a checkpoint, what is kept for inspection, what a dead attempt left."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hpc_trainer.errors import CheckpointError
from hpc_trainer.record.checkpoint_folders import (
    Retention,
    committed,
    discard,
    discard_old_bad,
    discard_unfinished,
    is_pinned,
    manifest_tail,
    quarantine,
    step_name,
    step_of,
    temporary_path,
)


def _folders(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir()
        (folder / name / "file").touch()


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_name_tells_the_step() -> None:
    assert step_name(1200) == "step-00001200"
    names = ("step-00001200", "step-123456789", "step-1200", "step-00001200.tmp-3", "step-00001200.pin", "other")
    assert [step_of(Path("x", name)) for name in names] == [1200, 123456789, None, None, None, None]
    assert temporary_path(Path("x"), 1200, 3) == Path("x/step-00001200.tmp-3")
    assert manifest_tail(b'{"a":1') == b',"checksum":"a702fc6e"}\n'


def test_checkpoints_are_those_with_a_whole_name_the_newest_first(tmp_path: Path) -> None:
    assert committed(tmp_path / "none") == []
    names = ("step-00000010", "step-00000100", "step-00000020.bad-1", "step-00000030.tmp-0", "note")
    _folders(tmp_path, *names)
    assert committed(tmp_path) == [(100, tmp_path / "step-00000100"), (10, tmp_path / "step-00000010")]


def test_a_pin_is_any_file_of_that_name(tmp_path: Path) -> None:
    assert not is_pinned(tmp_path / step_name(1))
    (tmp_path / "step-00000001.pin").symlink_to("nowhere")
    assert is_pinned(tmp_path / step_name(1))
    assert not is_pinned(tmp_path / step_name(2))


def test_damaged_checkpoints_are_kept_apart_the_two_youngest_of_them(tmp_path: Path) -> None:
    moved = []
    for _ in range(4):
        _folders(tmp_path, step_name(10))
        moved.append(quarantine(tmp_path / step_name(10)).name)
    assert moved == [f"step-00000010.bad-{number}" for number in range(1, 5)]
    assert (tmp_path / moved[0] / "file").exists()
    for name in (moved[0], moved[3], moved[1], moved[2]):  # the order of their last changes
        os.utime(tmp_path / name)
        time.sleep(0.02)  # the file system's clock has ticks
    discard_old_bad(tmp_path)
    assert _names(tmp_path) == sorted(moved[1:3])
    discard_old_bad(tmp_path)
    assert _names(tmp_path) == sorted(moved[1:3])


def test_a_folder_is_renamed_before_it_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _folders(tmp_path, step_name(10), f".trash-{step_name(10)}")
    discard(tmp_path / step_name(10))
    assert _names(tmp_path) == []
    _folders(tmp_path, step_name(10))
    monkeypatch.setattr("shutil.rmtree", lambda *given, **named: None)
    discard(tmp_path / step_name(10))
    assert _names(tmp_path) == [f".trash-{step_name(10)}"]
    assert (tmp_path / _names(tmp_path)[0] / "file").exists()


def test_what_dead_attempts_left_goes_and_what_a_later_one_writes_stays(tmp_path: Path) -> None:
    dead = ["step-00000010.tmp-0", "step-00000010.tmp-2", ".trash-step-00000001"]
    _folders(tmp_path, *dead, "step-00000010.tmp-3", "step-00000010", "step-00000010.bad-1")
    assert sorted(discard_unfinished(tmp_path, 2)) == sorted(dead)
    assert _names(tmp_path) == ["step-00000010", "step-00000010.bad-1", "step-00000010.tmp-3"]
    assert discard_unfinished(tmp_path / "none", 2) == []


@pytest.mark.parametrize(
    ("rules", "scores", "kept"),
    [
        ({}, {}, [60, 50]),
        ({"keep_last": 1}, {}, [60]),
        ({"keep_last": 3}, {}, [60, 50, 40]),
        ({"keep_every_steps": 20}, {}, [60, 50, 40, 20]),
        ({}, {10: 0.5, 20: 0.2, 30: 0.2, 90: 0.1}, [60, 50, 30]),
        ({"best_is_max": True}, {10: 0.5, 20: 0.2}, [60, 50, 10]),
        ({}, {10: float("nan")}, [60, 50]),
        ({"newest_of_every_steps": 40}, {}, [60, 50, 40]),
        ({"newest_of_every_steps": 100}, {}, [60, 50, 10]),
    ],
)
def test_which_checkpoints_are_kept(
    tmp_path: Path, rules: dict[str, int], scores: dict[int, float], kept: list[int]
) -> None:
    _folders(tmp_path, *(step_name(step) for step in range(10, 70, 10)))
    gone = Retention(**rules).apply(tmp_path, saved=tmp_path / step_name(60), scores=scores, is_valid=lambda path: True)
    assert [step for step, _ in committed(tmp_path)] == kept
    assert [step_of(path) for path in gone] == [step for step in range(60, 0, -10) if step not in kept]


def test_a_pinned_one_the_one_just_saved_and_two_valid_ones_stay(tmp_path: Path) -> None:
    _folders(tmp_path, *(step_name(step) for step in range(10, 70, 10)))
    (tmp_path / f"{step_name(20)}.pin").touch()
    Retention().apply(
        tmp_path, saved=tmp_path / step_name(10), scores={}, is_valid=lambda path: step_of(path) not in (60, 40)
    )
    assert [step for step, _ in committed(tmp_path)] == [60, 50, 40, 30, 20, 10]
    Retention().apply(tmp_path, saved=tmp_path / step_name(10), scores={}, is_valid=lambda path: step_of(path) != 60)
    assert [step for step, _ in committed(tmp_path)] == [60, 50, 40, 20, 10]


@pytest.mark.parametrize(("key", "value", "least"), [("keep_last", 0, 1), ("keep_every_steps", -1, 0)])
def test_a_rule_that_keeps_nothing_is_refused(key: str, value: int, least: int) -> None:
    with pytest.raises(CheckpointError) as error:
        Retention(**{key: value})
    assert str(error.value) == f"checkpoint.{key}={value} must be ≥ {least}; nearest legal: {least}."
    Retention(**{key: least})


def test_which_steps_are_kept_for_good() -> None:
    assert [Retention(keep_every_steps=20).is_nth(step) for step in (0, 20, 30, 40)] == [True, True, False, True]
    assert not Retention().is_nth(20)
