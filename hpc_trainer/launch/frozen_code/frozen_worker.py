"""Starts the worker from frozen code: `python runs/<sweep>/code/<digest>.zip ...` runs this file, its `__main__.py`.

It unpacks the archive beside itself, unless another rank has, and puts that on the path. It imports the standard
library alone, and `import_path.py`, which the archive holds too: the hpc_trainer that is installed may be a checkout
that somebody is editing, and must not be imported before the path is set.

    python ARCHIVE --unpack FOLDER     only unpacks, to look at the code

Whatever else hpc_trainer starts begins here too (runtime/start.py has the command line): `start` runs a module as
`python -m` does, but for the current folder. There anybody of a team may have put a numpy.py.
"""

from __future__ import annotations

# ruff: noqa: E402 -- the path is set before anything else is imported
import os
import sys


def _comes_last(entry: str) -> bool:
    """As START of runtime/start.py has it: the current folder, and folders of no environment that others may write."""
    if not entry or not os.path.isdir(entry) or os.path.samefile(entry, "."):  # noqa: PTH112, PTH121
        return not entry or os.path.isdir(entry)  # noqa: PTH112
    others_may_write = os.stat(entry).st_mode & 0o022 > 0  # noqa: PTH116
    return others_may_write and "-packages" not in entry and not entry.startswith(sys.base_prefix)


def _leave_current_folder() -> None:
    """Starts this process anew with -P, where Python has it (3.11), so that the current folder is not on its path.

    The children of multiprocessing get the option handed on; the variable PYTHONSAFEPATH would reach every program
    that the person's code starts.
    """
    if sys.version_info >= (3, 11) and not sys.flags.safe_path and sys.executable:
        os.execv(sys.executable, [sys.executable, "-P", *sys.orig_argv[1:]])  # noqa: S606


if __name__ == "__main__":
    _leave_current_folder()
_given_path = sys.path[:]
if __name__ == "__main__":
    sys.path.sort(key=_comes_last)

import contextlib
import hashlib
import importlib.util
import json
import py_compile
import runpy
import shutil
import signal
import stat
import time
import uuid
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from importlib.machinery import SourcelessFileLoader
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the file beside this one in the archive, which is the first on the path
    from hpc_trainer_import_path import frozen_path, safe_path  # type: ignore[import-not-found]
else:
    from hpc_trainer.launch.frozen_code.import_path import frozen_path, safe_path

MAIN, IMPORT_PATH = "__main__.py", "hpc_trainer_import_path.py"
MANIFEST = "manifest.json"
LINK = "link"
_CONFIG_ERROR = 78  # never retried (hpc_trainer/errors.py)
# 300 files of 8 kB take 0.1 s on a local disk, some seconds on a busy parallel file system.
_UNPACK_WAIT_S = 20.0
# After it whoever compiles the frozen code was killed: 600 modules take 0.6 s of a core.
_COMPILES_S = 300.0


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
            starters = {MAIN: manifest["main"], IMPORT_PATH: manifest.get("import_path")}  # 0.1.0 had one file
            for name, sha256 in starters.items():
                if sha256 is not None and hashlib.sha256(file.read(name)).hexdigest() != sha256:
                    raise RefusedCodeError(f"{archive} was changed: {name}")
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
    """Write the files into `folder`, a name that nobody else uses. Not flushed to the disk: the archive has been.

    What is there already was made by this call, and the answer was lost (NFS): so nothing is made by O_EXCL.
    """
    below = {name[:end] for name in files for end in range(len(name)) if name[end] == "/"}
    for each in (folder, *(folder / name for name in sorted(below))):
        each.mkdir(mode=0o755, exist_ok=True)  # a default ACL may give the group more than the umask lets
    for name, (mode, content) in files.items():
        path = f"{folder}/{name}"
        if mode == LINK:
            with contextlib.suppress(FileExistsError):
                Path(path).symlink_to(os.fsdecode(content))
            continue
        # Read-only: an editor that follows a traceback to here says so before it changes what waiting runs import.
        bits = 0o555 if mode == "755" else 0o444
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, bits), "wb") as file:
            file.write(content)


