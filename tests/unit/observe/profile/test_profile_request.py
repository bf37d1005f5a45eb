"""profile/request.json: what nobody writes is no request, and only one's own is withdrawn."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.observe.profile_request import ProfileRequest, read_request, withdraw, write_request
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
