"""Frozen code on a node's own disk: unpacked once for all ranks there, checked before use, removed when old.

A rank that imports 600 files one by one from the shared folder makes thousands of lookups there, and 500 ranks make
them at once. Therefore a rank reads only the archive from the shared folder (docs/decisions/0055). If no disk of the
node is suitable, the code is unpacked beside the archive. Each archive has this file beside `frozen_worker.py`, so it
imports only the standard library.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import py_compile
import re
import shutil
import stat
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.machinery import SourcelessFileLoader, all_suffixes
from pathlib import Path

LINK = "link"
Files = Mapping[str, tuple[str, bytes]]
"""(mode, content) of each frozen file by name; the content of a link is its target."""

# 300 files of 8 kB take 0.1 s on a local disk, some seconds on a busy parallel file system.
_UNPACK_WAIT_S = 20.0
# After this time the rank that compiles the frozen code counts as killed: 600 modules take 0.6 s of a core.
_COMPILES_S = 300.0
# A copy that no run has used for this long is removed; a half-unpacked copy of a killed rank is removed sooner.
_UNUSED_S = 7 * 86400.0
_HALF_S = 3600.0
# A process that removes an old copy holds its lock for the time of a rename.
_HOLD_WAIT_S = 5.0
# Kinds of a node's own file systems. Any other kind may be a network's, whose locks and renames are not reliable.
_LOCAL_KINDS = frozenset(
    ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "bcachefs", "tmpfs", "ramfs", "rootfs", "overlay",
     "aufs", "fuse.fuse-overlayfs")
)  # fmt: skip
_MODULES = tuple(all_suffixes())
_MODULE_IN_C = re.compile(r"\.so(\.\d+)*$")


class RefusedCodeError(Exception):
    """Error of an archive that differs from the submitted one, or that others may have changed."""


def place_code(archive: Path, files: Files) -> tuple[Path, bool]:
    """Return the folder with the unpacked files, and True if it is on this node's own disk.

    Raises:
        RefusedCodeError: the files do not stay as they were submitted.
    """
    reasons = []
    for place in node_places():
        copy = _copy_in(place, archive.stem, files)
        if isinstance(copy, Path):
            return copy, True
        reasons.append(f"{place}: {copy}")
    if os.environ.get("SLURM_LOCALID", "0") == "0":
        sys.stderr.write(
            f"no folder of this node can hold the frozen code ({'; '.join(reasons)}). "
            f"It is imported from the shared folder: {archive.with_suffix('')}.\n"
        )
    return ensure_unpacked(archive.with_suffix(""), files, is_local=False), False


def node_places() -> list[str]:
    """Return the folders to try for a copy of the code on this node's own disk, the best first.

    `tempfile.gettempdir` is not used: it creates a file to try each folder, and falls back to the current folder.
    """
    named = (os.environ.get("SLURM_TMPDIR", ""), os.environ.get("TMPDIR", ""), "/tmp", "/var/tmp")  # noqa: S108
    return list(dict.fromkeys(os.path.normpath(place) for place in named if os.path.isabs(place)))  # noqa: PTH117


def _private_folder(place: str, files: Files) -> Path:
    """Return the user's own folder in `place`, and create it if it does not exist.

    Raises:
        OSError: others could replace the folder or write it, the place is not on a local disk, or the disk is full.
    """
    real = Path(place).resolve(strict=True)
    for parent in (real, *real.parents):
        _check_parent(parent)
    kind = file_system_of(str(real))
    if kind is not None and kind not in _LOCAL_KINDS:
        raise OSError(f"its file system is {kind}, and not known to be this node's own")
    room, num_bytes = os.statvfs(real), sum(len(content) for _, content in files.values())
    # Files take whole blocks, and bytecode twice as much room as its source.
    if room.f_bavail * room.f_frsize < 3 * num_bytes + 8192 * len(files):
        raise OSError("it is full")
    if room.f_files and room.f_favail < 3 * len(files):
        raise OSError("it has no room for so many files")
    if room.f_flag & os.ST_NOEXEC and any(
        mode == "755" or _MODULE_IN_C.search(name) for name, (mode, _) in files.items()
    ):
        raise OSError("it is mounted noexec, and the frozen code has programs or extension modules")
    folder = real / f"hpc_trainer-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise PermissionError(f"{folder} must be a folder of yours with mode 700")
    return folder


def _check_parent(folder: Path) -> None:
    """Raise PermissionError if another user may rename entries of `folder`."""
    info = folder.stat()
    # In a user namespace every unmapped user, including root, is the overflow user.
    if info.st_uid not in (os.getuid(), 0, _overflow_user()):
        raise PermissionError(f"{folder} belongs to user {info.st_uid}")
    if info.st_mode & 0o022 and not info.st_mode & stat.S_ISVTX:
        raise PermissionError(f"{folder} has mode {stat.S_IMODE(info.st_mode):o}: others may rename folders in it")


def _overflow_user() -> int:
    try:
        is_mapped = Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]
        return 0 if is_mapped else int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return 0


def file_system_of(folder: str) -> str | None:
    """Return the kind of a folder's file system, as ext4; None if the system does not say.

    Args:
        folder: path without symbolic links.
    """
    longest: tuple[int, str | None] = (-1, None)
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    for line in lines:
        place, _, rest = line.partition(" - ")
        mount = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), place.split(" ")[4])
        if folder == mount or folder.startswith(mount.rstrip("/") + "/"):
            longest = max(longest, (len(mount), rest.split(" ")[0]), key=lambda pair: pair[0])
            if longest[0] == len(mount):  # the later of two mounts at one place hides the earlier one
                longest = len(mount), rest.split(" ")[0]
    return longest[1]


def _copy_in(place: str, name: str, files: Files) -> Path | str:
    """Return the checked copy, held against removal while this process lives; else the reason for none."""
    try:
        folder = _private_folder(place, files) / name
        for _ in range(3):
            ensure_unpacked(folder, files, is_local=True)
            if hold(folder):
                return folder
    except (OSError, RefusedCodeError, ValueError) as error:
        return str(error)
    return f"{folder} was removed by another process"


def hold(folder: Path) -> bool:
    """Mark a copy as used now, and as in use until this process and the processes that it forks have ended.

    The mark is a shared flock of the folder; the kernel releases it however a process ends. systemd-tmpfiles spares
    everything below such a folder (tmpfiles.d(5)).

    Returns:
        False if the copy was removed meanwhile.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    deadline = time.monotonic() + _HOLD_WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            break
        except BlockingIOError:  # another process is removing it
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise
            time.sleep(0.01)
    with contextlib.suppress(OSError):
        if os.path.samestat(os.fstat(descriptor), folder.lstat()):
            os.utime(descriptor)
            return True
    os.close(descriptor)
    return False


