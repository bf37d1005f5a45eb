"""Modes of what is written: those of `set_umask`, also where a folder's default ACL would give more.

Project spaces often have a default ACL that lets the group write (setfacl -d). The kernel then leaves the umask out of
account, and every file made there could be changed by the group: we would refuse our own files. So files get their mode
from us, and a folder that we make has its default ACL narrowed by the umask: what others make in it, as Slurm's daemon
and submitit do, comes out right too.
"""

from __future__ import annotations

import contextlib
import os
import pwd
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
    """New folders 0700 and files 0600, or 0750 and 0640 if the group may read."""
    global _umask  # the system tells it only to who sets another one, which would reach other threads
    _umask = 0o027 if group_readable else 0o077
    os.umask(_umask)
    if SourceFileLoader.set_data is not _keep_bytecode:
        SourceFileLoader.set_data = _keep_bytecode  # type: ignore[method-assign, assignment]


_set_data = SourceFileLoader.set_data


def _keep_bytecode(loader: SourceFileLoader, path: str, data: bytes, *, _mode: int = 0o666) -> None:
    """Write a module's bytecode as Python does, readable for whoever can read the module.

    The code may be a checkout or an environment that several users share. With our umask `__pycache__` would be 0700.

    Args:
        loader: the loader of the module.
        path: the file for the bytecode.
        data: the bytecode.
        _mode: of the file with the code, and the right to write it.
    """
    folder = Path(path).parent
    is_new = not folder.is_dir()
    _set_data(loader, path, data, _mode=_mode)
    with contextlib.suppress(OSError):  # a read-only file system has none, or the folder is another user's
        if is_new and folder.name == "__pycache__":
            mode = folder.stat().st_mode
            folder.chmod(stat.S_IMODE(mode) | (folder.parent.stat().st_mode & 0o055))
        os.chmod(path, 0o600 | (_mode & 0o044))  # noqa: PTH101


def set_file_mode(descriptor: int) -> None:
    """Gives a file that was just made the mode that it has by the umask."""
    if _umask is not None and stat.S_IMODE(os.fstat(descriptor).st_mode) != 0o666 & ~_umask:
        os.fchmod(descriptor, 0o666 & ~_umask)


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents; narrow the default ACL of a folder that is already ours.

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
            folder.mkdir(mode=0o777 & ~_umask)  # once: what is mounted there may be gone, and the name stay
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
    """Takes from a folder's default ACL what the umask takes from modes. A folder of somebody else is left alone."""
    info = folder.lstat()
    if info.st_uid == os.getuid() and stat.S_ISDIR(info.st_mode):
        _narrow(folder)


def _narrow(folder: Path) -> None:
    if _umask is None or not hasattr(os, "getxattr"):
        return
    try:
        acl = os.getxattr(folder, _DEFAULT_ACL)
    except OSError:  # none, or a file system without
        return
    body = acl[_HEAD.size :]
    narrowed = b"".join(_ENTRY.pack(tag, allowed & ~_taken(tag), who) for tag, allowed, who in _ENTRY.iter_unpack(body))
    if narrowed != body:
        os.setxattr(folder, _DEFAULT_ACL, acl[: _HEAD.size] + narrowed)


def has_default_acl(folder: Path) -> bool:
    """True if what is made in `folder` gets its mode from a default ACL."""
    try:
        return hasattr(os, "getxattr") and bool(os.getxattr(folder, _DEFAULT_ACL))
    except OSError:
        return False


def _taken(tag: int) -> int:
    """Permissions that the umask takes from an entry: named users and groups, and the mask, are the group's."""
    assert _umask is not None
    return 0 if tag == _OWNER else _umask & 7 if tag == _OTHER else _umask >> 3 & 7


def user_name() -> str:
    """Who runs this process, by name; without one the number."""
    # Not getpass.getuser(): it believes $LOGNAME, which sudo and containers leave wrong.
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
