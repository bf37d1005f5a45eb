"""Starts the worker from frozen code: `python runs/<sweep>/code/<digest>.zip ...` runs this file, its `__main__.py`.

It unpacks the archive beside itself, unless another rank has, and puts that on the path. It imports the standard
library alone: the hpc_trainer that is installed may be a checkout that somebody is editing, and must not be imported
before the path is set.

    python ARCHIVE --unpack FOLDER     only unpacks, to look at the code
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import runpy
import shutil
import signal
import stat
import sys
import time
import uuid
import zipfile
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

MAIN = "__main__.py"
MANIFEST = "manifest.json"
LINK = "link"
_CONFIG_ERROR = 78  # never retried (hpc_trainer/errors.py)
# 300 files of 8 kB take 0.1 s on a local disk, some seconds on a busy parallel file system.
_UNPACK_WAIT_S = 20.0


class RefusedCodeError(Exception):
    """The archive is not what was submitted, or others may have changed it."""


def manifest_digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 over names, modes and contents of all files, and over where they came from."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def member(number: int, name: str) -> str:
    """The name in the archive of the file `name`, the `number`-th; other programs that unpack zip meet no odd ones."""
    return f"code/{name}" if name.isascii() and name.isprintable() and "\\" not in name else f"odd-names/{number}"


def read_archive(archive: Path) -> tuple[dict[str, Any], dict[str, tuple[str, bytes]]]:
    """The manifest, and name -> (mode, content) of each file.

    Raises:
        RefusedCodeError: the content is not what the manifest says, or the manifest not what the archive's name says.
    """
    files: dict[str, tuple[str, bytes]] = {}
    try:
        with zipfile.ZipFile(archive) as file:
            manifest = json.loads(file.read(MANIFEST))
            if not manifest_digest(manifest).startswith(archive.stem):
                raise RefusedCodeError(f"{archive} was changed: its digest is {manifest_digest(manifest)[:12]}")
            for number, (name, (mode, sha256)) in enumerate(manifest["files"].items()):
                content = file.read(member(number, name))
                if hashlib.sha256(content).hexdigest() != sha256:
                    raise RefusedCodeError(f"{archive} was changed: {name}")
                files[name] = mode, content
            if hashlib.sha256(file.read(MAIN)).hexdigest() != manifest["main"]:
                raise RefusedCodeError(f"{archive} was changed: {MAIN}")
    except RefusedCodeError:
        raise
    except Exception as error:  # damaged headers make zipfile raise nine kinds, RuntimeError and EOFError among them
        raise RefusedCodeError(f"{archive} cannot be read: {error}") from error
    return manifest, files


def find_change(folder: Path, files: Mapping[str, tuple[str, bytes]]) -> str | None:
    """The first file that differs in the unpacked `folder` from what it must be; None if there is none."""
    for name, (mode, content) in files.items():
        path = f"{folder}/{name}"
        try:
            if mode == LINK:
                same = os.fsencode(Path(path).readlink()) == content
            else:
                with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:  # noqa: PTH123 -- a descriptor
                    same = file.read() == content
        except OSError:
            same = False
        if not same:
            return name
    start = len(f"{folder}/")
    for parent, folders, names in os.walk(folder):
        folders[:] = [each for each in folders if each != "__pycache__"]  # Python writes it when it imports
        for each in names:
            if f"{parent}/{each}"[start:] not in files:
                return f"{parent}/{each}"[start:]
    return None


def unpack(folder: Path, files: Mapping[str, tuple[str, bytes]]) -> None:
    """Writes the files into `folder`, which must not exist. Not flushed to the disk: the archive has been."""
    below = {name[:end] for name in files for end in range(len(name)) if name[end] == "/"}
    for each in (folder, *(folder / name for name in sorted(below))):
        each.mkdir()
    for name, (mode, content) in files.items():
        path = f"{folder}/{name}"
        if mode == LINK:
            Path(path).symlink_to(os.fsdecode(content))
            continue
        # Read-only: an editor that follows a traceback to here says so before it changes what waiting runs import.
        bits = 0o555 if mode == "755" else 0o444
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, bits), "wb") as file:
            file.write(content)


def ensure_unpacked(archive: Path, files: Mapping[str, tuple[str, bytes]]) -> Path:
    """The folder beside the archive with exactly these files. Every rank calls it; one unpacks, the others wait.

    The folder appears whole, by a rename. One that was changed is set aside and written anew.
    """
    folder, claim = archive.with_suffix(""), archive.with_suffix(".unpacking")
    deadline = time.monotonic() + _UNPACK_WAIT_S
    is_mine = False
    while not (folder.exists() or is_mine):
        # The claim only saves work: whoever holds it may have been killed, and two that unpack do no harm.
        is_mine = _take(claim) or time.monotonic() > deadline
        if not is_mine:
            time.sleep(0.05)
    try:
        change = find_change(folder, files)
        for _ in range(3):  # another rank may set aside and unpack in the same moment
            if change is None:
                return folder
            temporary = archive.with_name(f".{archive.stem}.{uuid.uuid4().hex}.tmp")
            if folder.exists():
                sys.stderr.write(f"{folder / change} is not what was submitted; unpacking {archive.name} anew.\n")
                with contextlib.suppress(FileNotFoundError):
                    folder.rename(archive.with_name(f"{archive.stem}.changed-{uuid.uuid4().hex[:8]}"))
            unpack(temporary, files)
            with contextlib.suppress(OSError):  # it is there by now: another rank was faster
                temporary.rename(folder)
            shutil.rmtree(temporary, ignore_errors=True)
            change = find_change(folder, files)
    finally:
        if is_mine:
            claim.unlink(missing_ok=True)
    raise RefusedCodeError(f"{folder / str(change)} is not what was submitted, and does not stay so")


def _take(claim: Path) -> bool:
    try:
        os.close(os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except FileExistsError:
        return False
    return True


def check_trusted(path: Path) -> None:
    """Refuses what another user owns or others may write, as hpc_trainer.runs.files does.

    Raises:
        RefusedCodeError: owner or mode is wrong, or the path is a symbolic link.
    """
    info = path.lstat()
    if stat.S_ISLNK(info.st_mode):
        raise RefusedCodeError(f"{path} is a symbolic link; it must be the file itself")
    if info.st_uid not in (os.getuid(), 0):
        raise RefusedCodeError(f"{path} belongs to user {info.st_uid}, and only yours (or root's) is run")
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = f"{stat.S_IMODE(info.st_mode):o}"
        raise RefusedCodeError(f"{path} has mode {mode}: others may write it. Look at it, then: chmod go-w {path}")


def frozen_path(path: Sequence[str], folder: Path, roots: Sequence[Mapping[str, Any]]) -> list[str]:
    """`path` (as sys.path) with every folder of a frozen root replaced by its copy, so that the order stays.

    A folder that lay in a root and holds nothing frozen is dropped, but not one of an environment that lies in the
    root, as .venv does: what pip installed is not frozen. The packages that were frozen by name are found in
    the copy whatever else is on the path: where they are not, their folder is put first.
    """
    by_depth = sorted(roots, key=lambda root: len(root["source"]), reverse=True)
    found: list[str] = []
    for entry in path:
        real = os.path.realpath(entry or os.curdir)
        for root in by_depth:
            if _is_below(real, root["source"]) and not _is_environment(real, root["source"]):
                copy = folder / root["name"] / os.path.relpath(real, root["source"])
                found += [os.path.normpath(copy)] if copy.is_dir() else []
                break
        else:
            found.append(entry)
    found = list(dict.fromkeys(found))
    for root in roots:
        for package, place in root["packages"].items():
            copy_place = os.path.normpath(folder / root["name"] / place)
            if not _is_found_in(package, copy_place, found):
                found = [copy_place, *(entry for entry in found if entry != copy_place)]
    return found


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _is_environment(path: str, root: str) -> bool:
    """True for a folder of installed packages below `root`: of this Python, or named as such folders are."""
    below = Path(os.path.relpath(path, root)).parts
    prefixes = {os.path.realpath(each) for each in (sys.prefix, sys.exec_prefix, sys.base_prefix)}
    return bool({"site-packages", "dist-packages"} & set(below)) or any(
        _is_below(path, each) and _is_below(each, root) and each != root for each in prefixes
    )


def _is_found_in(package: str, place: str, path: list[str]) -> bool:
    spec = PathFinder.find_spec(package, path)
    if spec is None:
        return False
    locations = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    return any(str(each).startswith(place + os.sep) for each in locations)


def use_frozen_code(archive: Path) -> None:
    """Unpacks the archive if need be, and puts the code on sys.path, and on PYTHONPATH for processes of the run.

    Raises:
        RefusedCodeError: it is not what was submitted, or others may have changed it.
    """
    for each in (archive.parent.parent, archive.parent, archive):
        check_trusted(each)
    manifest, files = read_archive(archive)
    folder = ensure_unpacked(archive, files)
    check_trusted(folder)
    if os.path.realpath(sys.path[0]) == str(archive):  # under PYTHONSAFEPATH too: that is how an archive is run
        safe = getattr(sys.flags, "safe_path", False)
        sys.path[:1] = [] if safe else [str(Path.cwd())]  # as `python -m` has it
    sys.path[:] = frozen_path(sys.path, folder, manifest["roots"])
    ours = [entry for entry in sys.path if entry.startswith(f"{folder}{os.sep}")]
    given = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    outside = [each for each in frozen_path(given, folder, manifest["roots"]) if each not in ours]
    os.environ["PYTHONPATH"] = os.pathsep.join(each for each in [*ours, *outside] if os.pathsep not in each)


def main() -> None:
    """Runs `python -m hpc_trainer.worker` of the frozen code, with this process's arguments."""
    archive = Path(sys.argv[0]).resolve()
    # Stop signals wait until the worker's handlers stand (runtime/stop.py): unpacking may take seconds.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR2))
    try:
        if sys.argv[1:2] == ["--unpack"]:
            unpack(Path(sys.argv[2]), read_archive(archive)[1])
            return
        use_frozen_code(archive)
    except RefusedCodeError as error:
        advice = "Move it away and submit again: that writes it anew"
        sys.stderr.write(f"the frozen code is refused: {error}. {advice}.\n")
        sys.exit(_CONFIG_ERROR)
    runpy.run_module("hpc_trainer.worker", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
