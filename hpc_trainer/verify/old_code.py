"""Code and environment that a run had, restored for a repetition of it.

If nothing was frozen, the code is the revision that git recorded, with its difference. An environment of the recorded
versions is a venv that pip fills.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_trainer.errors import ConfigError, RunStateError
from hpc_trainer.launch.frozen_code.snapshot import Snapshot, read_code
from hpc_trainer.record.files import make_folder, write_marker
from hpc_trainer.record.spec import RunSpec
from hpc_trainer.runtime.code import run_git

_OURS = "hpc_trainer"


def read_checkout(spec: RunSpec, recorded: Mapping[str, Any], runs_dir: Path) -> Snapshot | None:
    """Return the code that the run imported, ready to be frozen; None if all of it was installed.

    Only a temporary folder is written; the repositories stay unchanged.

    Args:
        recorded: `code` in the record of the run's environment.

    Raises:
        RunStateError: the code cannot be restored: there is no checkout, the revision is gone, or the difference was
            not kept.
    """
    if spec.is_program:
        raise RunStateError(
            "train.command ran with snapshot=off: its files were not frozen, and a program that is run by its path "
            "cannot be replaced by its old version. Submit with snapshot=git."
        )
    places = {name: place for name, place in (recorded.get("places") or {}).items() if name != _OURS}
    mine = {name: _checkout_of(place, recorded.get("checkouts") or []) for name, place in places.items()}
    installed = [name for name, checkout in mine.items() if checkout is None and _is_installed(places[name])]
    lost = sorted(name for name, checkout in mine.items() if checkout is None and name not in installed)
    if lost:
        raise RunStateError(
            f"{', '.join(lost)} was imported from {places[lost[0]]}, which is not a git checkout, and nothing was "
            "frozen (snapshot=off): its old code is unknown. Submit with snapshot=git."
        )
    with tempfile.TemporaryDirectory(prefix="hpc-trainer-checkout-") as folder:
        entries = []
        for number, checkout in enumerate(
            {checkout["top"]: checkout for checkout in mine.values() if checkout}.values()
        ):
            top = Path(folder, str(number), Path(checkout["top"]).name)
            write_checkout(checkout, top)
            inside = (Path(place) for name, place in places.items() if mine[name] is checkout)
            entries += [str(top / place.relative_to(checkout["top"])) for place in inside]
        with _imports_from(folder, entries):
            try:
                return read_code([spec], runs_dir, is_look=True)
            except ConfigError as error:
                raise RunStateError(f"the old code cannot be frozen: {error}") from error


def _checkout_of(place: str, checkouts: list[dict[str, Any]]) -> dict[str, Any] | None:
    around = [checkout for checkout in checkouts if Path(place).is_relative_to(checkout["top"])]
    return max(around, key=lambda checkout: len(checkout["top"]), default=None)


def _is_installed(place: str) -> bool:
    return bool({"site-packages", "dist-packages"} & set(Path(place).parts))


def write_checkout(checkout: Mapping[str, Any], folder: Path) -> None:
    """Write the files of the recorded revision into `folder`, which must not exist, and apply the difference.

    Raises:
        RunStateError: the revision is missing, or the difference was not kept or does not apply.
    """
    top, revision, digest = str(checkout["top"]), str(checkout["revision"]), checkout.get("diff_sha256")
    if checkout.get("diff") is None and digest is not None:
        raise RunStateError(
            f"{top} had a difference from {revision[:12]} that was too long to be kept: the old code is unknown. "
            "Submit with snapshot=git."
        )
    repository = next((candidate for candidate in (top, os.curdir) if _has(candidate, revision)), None)
    if repository is None:
        raise RunStateError(
            f"the run's code is revision {revision} of {checkout.get('remote') or top}, and neither {top} nor the "
            "current folder has it. Fetch it there: git fetch origin " + revision
        )
    folder.mkdir(parents=True)
    index = {"GIT_INDEX_FILE": str(folder.parent / "index")}
    _git(repository, "read-tree", revision, more=index)
    _git(repository, "checkout-index", "--all", f"--prefix={folder}/", more=index)
    if checkout.get("diff"):
        text = str(checkout["diff"]).encode(errors="surrogateescape")
        # Keeps git from looking for files of a repository around the folder.
        alone = {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
        try:
            _git(str(folder), "apply", "--whitespace=nowarn", "-", more=alone, given=text)
        except RunStateError as error:
            secrets = checkout.get("diff_redacted") or 0
            why = f": {secrets} value(s) were taken out of it as secrets" if secrets else ""
            raise RunStateError(f"the recorded difference from {revision[:12]} does not apply{why}. {error}") from error


def _has(repository: str, revision: str) -> bool:
    try:
        _git(repository, "cat-file", "-e", f"{revision}^{{commit}}")
    except RunStateError:
        return False
    return True


def _git(folder: str, *argv: str, **options: Any) -> None:
    """Run git in a folder; `options` are passed to `run_git`.

    Raises:
        RunStateError: git cannot be run, or fails.
    """
    try:
        done = run_git(folder, *argv, timeout_s=300, **options)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunStateError(f"git cannot be run: {error}") from error
    if done.returncode:
        raise RunStateError(f"git {argv[0]}: {done.stderr.decode(errors='replace').strip()[:500]}")


@contextlib.contextmanager
def _imports_from(folder: str, entries: list[str]) -> Iterator[None]:
    """Make Python look for packages in `entries` first, and not in the present current folder."""
    here, path = Path.cwd(), sys.path[:]
    os.chdir(folder)
    sys.path[:0] = entries
    try:
        yield
    finally:
        os.chdir(here)
        sys.path[:] = path


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
            "run is reproduced with what is installed here. To use another package index, set PIP_EXTRA_INDEX_URL."
        )


def _environ() -> dict[str, str]:
    """Return the environment without PYTHONPATH and PYTHONHOME, whose packages must not count as installed."""
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
