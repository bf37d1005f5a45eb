"""profile/request.json: what nobody writes is no request, and only one's own is withdrawn."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.observe.profile_request import (
    DONE,
    FAILED,
    ProfileAnswer,
    ProfileRequest,
    read_answer,
    read_request,
    withdraw,
    write_answer,
    write_request,
)
from hpc_trainer.record.files import write_json
from hpc_trainer.record.layout import RunPaths


def _asked(paths: RunPaths, name: str = "a1") -> ProfileRequest:
    paths.folder.mkdir(mode=0o700, exist_ok=True)
    request = ProfileRequest(id=name, time=time.time(), keep_s=60.0, num_steps=3, ranks=(0,))
    write_request(paths, request)
    return request


@pytest.mark.parametrize(
    "damage",
    [{"num_steps": 0}, {"num_steps": 1001}, {"num_steps": "3"}, {"ranks": []}, {"ranks": [True]}, {"ranks": None},
     {"time": "now"}, {"id": 3}, {"keep_s": None}],
    ids=str,
)  # fmt: skip
def test_a_request_that_nobody_writes_is_none(tmp_path: Path, damage: dict[str, Any]) -> None:
    paths = RunPaths(tmp_path / "run")
    assert read_request(paths) is None
    request = _asked(paths)
    assert read_request(paths) == request
    kept = {"id": "a1", "time": request.time, "keep_s": 60.0, "num_steps": 3, "ranks": [0]}
    write_json(paths.profile_request, {**kept, **damage})
    assert read_request(paths) is None
    for text in ("", "[1]", "{", "null"):
        paths.profile_request.write_text(text)
        assert read_request(paths) is None


@pytest.mark.parametrize("num_steps", [1, 1000])
def test_as_many_steps_as_may_be_asked_for_are(tmp_path: Path, num_steps: int) -> None:
    paths = RunPaths(tmp_path / "run")
    request = dataclasses.replace(_asked(paths), num_steps=num_steps)
    write_request(paths, request)
    assert read_request(paths) == request


@pytest.mark.parametrize(
    ("age_s", "is_wanted"), [(0, True), (60, True), (60.1, False), (-120, True), (-120.1, False)]
)  # fmt: skip
def test_a_request_is_wanted_while_its_command_waits_by_clocks_that_may_differ(age_s: float, is_wanted: bool) -> None:
    request = ProfileRequest(id="a", time=1000.0, keep_s=60.0, num_steps=3, ranks=(0,))
    assert request.is_wanted(1000.0 + age_s) is is_wanted


def test_a_request_of_others_is_none(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    _asked(paths)
    paths.profile_request.chmod(0o666)
    assert read_request(paths) is None


def test_only_ones_own_request_is_withdrawn(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    mine = _asked(paths)
    other = _asked(paths, "b2")
    withdraw(paths, mine)
    assert read_request(paths) == other
    withdraw(paths, other)
    assert not paths.profile_request.exists()
    withdraw(paths, other)


def test_a_request_is_wanted_until_its_command_no_longer_waits() -> None:
    request = ProfileRequest(id="a1", time=1000.0, keep_s=60.0, num_steps=3, ranks=(0,))
    ages = (-120.5, -120.0, 0.0, 60.0, 60.5)
    assert [request.is_wanted(1000.0 + age) for age in ages] == [False, True, True, True, False]
    assert not request.is_wanted(), "that was in 1970"


@pytest.mark.parametrize("num_steps", [1, 1000])
def test_the_least_and_the_largest_request(tmp_path: Path, num_steps: int) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.folder.mkdir(mode=0o700)
    request = ProfileRequest(id="a1", time=1000.0, keep_s=60.0, num_steps=num_steps, ranks=(0, 3))
    write_request(paths, request)
    assert read_request(paths) == request


def test_a_rank_answers_as_it_was_written(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.profile.mkdir(parents=True)
    assert read_answer(paths, 0) is None
    answer = ProfileAnswer(id="a1", state=DONE, attempt=1, step=20, figures={"step_s": 0.5}, lines=("one", "two"))
    write_answer(paths, 0, answer)
    failed = ProfileAnswer(id="a1", state=FAILED, attempt=1, step=20, error="out of memory")
    write_answer(paths, 1, failed)
    assert (read_answer(paths, 0), read_answer(paths, 1)) == (answer, failed)
    paths.profile_answer(1).write_text('{"id": "a1", "state": "done", "attempt": -1, "step": 20}')
    assert read_answer(paths, 1) is None
