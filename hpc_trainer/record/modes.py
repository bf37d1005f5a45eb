"""Modes of new files and folders: those of `set_umask`, even if a folder's default ACL would give more.

Project spaces often have a default ACL that lets the group write (setfacl -d). The kernel then ignores the umask, so
the group could change every new file, and hpc-trainer would refuse its own files. Therefore files get their mode
explicitly. The default ACL of a new folder is narrowed by the umask, so that files of Slurm's daemon and submitit get
the right mode too.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
from importlib.machinery import SourceFileLoader
from pathlib import Path

_DEFAULT_ACL = "system.posix_acl_default"
# linux/posix_acl_xattr.h: a version, then entries of tag, permissions, id.
_HEAD, _ENTRY = struct.Struct("<I"), struct.Struct("<HHI")
_OWNER, _OTHER = 0x01, 0x20

_umask: int | None = None


def set_umask(group_readable: bool) -> None:
    """Set the umask of the process: new folders 0700 and files 0600, or 0750 and 0640 if the group may read."""
    global _umask  # the system returns it only when another one is set, which would affect other threads
    _umask = 0o027 if group_readable else 0o077
    os.umask(_umask)
    if SourceFileLoader.set_data is not _keep_bytecode:
        SourceFileLoader.set_data = _keep_bytecode  # type: ignore[method-assign, assignment]


_set_data = SourceFileLoader.set_data


def _keep_bytecode(loader: SourceFileLoader, path: str, data: bytes, *, _mode: int = 0o666) -> None:
    """Write a module's bytecode as Python does, readable for every user who can read the module.

    Several users may share the code's checkout or environment. With this process's umask, `__pycache__` would be 0700.

    Args:
        loader: the loader of the module.
        path: the file for the bytecode.
        data: the bytecode.
        _mode: mode of the file with the code, plus the permission to write.
    """
    folder = Path(path).parent
    is_new = not folder.is_dir()
    _set_data(loader, path, data, _mode=_mode)
    with contextlib.suppress(OSError):  # a read-only file system has no bytecode, or the folder is another user's
        if is_new and folder.name == "__pycache__":
            mode = folder.stat().st_mode
            folder.chmod(stat.S_IMODE(mode) | (folder.parent.stat().st_mode & 0o055))
        os.chmod(path, 0o600 | (_mode & 0o044))  # noqa: PTH101


def set_file_mode(descriptor: int) -> None:
    """Give a new file the mode that follows from the umask."""
    if _umask is not None and stat.S_IMODE(os.fstat(descriptor).st_mode) != 0o666 & ~_umask:
        os.fchmod(descriptor, 0o666 & ~_umask)


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents; narrow the default ACL of an existing folder that is the user's own.

    Raises:
        OSError: the file system refused.
    """
    if _umask is None:
        folder.mkdir(parents=True, exist_ok=True)
        return
    try:
        try:
            folder.mkdir(mode=0o777 & ~_umask)
        except FileNotFoundError:
            make_folder(folder.parent)
            folder.mkdir(mode=0o777 & ~_umask)  # only once: a mount may be gone and its name stay
    except FileExistsError:
        if not folder.is_dir():
            raise
        narrow_default_acl(folder)
    else:
        mode = stat.S_IMODE(folder.stat().st_mode)
        if mode & _umask:
            folder.chmod(mode & ~_umask)
        _narrow(folder)


def narrow_default_acl(folder: Path) -> None:
    """Narrow a folder's default ACL by the umask; leave another user's folder alone."""
    info = folder.lstat()
    if info.st_uid == os.getuid() and stat.S_ISDIR(info.st_mode):
        _narrow(folder)


def _narrow(folder: Path) -> None:
    if _umask is None or not hasattr(os, "getxattr"):
        return
    try:
        acl = os.getxattr(folder, _DEFAULT_ACL)
    except OSError:  # there is no default ACL, or the file system has none
        return
    body = acl[_HEAD.size :]
    narrowed = b"".join(_ENTRY.pack(tag, allowed & ~_taken(tag), who) for tag, allowed, who in _ENTRY.iter_unpack(body))
    if narrowed != body:
        os.setxattr(folder, _DEFAULT_ACL, acl[: _HEAD.size] + narrowed)


def has_default_acl(folder: Path) -> bool:
    """Return True if new files in `folder` get their mode from a default ACL."""
    try:
        return hasattr(os, "getxattr") and bool(os.getxattr(folder, _DEFAULT_ACL))
    except OSError:
        return False


def _taken(tag: int) -> int:
    """Return the permissions that the umask takes from an ACL entry: all but owner and other count as the group's."""
    assert _umask is not None
    return 0 if tag == _OWNER else _umask & 7 if tag == _OTHER else _umask >> 3 & 7
