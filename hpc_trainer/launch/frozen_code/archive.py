"""Frozen code on the disk: runs/<sweep>/code/<digest>.zip, written whole or not at all.

Its origin is recorded as the git revision of the working folder. Before later submits the frozen files are compared
with the files of today, which writes nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_trainer import __version__
from hpc_trainer.errors import ConfigError, HpcTrainerError, SubmitError
from hpc_trainer.launch.frozen_code.frozen_worker import MANIFEST, manifest_digest, member, read_archive
from hpc_trainer.launch.frozen_code.snapshot import Snapshot, read_file, starter_code
from hpc_trainer.launch.frozen_code.unpacking import LINK, RefusedCodeError
from hpc_trainer.record.files import age_on_server_s, fsync_folder, make_folder, whole_file
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.reading import is_there
from hpc_trainer.record.trust import check_trusted
from hpc_trainer.runtime.code import git_says

# A file that a killed submit left half written is removed when no live submit can still be writing it.
_STALE_S = 3600.0


def archive_of(paths: SweepPaths, digest: str) -> Path:
    """Return the path of the archive with this digest (64 hex digits) in a sweep's folder."""
    return paths.code / f"{digest[:12]}.zip"


def store_code(paths: SweepPaths, snapshot: Snapshot) -> Path:
    """Write the archive that workers start from into the sweep's folder, unless it exists, and return its path.

    The archive is flushed to the disk and appears by a rename; if this process is killed before, there is no archive.

    Raises:
        SubmitError: the archive of this digest was changed.
        UntrustedFileError: others may have changed the archive.
    """
    archive = archive_of(paths, snapshot.digest)
    make_folder(paths.code)
    check_trusted(paths.code)
    if is_there(archive):
        check_trusted(archive)
        try:
            manifest, _ = read_archive(archive)
            if manifest != snapshot.manifest:
                raise RefusedCodeError(f"{archive} holds other code of the same short digest")
        except RefusedCodeError as error:
            raise SubmitError(
                f"{error}. Waiting runs refuse to start from it. Move it away and submit again: that writes a new one."
            ) from error
        return archive
    _remove_stale(paths.code)
    if _take_shared(paths, archive, snapshot):
        return archive
    with whole_file(archive) as file:
        file.write(_pack(snapshot))
        os.fchmod(file.fileno(), os.fstat(file.fileno()).st_mode & 0o444)  # read-only: it is never written again
    fsync_folder(paths.folder)
    _share(paths, archive)
    return archive


# One copy for all sweeps: archives of one digest are names of one file (hard links).
#
# Nothing counts who uses it, and no sweep depends on another: a file is there while it has a name. So a submit and a
# `clean` may work at once, and a deleted sweep takes no code from others. Where there are no hard links, each sweep has
# a copy of its own.


def shared_code(runs_dir: Path) -> Path:
    """Return the folder with hard links to the archives of this user's sweeps under `runs_dir`, by mode of files.

    A colleague's folder of sweeps may be the same, and its files are not trusted.
    """
    return runs_dir / f".code-{os.getuid()}"


def _shared(paths: SweepPaths, archive: Path) -> Path:
    # The group may read the code of some sweeps and not of others.
    return shared_code(paths.folder.parent) / ("group" if paths.is_group_readable else "own") / archive.name


def _take_shared(paths: SweepPaths, archive: Path, snapshot: Snapshot) -> bool:
    """Link an archive of another sweep into this one; return False if there is no unchanged one."""
    shared = _shared(paths, archive)
    try:
        if not is_there(shared):
            return False
        for place in (shared.parent.parent, shared.parent, shared):
            check_trusted(place)
        if read_archive(shared)[0] != snapshot.manifest:
            return False
        os.link(shared, archive)
        fsync_folder(paths.code)
    except (OSError, HpcTrainerError, RefusedCodeError):  # no hard links, another's file, a changed one
        return False
    return True


def _share(paths: SweepPaths, archive: Path) -> None:
    """Link a new archive into the shared folder for later sweeps. Never raises: without the link they write copies."""
    shared = _shared(paths, archive)
    with contextlib.suppress(OSError, HpcTrainerError):
        make_folder(shared.parent)
        for place in (shared.parent.parent, shared.parent):
            check_trusted(place)
        if is_there(shared):  # one that was changed: no sweep takes it
            shared.unlink()
        os.link(archive, shared)


def _pack(snapshot: Snapshot) -> bytes:
    packed = io.BytesIO()
    # Stored, not compressed: 0.4 MB of Python in 100 files take 15 ms to deflate, and 1 ms to write.
    with zipfile.ZipFile(packed, "w") as file:
        for name, content in {**starter_code(), MANIFEST: json.dumps(snapshot.manifest, indent=1).encode()}.items():
            file.writestr(zipfile.ZipInfo(name), content)
        for number, (name, (_, content)) in enumerate(snapshot.contents.items()):
            file.writestr(zipfile.ZipInfo(member(number, name)), content)
    return packed.getvalue()


def _remove_stale(folder: Path) -> None:
    for path in folder.glob(".*.tmp"):
        with contextlib.suppress(OSError):
            if age_on_server_s(path) > _STALE_S:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def code_revision(code: Snapshot | None = None) -> dict[str, Any]:
    """Return the `hpc_trainer` version, git revision, digest of the uncommitted difference, and the frozen code.

    Revision and difference are None outside a checkout. The frozen code's record has its digest, source folders and
    omitted links; it is None if nothing was frozen.
    """
    revision = git_says(".", "rev-parse", "HEAD")
    diff = git_says(".", "diff", "--no-ext-diff", "--no-textconv", "HEAD") if revision else None
    return {
        "hpc_trainer": __version__,
        "git_revision": revision.decode().strip() if revision else None,
        "git_diff_sha256": hashlib.sha256(diff).hexdigest() if diff else None,
        "snapshot": None if code is None else code.provenance(),
    }


_OURS = "hpc_trainer"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeChange:
    """Files of frozen code that have changed since, and the number of runs that keep the frozen code."""

    code: str
    """Digest of the runs' code, 64 hex digits."""
    num_runs: int
    files: tuple[str, ...]
    """Names in the frozen copy, such as `my_project/my_lab/net.py`; modules first, files of hpc_trainer last."""


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
        unknown = f"It is unknown whether the code of {num_runs} run(s) has changed since"
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
    """Return True if a file is unchanged, though it is no longer frozen because `snapshot.exclude` has changed.

    Of data to which the code had a link, only its place counts.
    """
    mode, sha256 = entry
    if mode == LINK:
        return os.path.lexists(path)
    try:
        read = read_file(path)
    except ConfigError:
        return False
    return read is not None and hashlib.sha256(read[1]).hexdigest() == sha256


def _order(name: str) -> tuple[bool, bool, str]:
    return f"/{_OURS}/" in name, not name.endswith(".py"), name
