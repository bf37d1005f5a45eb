"""Refusal of configuration that others may write to: `cluster.setup` is shell that runs as the submitting user.

A folder that is named may belong to another user, such as a site's or a project's: whoever names it trusts its owner.
Only the owner and root may write to the folder and its contents.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

from hpc_trainer.errors import UntrustedFileError


def others_may_write(info: os.stat_result) -> bool:
    """Return True unless only the owner may write to a file or folder.

    A group that the system made for one account alone (umask 002 on Debian, Red Hat) counts as that account.
    """
    if not info.st_mode & stat.S_IWGRP or info.st_mode & stat.S_IWOTH:
        return bool(info.st_mode & stat.S_IWOTH)
    try:
        account, group = pwd.getpwuid(info.st_uid), grp.getgrgid(info.st_gid)
    except KeyError:
        return True
    is_private = account.pw_gid == group.gr_gid and account.pw_name == group.gr_name
    # Accounts of many daemons are in root's group.
    return not is_private or info.st_uid == 0 or bool(set(group.gr_mem) - {account.pw_name})


def check_config_dir(folder: Path) -> None:
    """Refuse a --config-dir that others may write to, or that holds files of users other than its owner.

    Raises:
        UntrustedFileError: the folder is refused; the message names the path, its mode or owner, and the command that
            mends it.
    """
    real = folder.resolve()
    owners = {os.getuid(), 0, real.stat().st_uid}
    for path in (real, *_below(real)):
        info = path.stat()
        if others_may_write(info):
            raise UntrustedFileError(
                f"--config-dir {folder}: {path} has mode {stat.S_IMODE(info.st_mode):o}, so others may write it, and "
                f"the setup lines of a configuration run as you. Look at it, then: chmod -R go-w {real} (or take a "
                f"copy of your own: cp -r {real} my_conf)"
            )
        if info.st_uid not in owners:
            raise UntrustedFileError(
                f"--config-dir {folder}: {path} belongs to user {info.st_uid}, who is neither you, nor root, nor the "
                "owner of the folder, and the setup lines of a configuration run as you. Look at it, and replace it by "
                "a copy of your own, or remove it."
            )
    for above in real.parents:
        info = above.stat()
        if info.st_mode & stat.S_IWOTH and not info.st_mode & stat.S_ISVTX:
            raise UntrustedFileError(
                f"--config-dir {folder}: {above} has mode {stat.S_IMODE(info.st_mode):o}, so everybody may put "
                f"another folder in its place. chmod o-w {above} (or chmod +t), or keep it elsewhere."
            )
        if info.st_uid != os.getuid():
            return  # the site is responsible for folders further up


def _below(folder: Path) -> Iterator[Path]:
    """Yield the folders and YAML files that Hydra may read, through links too, without hidden folders such as .git."""
    seen: set[str] = set()
    for parent, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if (real := os.path.realpath(parent)) in seen:  # a link that leads back
            folders.clear()
        seen.add(real)
        names = (*folders, *(name for name in files if name.endswith((".yaml", ".yml"))))
        yield from (path for path in map(Path(parent).joinpath, names) if path.exists())


def check_own_file(path: Path) -> None:
    """Refuse a file of the user's own that others own or may write to.

    Raises:
        UntrustedFileError: the file is refused; the message names the mode or owner, and what to do.
    """
    info = path.stat()
    if info.st_uid not in (os.getuid(), 0):
        raise UntrustedFileError(f"{path} belongs to user {info.st_uid}, and only yours (or root's) is read.")
    if others_may_write(info):
        raise UntrustedFileError(
            f"{path} has mode {stat.S_IMODE(info.st_mode):o}: others may write it, and its setup lines run as you. "
            f"Look at it, then: chmod go-w {path}"
        )
