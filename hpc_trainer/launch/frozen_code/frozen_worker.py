"""Start of the worker from frozen code: `python runs/<sweep>/code/<digest>.zip ...` runs this file as `__main__.py`.

It unpacks the archive on this node's disk, unless another rank has done so, and puts the copy on the path. It imports
only the standard library, and `import_path.py` and `unpacking.py`, which the archive contains too. The installed
hpc_trainer may be a checkout that a user is editing, and must not be imported before the path is set.

    python ARCHIVE --unpack FOLDER     only unpacks, to look at the code

All other processes of hpc_trainer start here too (runtime/start.py has the command line). `start` runs a module as
`python -m` does, except that the current folder comes last: anybody of a team may have put a numpy.py there.
"""

from __future__ import annotations

# ruff: noqa: E402 -- the path is set before anything else is imported
import os
import sys


def _comes_last(entry: str) -> bool:
    """Return True for the current folder, and for folders outside environments that others may write.

    START of runtime/start.py has the same rule.
    """
    if not entry or not os.path.isdir(entry) or os.path.samefile(entry, "."):  # noqa: PTH112, PTH121
        return not entry or os.path.isdir(entry)  # noqa: PTH112
    others_may_write = os.stat(entry).st_mode & 0o022 > 0  # noqa: PTH116
    return others_may_write and "-packages" not in entry and not entry.startswith(sys.base_prefix)


def _leave_current_folder() -> None:
    """Restart this process with -P if Python has it (3.11), so that the current folder is not on its path.

    Children of multiprocessing inherit the option; the variable PYTHONSAFEPATH would reach every program that the
    user's code starts.
    """
    if sys.version_info >= (3, 11) and not sys.flags.safe_path and sys.executable:
        os.execv(sys.executable, [sys.executable, "-P", *sys.orig_argv[1:]])  # noqa: S606


if __name__ == "__main__":
    _leave_current_folder()
_given_path = sys.path[:]
if __name__ == "__main__":
    sys.path.sort(key=_comes_last)

import errno
import hashlib
import io
import json
import runpy
import signal
import stat
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the files beside this one in the archive, which comes first on the path
    from hpc_trainer_import_path import frozen_path, safe_path  # type: ignore[import-not-found]
    from hpc_trainer_unpacking import (  # type: ignore[import-not-found]
        RefusedCodeError,
        is_compiled,
        place_code,
        unpack,
    )
else:
    from hpc_trainer.launch.frozen_code.import_path import frozen_path, safe_path
    from hpc_trainer.launch.frozen_code.unpacking import RefusedCodeError, is_compiled, place_code, unpack

MAIN, IMPORT_PATH, UNPACKING = "__main__.py", "hpc_trainer_import_path.py", "hpc_trainer_unpacking.py"
MANIFEST = "manifest.json"
_CONFIG_ERROR = 78  # never retried (hpc_trainer/errors.py)
# An NFS client may treat a new name as missing while it caches the folder's attributes: 60 s (nfs(5)).
_LATE_S = 65.0


def manifest_digest(manifest: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a manifest: names, modes and contents of all files, and their sources."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def member(number: int, name: str) -> str:
    """Return the archive's name for the `number`-th file `name`, so that other unzip programs see no unusual names."""
    return f"code/{name}" if name.isascii() and name.isprintable() and "\\" not in name else f"odd-names/{number}"


def read_archive(archive: Path) -> tuple[dict[str, Any], dict[str, tuple[str, bytes]]]:
    """Return the manifest, and (mode, content) of each file by name.

    Raises:
        RefusedCodeError: the content does not match the manifest, or the manifest does not match the archive's name.
    """
    files: dict[str, tuple[str, bytes]] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(_read_whole(archive))) as file:
            manifest = json.loads(file.read(MANIFEST))
            if not manifest_digest(manifest).startswith(archive.stem):
                raise RefusedCodeError(f"{archive} was changed: its digest is {manifest_digest(manifest)[:12]}")
            for number, (name, (mode, sha256)) in enumerate(manifest["files"].items()):
                content = file.read(member(number, name))
                if hashlib.sha256(content).hexdigest() != sha256:
                    raise RefusedCodeError(f"{archive} was changed: {name}")
                files[name] = mode, content
            # Archives of version 0.1.0 have one starter file, those of the first 0.2.0 two.
            others = {IMPORT_PATH: manifest.get("import_path"), UNPACKING: manifest.get("unpacking")}
            starters = {MAIN: manifest["main"], **others}
            for name, sha256 in starters.items():
                if sha256 is not None and hashlib.sha256(file.read(name)).hexdigest() != sha256:
                    raise RefusedCodeError(f"{archive} was changed: {name}")
    except RefusedCodeError:
        raise
    except Exception as error:  # for damaged headers zipfile raises nine kinds, such as RuntimeError and EOFError
        raise RefusedCodeError(f"{archive} cannot be read: {error}") from error
    return manifest, files


