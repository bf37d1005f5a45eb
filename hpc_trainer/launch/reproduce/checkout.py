"""Code of a run without frozen code: the recorded git revision, with the recorded uncommitted difference."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpc_trainer.errors import ConfigError, RunStateError
from hpc_trainer.launch.frozen_code.snapshot import Snapshot, read_code
from hpc_trainer.runs.spec import RunSpec
from hpc_trainer.runtime.environment.git import run_git

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
            "train.command ran with snapshot=off: its files were not frozen, and who runs them by their path cannot be "
            "given others. Submit with snapshot=git."
        )
    places = {name: place for name, place in (recorded.get("places") or {}).items() if name != _OURS}
    mine = {name: _checkout_of(place, recorded.get("checkouts") or []) for name, place in places.items()}
    installed = [name for name, checkout in mine.items() if checkout is None and _is_installed(places[name])]
    lost = sorted(name for name, checkout in mine.items() if checkout is None and name not in installed)
    if lost:
        raise RunStateError(
            f"{', '.join(lost)} was imported from {places[lost[0]]}, which is no git checkout, and nothing was frozen "
            "(snapshot=off): its code of then is not known. Submit with snapshot=git."
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
                raise RunStateError(f"the code of then cannot be frozen: {error}") from error


def _checkout_of(place: str, checkouts: list[dict[str, Any]]) -> dict[str, Any] | None:
    around = [each for each in checkouts if Path(place).is_relative_to(each["top"])]
    return max(around, key=lambda each: len(each["top"]), default=None)


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
            f"{top} had a difference from {revision[:12]} that was too long to be kept: the code of then is not known. "
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
