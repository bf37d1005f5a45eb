"""Environment with the recorded versions: a new venv, filled by pip."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_trainer.errors import RunStateError
from hpc_trainer.runs.files import write_marker
from hpc_trainer.runs.modes import make_folder

_DONE = "hpc-trainer-rebuilt"
_LAST_LINES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    """Rebuilt environment, with its installed distributions and those that could not be installed."""

    python: str
    """Absolute path of the new environment's Python."""
    requirements: tuple[str, ...]
    left_out: tuple[str, ...]
    """Descriptions of distributions that came from folders: pip cannot restore the folders' former content."""


def requirements_of(record: Mapping[str, Any], frozen: Collection[str]) -> tuple[list[str], list[str]]:
    """Return pip's requirements for a record, and descriptions of the distributions that pip cannot install.

    Args:
        frozen: packages that come from frozen code; their distributions are not installed.
    """
    wanted, left_out = [], []
    for name, version in record["packages"].items():
        origin = record["origins"].get(name) or {}
        if name.replace("-", "_") in frozen:
            continue
        if "commit_id" in origin:
            wanted.append(f"{name} @ {origin.get('vcs', 'git')}+{origin['url']}@{origin['commit_id']}")
        elif str(origin.get("url", "")).startswith("file:") and (origin.get("editable") or not _is_file(origin["url"])):
            left_out.append(f"{name} {version}: it came from {origin['url']}")
        elif origin:
            wanted.append(f"{name} @ {origin['url']}")
        else:
            wanted.append(f"{name}=={version}")
    return wanted, left_out


def _is_file(url: str) -> bool:
    return url.endswith((".whl", ".tar.gz", ".zip"))


def rebuild(
    record: Mapping[str, Any], folder: Path, *, frozen: Collection[str], say: Callable[[str], None] = lambda _: None
) -> Rebuilt:
    """Create the environment below `folder`, unless it exists already. Takes seconds to many minutes.

    pip uses its configured sources (`PIP_INDEX_URL`, `PIP_FIND_LINKS` ..). Only recorded distributions are installed;
    the record includes dependencies.

    Raises:
        RunStateError: this machine lacks the recorded Python, or pip cannot install a package.
    """
    python = _python_of(str(record["python"].get("version")))
    wanted, left_out = requirements_of(record, frozen)
    text = "".join(f"{requirement}\n" for requirement in wanted)
    name = hashlib.sha256(f"{record['python'].get('version')}\n{platform.machine()}\n{text}".encode()).hexdigest()[:12]
    place = folder / f"environment-{name}"
    made = Rebuilt(python=str(place / "bin" / "python"), requirements=tuple(wanted), left_out=tuple(left_out))
    if (place / _DONE).exists():
        return made
    say(f"building {place}: {len(wanted)} package(s) ..")
    shutil.rmtree(place, ignore_errors=True)
    make_folder(place)
    _run([python, "-m", "venv", "--without-pip", str(place)], "python -m venv")
    (place / "requirements.txt").write_text(text, encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--python", made.python, "--disable-pip-version-check", "--no-input"]
    _run([*pip, "install", "--quiet", "--no-deps", "-r", str(place / "requirements.txt")], "pip install")
    write_marker(place / _DONE)
    return made


def _python_of(version: str) -> str:
    """Return a Python of this machine with the same minor version: the running one, or one on PATH.

    Raises:
        RunStateError: there is no such Python.
    """
    minor = ".".join(version.split(".")[:2])
    if minor == ".".join(platform.python_version_tuple()[:2]):
        return sys.executable
    path = shutil.which(f"python{minor}")
    if path is None:
        raise RunStateError(f"the run had Python {version}, and there is no python{minor} on PATH. Install it first.")
    return path


def _run(command: list[str], what: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, env=_environ())
    except OSError as error:
        raise RunStateError(f"{what} cannot be run: {error}") from error
    if done.returncode:
        last = "\n".join(f"  {line}" for line in (done.stderr or done.stdout).strip().splitlines()[-_LAST_LINES:])
        raise RunStateError(
            f"the environment cannot be rebuilt, {what} ended with {done.returncode}:\n{last}\nWithout --rebuild the "
            "run is reproduced with what is installed here. Another index: PIP_EXTRA_INDEX_URL."
        )


def _environ() -> dict[str, str]:
    """Return the environment without PYTHONPATH and PYTHONHOME, whose packages must not count as installed."""
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