def remove_old(folder: Path) -> None:
    """Remove copies that no process holds and none has used for seven days from the user's folder on this node."""
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            limit = time.time() - (_HALF_S if path.name.startswith(".") else _UNUSED_S)
            if path.lstat().st_mtime > limit:
                continue
            if path.is_dir() and not path.is_symlink():
                _remove_unused(path, limit)
            else:
                path.unlink()


def _remove_unused(path: Path, limit: float) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held by nobody
        if os.fstat(descriptor).st_mtime > limit:  # it was used since it was looked at
            return
        # Rename first: a rank that starts now finds no copy, or a complete one.
        away = path.with_name(f".{uuid.uuid4().hex}.tmp")
        path.rename(away)
        shutil.rmtree(away, ignore_errors=True)
    finally:
        os.close(descriptor)


def find_change(folder: Path, files: Files) -> str | None:
    """Return the first file of the unpacked `folder` that differs from `files`; None if no file differs.

    Files that a run has written beside its code are no change, unless Python could import them.
    """
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
        folders[:] = [
            folder_name for folder_name in folders if folder_name != "__pycache__"
        ]  # Python writes it when it imports
        for file_name in names:
            if file_name.endswith(_MODULES) and f"{parent}/{file_name}"[start:] not in files:
                return f"{parent}/{file_name}"[start:]
    return None


def unpack(folder: Path, files: Files) -> None:
    """Write the files into `folder`, a name that no other process uses.

    Nothing is flushed to the disk: the archive has been flushed. A file that exists already was made by this call, and
    NFS lost the answer; therefore no file is created with O_EXCL.
    """
    below = {name[:end] for name in files for end in range(len(name)) if name[end] == "/"}
    for subfolder in (folder, *(folder / name for name in sorted(below))):
        subfolder.mkdir(mode=0o755, exist_ok=True)  # a default ACL may give the group more than the umask allows
    for name, (mode, content) in files.items():
        path = f"{folder}/{name}"
        if mode == LINK:
            with contextlib.suppress(FileExistsError):
                Path(path).symlink_to(os.fsdecode(content))
            continue
        # Read-only: an editor that follows a traceback to this copy warns before it changes the code of waiting runs.
        bits = 0o555 if mode == "755" else 0o444
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, bits), "wb") as file:
            file.write(content)


