"""Whose files are read: those of the user or of root that nobody else may write, in folders that nobody can replace."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from hpc_trainer.errors import RunStateError, UntrustedFileError
from hpc_trainer.record.reading import Faults, exists
from hpc_trainer.record.shared_folder import Place


def check_trusted(path: Path) -> None:
    """Raise if another user owns a file or folder or may write to it, as ssh does for keys.

    Raises:
        UntrustedFileError: owner or mode is wrong, or the path is a symbolic link.
        RunStateError: there is no such file.
    """
    try:
        info = path.lstat()
    except FileNotFoundError as error:
        raise RunStateError(f"{path}: no such file.") from error
    if stat.S_ISLNK(info.st_mode):
        raise UntrustedFileError(f"{path} is a symbolic link; it must be the file itself.")
    if info.st_uid not in (os.getuid(), 0):
        raise UntrustedFileError(f"{path} belongs to user {info.st_uid}; only files of yours or of root are read.")
    if info.st_mode & (stat.S_IWOTH | stat.S_IWGRP):
        # A default ACL affects all files of the folder, not only this one; newly written files get the right mode.
        by_acl = has_default_acl(path if stat.S_ISDIR(info.st_mode) else path.parent)
        what = f"-R go-w {path if stat.S_ISDIR(info.st_mode) else path.parent}" if by_acl else f"go-w {path}"
        raise UntrustedFileError(
            f"{path} has mode {stat.S_IMODE(info.st_mode):o}: others may write it"
            f"{', by a default ACL of the folder' if by_acl else ''}, so it may not be what was "
            f"submitted. Look at it, then: chmod {what}"
        )


def is_ours(path: Place, faults: Faults | None = None) -> bool:
    """Return True if the file exists and passes `check_trusted`; False if it does not exist or is not visible now.

    Raises:
        UntrustedFileError: others may have changed the file.
        OSError: the file system failed, and there is no `faults` to report it to.
    """
    is_present = exists(path, faults)
    if is_present:
        check_trusted(Path(path))
    return bool(is_present)


def check_place(folder: Path) -> None:
    """Raise if other users may write to a sweep's folder, or could replace the folder by another one.

    `folder` must pass `check_trusted`. A folder above it to which everybody may write needs the sticky bit, as /tmp has
    it, so that only owners may rename entries. The check covers the folder of sweeps, and the folders above it that the
    user owns and can therefore fix; the site is responsible for the others. ssh also refuses folders up to the home
    folder to which a group may write. Here the group may write, because teams share a folder of sweeps. If a member
    puts a folder in the place of another member's, its owner is wrong, and the check fails.

    Raises:
        UntrustedFileError: the owner or the mode is wrong, or the folder is a symbolic link.
        RunStateError: there is no such folder.
    """
    check_trusted(folder)
    for number, above in enumerate(folder.absolute().resolve().parents):
        info = above.stat()
        if number and info.st_uid != os.getuid():
            return
        if info.st_mode & stat.S_IWOTH and not info.st_mode & stat.S_ISVTX:
            raise UntrustedFileError(
                f"{above} has mode {stat.S_IMODE(info.st_mode):o}: everybody may rename its content, including "
                f"{folder.name}. chmod o-w {above} (or chmod +t), or choose another paths.runs_dir."
            )


# Modes of new files and folders: those of `set_umask`, even if a folder's default ACL would give more.
#
# Project spaces often have a default ACL that lets the group write (setfacl -d). The kernel then ignores the umask, so
# the group could change every new file, and hpc-trainer would refuse its own files. Therefore files get their mode
# explicitly. The default ACL of a new folder is narrowed by the umask, so that files of Slurm's daemon and submitit get
# the right mode too.

DEFAULT_ACL = "system.posix_acl_default"


def has_default_acl(folder: Path) -> bool:
    """Return True if new files in `folder` get their mode from a default ACL."""
    try:
        return hasattr(os, "getxattr") and bool(os.getxattr(folder, DEFAULT_ACL))
    except OSError:
        return False