def _read_whole(archive: Path) -> bytes:
    """Read the archive with one open; a rank reads nothing else from the shared folder.

    A file that was replaced on the server gives ESTALE to clients that have it open, and a client may treat a new name
    as missing for a while. Listing the folder makes the client ask the server (nfs(5), "Directory entry caching").
    """
    deadline = time.monotonic() + _LATE_S
    while time.monotonic() < deadline:
        try:
            return archive.read_bytes()
        except OSError as error:
            if error.errno not in (errno.ESTALE, errno.ENOENT):
                raise
        if not _is_listed(archive):
            break
        time.sleep(0.2)
    return archive.read_bytes()


def _is_listed(file: Path) -> bool:
    """Return True if a fresh listing of the folder contains the file, or the folder's handle is stale."""
    try:
        return file.name in os.listdir(file.parent)  # noqa: PTH208
    except OSError as error:
        return error.errno == errno.ESTALE


def _keeps_bytecode() -> bool:
    """Return False if the user wants no bytecode, or keeps it in another folder."""
    return not sys.dont_write_bytecode and sys.pycache_prefix is None


def check_trusted(path: Path) -> None:
    """Refuse a file that another user owns or others may write, as hpc_trainer.record.files does.

    Raises:
        RefusedCodeError: the owner or mode is wrong, or the path is a symbolic link.
    """
    info = path.lstat()
    if stat.S_ISLNK(info.st_mode):
        raise RefusedCodeError(f"{path} is a symbolic link; it must be the file itself")
    if info.st_uid not in (os.getuid(), 0):
        raise RefusedCodeError(f"{path} belongs to user {info.st_uid}, and only yours (or root's) is run")
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = f"{stat.S_IMODE(info.st_mode):o}"
        raise RefusedCodeError(f"{path} has mode {mode}: others may write it. Look at it, then: chmod go-w {path}")


def use_frozen_code(archive: Path) -> None:
    """Unpack the archive on this node if need be, and put the code on sys.path and PYTHONPATH.

    Raises:
        RefusedCodeError: the archive differs from the submitted one, or others may have changed it.
    """
    for place in (archive.parent.parent, archive.parent, archive):
        check_trusted(place)
    manifest, files = read_archive(archive)
    folder, is_local = place_code(archive, files)
    check_trusted(folder)
    if _keeps_bytecode() and not is_compiled(folder, files, is_local=is_local):
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    # The current folder first: its frozen copy takes its place, before installed packages.
    path = ["", *(entry for entry in _given_path if os.path.realpath(entry) != str(archive))]
    sys.path[:] = safe_path(frozen_path(path, folder, manifest["roots"]))
    ours = [entry for entry in sys.path if entry.startswith(f"{folder}{os.sep}")]
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    outside = [entry for entry in frozen_path(given, folder, manifest["roots"]) if entry not in ours]
    os.environ["PYTHONPATH"] = os.pathsep.join(entry for entry in [*ours, *outside] if os.pathsep not in entry)
    # Folders of the copies, for a program that is started by the path of its file (worker/program_start.py).
    copies = {root["source"]: str(folder / root["name"]) for root in manifest["roots"]}
    os.environ["HPC_TRAINER_FROZEN_CODE"] = json.dumps(copies)


def start(path: Sequence[str]) -> None:
    """Run `python -c START MODULE ARGUMENT...` (runtime/start.py) as `python -m MODULE ARGUMENT...`.

    Args:
        path: sys.path as Python made it.
    """
    module = sys.argv.pop(1)
    if module == "hpc_trainer.worker":
        _hold_stop_signals()
    sys.path[:] = safe_path(["", *path])
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _hold_stop_signals() -> None:
    """Block stop signals until the worker has set its handlers (runtime/stop.py): unpacking may take seconds."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR2))


def main() -> None:
    """Run `python -m hpc_trainer.worker` of the frozen code, with this process's arguments."""
    archive = Path(sys.argv[0]).resolve()
    _hold_stop_signals()
    try:
        if sys.argv[1:2] == ["--unpack"]:
            unpack(Path(sys.argv[2]), read_archive(archive)[1])
            return
        use_frozen_code(archive)
    except RefusedCodeError as error:
        advice = "Move it away and submit again: that writes a new one"
        sys.stderr.write(f"the frozen code is refused: {error}. {advice}.\n")
        sys.exit(_CONFIG_ERROR)
    runpy.run_module("hpc_trainer.worker", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
