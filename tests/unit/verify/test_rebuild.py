"""An environment of the recorded versions: what pip is asked for, and a real one from a folder of wheels."""

from __future__ import annotations

import platform
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.errors import RunStateError
from hpc_trainer.verify.old_code import rebuild, requirements_of


def _wheel(folder: Path, name: str, version: str) -> None:
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{each},,\n" for each in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        for each, text in {**files, f"{info}/RECORD": record}.items():
            file.writestr(each, text)


def _record(packages: dict[str, str], **origins: Any) -> dict[str, Any]:
    return {"python": {"version": platform.python_version()}, "packages": packages, "origins": origins}


def test_what_pip_is_asked_for() -> None:
    packages = dict.fromkeys(("torch", "mine", "of-git", "by-hand", "hpc-trainer", "wheel-file"), "1.0")
    origins = {
        "mine": {"url": "file:///home/me/mine", "editable": True},
        "of-git": {"url": "https://example.org/x.git", "vcs": "git", "commit_id": "ab12"},
        "by-hand": {"url": "file:///home/me/by-hand"},
        "hpc-trainer": {"url": "file:///home/me/hpc", "editable": True},
        "wheel-file": {"url": "file:///home/me/wheel_file-1.0-py3-none-any.whl"},
    }

    wanted, left_out = requirements_of(_record(packages, **origins), frozen={"hpc_trainer"})

    assert wanted == [
        "torch==1.0", "of-git @ git+https://example.org/x.git@ab12",
        "wheel-file @ file:///home/me/wheel_file-1.0-py3-none-any.whl",
    ]  # fmt: skip
    assert left_out == [
        "mine 1.0: it came from file:///home/me/mine", "by-hand 1.0: it came from file:///home/me/by-hand",
    ]  # fmt: skip


@pytest.mark.long
def test_a_real_environment_has_the_versions_of_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for version in ("1.2", "1.3"):
        _wheel(wheels, "tinyone", version)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    said: list[str] = []

    made = rebuild(_record({"tinyone": "1.2"}), tmp_path / "there", frozen=(), say=said.append)

    show = [made.python, "-c", "import sys, tinyone; print(tinyone.VERSION, sys.prefix != sys.base_prefix)"]
    assert subprocess.run(show, capture_output=True, text=True, check=True).stdout.split() == ["1.2", "True"]
    assert rebuild(_record({"tinyone": "1.2"}), tmp_path / "there", frozen=(), say=said.append) == made
    assert len(said) == 1  # the second found it
    with pytest.raises(RunStateError, match="tinyone==9"):
        rebuild(_record({"tinyone": "9.9"}), tmp_path / "there", frozen=())


def test_another_python_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(RunStateError, match=r"no python2\.7 on PATH"):
        rebuild({**_record({}), "python": {"version": "2.7.18"}}, tmp_path, frozen=())