def is_compiled(folder: Path, files: Files, *, is_local: bool) -> bool:
    """Return True if all modules of the copy have bytecode of this Python; one rank writes the missing bytecode.

    Python itself then never writes bytecode there. 3.10, 3.11 and early releases of 3.12 and 3.13 keep bytecode that a
    full disk has truncated (CPython issue 126606), and every later import of it fails. On a local disk the other ranks
    wait, because each would otherwise compile all its imports. On a shared folder they do not wait.
    """
    claim = folder.with_name(f"{folder.name}.compiling")
    missing = _without_bytecode(folder, files)
    if not missing:
        return True
    if not is_local:
        with contextlib.suppress(OSError):  # the claim of a killed rank; two ranks that compile do no harm
            if time.time() - claim.stat().st_mtime > _COMPILES_S:
                claim.unlink()
    try:
        give_back = take(claim, is_local=is_local)
        if give_back is None:
            return is_local and _waits_for(claim) and not _without_bytecode(folder, files)
        try:
            for source, target in _without_bytecode(folder, files).items():
                _compile(source, target)
        finally:
            give_back()
    except (OSError, EOFError, ValueError) as error:
        sys.stderr.write(f"no bytecode of the frozen code is kept: {error}.\n")
        return False
    return True


def _waits_for(claim: Path) -> bool:
    """Wait until a claim on a local disk is free; return False if it is not free in time."""
    deadline = time.monotonic() + _UNPACK_WAIT_S
    while (give_back := take(claim, is_local=True)) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    if give_back is not None:
        give_back()
    return give_back is not None


def _without_bytecode(folder: Path, files: Files) -> dict[str, str]:
    """Return the path that the bytecode must have, for each module without bytecode."""
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
    """Write the bytecode of one file, and move it into place only if it is complete, which `py_compile` does not check.

    Python uses the bytecode unchecked (PEP 552), because the sources are compared. A file that is not valid Python gets
    no bytecode; its import raises the error.

    Raises:
        OSError, EOFError, ValueError: the disk has no room for the bytecode.
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


def ensure_unpacked(folder: Path, files: Files, *, is_local: bool) -> Path:
    """Return `folder` with exactly these files. Every rank calls this function; one unpacks, the others wait.

    The folder appears complete, by a rename. A folder that was changed is set aside and written again.

    Raises:
        RefusedCodeError: the files do not stay as they were submitted.
        OSError: the files cannot be written.
    """
    if find_change(folder, files) is None:
        return folder
    with _turn(folder, is_local=is_local):
        change = find_change(folder, files)
        for _ in range(3):  # another rank may set aside and unpack in the same moment
            if change is None:
                return folder
            _unpack_anew(folder, files, change)
            if is_local:
                remove_old(folder.parent)
            change = find_change(folder, files)
    raise RefusedCodeError(
        f"{folder / str(change)} is not what was submitted, and was changed again after it was unpacked anew"
    )


def _unpack_anew(folder: Path, files: Files, change: str) -> None:
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.tmp")
    if folder.exists():
        sys.stderr.write(f"{folder / change} is not what was submitted; unpacking {folder.name} anew.\n")
        with contextlib.suppress(FileNotFoundError):
            folder.rename(folder.with_name(f"{folder.name}.changed-{uuid.uuid4().hex[:8]}"))
    try:
        unpack(temporary, files)
        with contextlib.suppress(OSError):  # another rank was faster, and the folder exists by now
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _turn(folder: Path, *, is_local: bool) -> Iterator[None]:
    """Wait until no rank unpacks `folder` or a new folder has its name; then make other ranks wait for this one.

    This only saves work: the rank that unpacks may have been killed or stopped, and two that unpack do no harm.
    """
    claim, first = folder.with_name(f"{folder.name}.unpacking"), _inode(folder)
    deadline = time.monotonic() + _UNPACK_WAIT_S
    give_back = take(claim, is_local=is_local)
    while give_back is None and _inode(folder) in (None, first):
        if time.monotonic() > deadline:
            give_back = partial(claim.unlink, missing_ok=True)
            break
        time.sleep(0.02 if is_local else 0.05)
        give_back = take(claim, is_local=is_local)
    try:
        yield
    finally:
        if give_back is not None:
            give_back()


def _inode(folder: Path) -> int | None:
    try:
        return folder.lstat().st_ino
    except FileNotFoundError:
        return None


def take(claim: Path, *, is_local: bool) -> Callable[[], None] | None:
    """Take a claim and return a function that gives it back; None if another process has the claim.

    On a local disk the claim is a flock, which ends with its process. On a shared folder locks may not work, or hang,
    so the claim is the existence of the file.
    """
    if is_local:
        descriptor = os.open(claim, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return partial(os.close, descriptor)
    try:
        os.close(os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except FileExistsError:
        return None
    return partial(claim.unlink, missing_ok=True)
