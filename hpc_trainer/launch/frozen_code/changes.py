"""Search for frozen files that have changed since runs of a sweep were submitted. Writes nothing."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_trainer.errors import ConfigError
from hpc_trainer.launch.frozen_code.archive import archive_of
from hpc_trainer.launch.frozen_code.code_files import read_file
from hpc_trainer.launch.frozen_code.frozen_worker import MANIFEST, manifest_digest
from hpc_trainer.launch.frozen_code.snapshot import Snapshot
from hpc_trainer.launch.frozen_code.unpacking import LINK
from hpc_trainer.runs.layout import SweepPaths

_OURS = "hpc_trainer"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeChange:
    """Files of frozen code that have changed since, and the number of runs that keep the frozen code."""

    code: str
    """Digest of the runs' code, 64 hex digits."""
    num_runs: int
    files: tuple[str, ...]
    """Names in the frozen copy, as `my_project/my_lab/net.py`; modules first, files of hpc_trainer last."""


def find_changes(
    paths: SweepPaths, codes: Mapping[str, int], now: Snapshot | None
) -> tuple[list[CodeChange], list[str]]:
    """Return the changes of the code since these runs were submitted, and a note on each code that is unknown.

    Args:
        codes: number of runs by the digest of their frozen code; the digest is "" with snapshot=off.
        now: the code that these runs would import if they were submitted now.
    """
    changes, notes = [], []
    for code, num_runs in codes.items():
        unknown = f"Nobody knows whether the code of {num_runs} run(s) has changed since"
        if not code:
            notes.append(f"{unknown}: snapshot=off froze nothing.")
            continue
        try:
            was = _read_manifest(paths, code)
        except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
            notes.append(f"{unknown}: {archive_of(paths, code)} cannot be read ({error}).")
            continue
        files = () if now is None else tuple(sorted(_changed(was, now), key=_order))
        if files:
            changes.append(CodeChange(code=code, num_runs=num_runs, files=files))
    return changes, notes


def _read_manifest(paths: SweepPaths, code: str) -> dict[str, Any]:
    """Read the manifest of the archive with this digest.

    Raises:
        ValueError: the manifest has another digest.
        OSError, KeyError, BadZipFile: the archive cannot be read.
    """
    with zipfile.ZipFile(archive_of(paths, code)) as file:
        manifest: dict[str, Any] = json.loads(file.read(MANIFEST))
    if manifest_digest(manifest) != code:
        raise ValueError("it was changed")
    return manifest


def _changed(was: Mapping[str, Any], now: Snapshot) -> Iterator[str]:
    """Yield the names of changed files; roots are matched by a shared package.

    A project that was moved or copied therefore counts as the same project.
    """
    files: Mapping[str, list[str]] = now.manifest["files"]
    for root in was["roots"]:
        shared = (
            root_now for root_now in now.manifest["roots"] if root_now["packages"].keys() & root["packages"].keys()
        )
        here = next(shared, None)
        if here is None:
            continue
        for name, entry in was["files"].items():
            top, _, below = name.partition("/")
            if top != root["name"]:
                continue
            entry_now = files.get(f"{here['name']}/{below}")
            is_same = entry_now == entry if entry_now is not None else _stands_there(Path(here["source"], below), entry)
            if not is_same:
                yield name


def _stands_there(path: Path, entry: list[str]) -> bool:
    """Return True if a file is unchanged, though it is no longer frozen because `snapshot.exclude` has changed."""
    mode, sha256 = entry
    try:
        read = None if mode == LINK else read_file(path)
    except ConfigError:
        return False
    return read is not None and hashlib.sha256(read[1]).hexdigest() == sha256


def _order(name: str) -> tuple[bool, bool, str]:
    return f"/{_OURS}/" in name, not name.endswith(".py"), name
