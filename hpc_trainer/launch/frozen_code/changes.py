"""Which frozen files are no longer what they were when runs of a sweep were submitted. Writes nothing."""

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
    """Runs that stay as they are, and the files of their frozen code that are other ones now."""

    code: str
    """Digest of their code, 64 hex digits."""
    num_runs: int
    files: tuple[str, ...]
    """Names in the frozen copy, as `my_project/my_lab/net.py`; modules first, those of hpc_trainer last."""


def find_changes(
    paths: SweepPaths, codes: Mapping[str, int], now: Snapshot | None
) -> tuple[list[CodeChange], list[str]]:
    """The changes since, and what cannot be said.

    Args:
        codes: digest of frozen code -> runs that it was frozen for; "": with snapshot=off, for nobody.
        now: the code that these runs would import if they were submitted now.
    """
    found, notes = [], []
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
            found.append(CodeChange(code=code, num_runs=num_runs, files=files))
    return found, notes


def _read_manifest(paths: SweepPaths, code: str) -> dict[str, Any]:
    """Raises ValueError: it is not that of this digest; OSError, KeyError, BadZipFile."""
    with zipfile.ZipFile(archive_of(paths, code)) as file:
        manifest: dict[str, Any] = json.loads(file.read(MANIFEST))
    if manifest_digest(manifest) != code:
        raise ValueError("it was changed")
    return manifest


def _changed(was: Mapping[str, Any], now: Snapshot) -> Iterator[str]:
    """Of folders that both hold a package of: a project that was moved or copied is the same one."""
    files: Mapping[str, list[str]] = now.manifest["files"]
    for root in was["roots"]:
        shared = (each for each in now.manifest["roots"] if each["packages"].keys() & root["packages"].keys())
        here = next(shared, None)
        if here is None:
            continue
        for name, entry in was["files"].items():
            top, _, below = name.partition("/")
            if top != root["name"]:
                continue
            found = files.get(f"{here['name']}/{below}")
            is_same = found == entry if found is not None else _stands_there(Path(here["source"], below), entry)
            if not is_same:
                yield name


def _stands_there(path: Path, entry: list[str]) -> bool:
    """True of a file that is as it was and no longer frozen: `snapshot.exclude` is another one."""
    mode, sha256 = entry
    try:
        read = None if mode == LINK else read_file(path)
    except ConfigError:
        return False
    return read is not None and hashlib.sha256(read[1]).hexdigest() == sha256


def _order(name: str) -> tuple[bool, bool, str]:
    return f"/{_OURS}/" in name, not name.endswith(".py"), name