def is_compiled(archive: Path, files: Mapping[str, tuple[str, bytes]]) -> bool:
    """True if all modules of the unpacked folder have bytecode of this Python. One rank makes what is missing.

    Then Python never writes any there: 3.10, 3.11 and early releases of 3.12 and 3.13 put in place what a full disk has
    cut (CPython issue 126606), and every later import of it fails. While one rank compiles, the others do not wait.
    """
    folder, claim = archive.with_suffix(""), archive.with_suffix(".compiling")
    missing = _without_bytecode(folder, files)
    if not missing:
        return True
    with contextlib.suppress(OSError):  # of a rank that was killed: two that compile do no harm
        if time.time() - claim.stat().st_mtime > _COMPILES_S:
            claim.unlink()
    if not _take(claim):
        return False
    try:
        for source, target in missing.items():
            _compile(source, target)
    except (OSError, EOFError, ValueError) as error:
        sys.stderr.write(f"no bytecode of the frozen code is kept: {error}.\n")
        return False
    finally:
        claim.unlink(missing_ok=True)
    return True


def _without_bytecode(folder: Path, files: Mapping[str, tuple[str, bytes]]) -> dict[str, str]:
    """Module -> where its bytecode is to be."""
    there: dict[str, set[str]] = {}
    missing = {}
    for name, (mode, _) in files.items():
        if mode == LINK or not name.endswith(".py"):
            continue
        target = importlib.util.cache_from_source(f"{folder}/{name}")
        parent, _, own = target.rpartition("/")
        if parent not in there:
            try:
                there[parent] = {*os.listdir(parent)}  # noqa: PTH208
            except OSError:
                there[parent] = set()
        if own not in there[parent]:
            missing[f"{folder}/{name}"] = target
    return missing


def _compile(source: str, target: str) -> None:
    """Puts the bytecode of one file in place when it is whole on the disk: `py_compile` does not look.

    It is taken as it is (PEP 552, unchecked): it is the sources that are compared. Of what is no Python there is none:
    whoever imports it is told.

    Raises:
        OSError, EOFError, ValueError: there was no room for it.
    """
    temporary = f"{target}.{uuid.uuid4().hex}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            py_compile.compile(
                source, temporary, doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
            )
        SourcelessFileLoader("it", temporary).get_code("it")
        os.replace(temporary, target)  # noqa: PTH105
    except py_compile.PyCompileError:
        return
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)  # noqa: PTH108


def _keeps_bytecode() -> bool:
    """False where the person wants none, or has it elsewhere."""
    return not sys.dont_write_bytecode and sys.pycache_prefix is None


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
    if _keeps_bytecode() and not is_compiled(archive, files):
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    # The current folder first: what was frozen of it takes its place, and comes before what is installed.
    path = ["", *(each for each in _given_path if os.path.realpath(each) != str(archive))]
    sys.path[:] = safe_path(frozen_path(path, folder, manifest["roots"]))
    ours = [entry for entry in sys.path if entry.startswith(f"{folder}{os.sep}")]
    given = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    outside = [each for each in frozen_path(given, folder, manifest["roots"]) if each not in ours]
    os.environ["PYTHONPATH"] = os.pathsep.join(each for each in [*ours, *outside] if os.pathsep not in each)
    # For a program that is started by the path of its file (worker/program_start.py): where its copy is.
    copies = {root["source"]: str(folder / root["name"]) for root in manifest["roots"]}
    os.environ["HPC_TRAINER_FROZEN_CODE"] = json.dumps(copies)


def start(path: Sequence[str]) -> None:
    """Runs `python -c START MODULE ARGUMENT...` (runtime/start.py) as `python -m MODULE ARGUMENT...`.

    Args:
        path: sys.path as Python made it.
    """
    module = sys.argv.pop(1)
    if module == "hpc_trainer.worker":
        _hold_stop_signals()
    sys.path[:] = safe_path(["", *path])
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _hold_stop_signals() -> None:
    """Until the worker's handlers stand (runtime/stop.py): unpacking may take seconds."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR2))


def main() -> None:
    """Runs `python -m hpc_trainer.worker` of the frozen code, with this process's arguments."""
    archive = Path(sys.argv[0]).resolve()
    _hold_stop_signals()
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
