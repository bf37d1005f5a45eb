"""Order of the import path: frozen copies in place of the frozen folders, and folders that others may write last.

Each archive of frozen code has this file beside `frozen_worker.py`, so it imports only the standard library.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any


def frozen_path(path: Sequence[str], folder: Path, roots: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return `path` (as sys.path) with each folder of a frozen root replaced by its copy, in the same order.

    A folder of a root is dropped if nothing of it is frozen, unless it belongs to an environment in the root, such as
    .venv: packages that pip installed are not frozen. Packages that were frozen by name are always found in the copy:
    if another folder of the path would win, the copy's folder is put first.
    """
    by_depth = sorted(roots, key=lambda root: len(root["source"]), reverse=True)
    entries: list[str] = []
    for entry in path:
        real = os.path.realpath(entry or os.curdir)
        for root in by_depth:
            if is_below(real, root["source"]) and not is_environment(real, root["source"]):
                copy = folder / root["name"] / os.path.relpath(real, root["source"])
                entries += [os.path.normpath(copy)] if copy.is_dir() else []
                break
        else:
            entries.append(entry)
    entries = list(dict.fromkeys(entries))
    for root in roots:
        for package, place in root["packages"].items():
            copy_place = os.path.normpath(folder / root["name"] / place)
            if not _is_found_in(package, copy_place, entries):
                entries = [copy_place, *(entry for entry in entries if entry != copy_place)]
    return entries


def is_below(path: str, folder: str) -> bool:
    """Return True if `path` is `folder` itself or is inside it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def is_environment(path: str, root: str) -> bool:
    """Return True for a folder of installed packages below `root`: this Python's, or one named like such folders."""
    below = Path(os.path.relpath(path, root)).parts
    prefixes = {os.path.realpath(prefix) for prefix in (sys.prefix, sys.exec_prefix, sys.base_prefix)}
    return bool({"site-packages", "dist-packages"} & set(below)) or any(
        is_below(path, prefix) and is_below(prefix, root) and prefix != root for prefix in prefixes
    )


def _is_found_in(package: str, place: str, path: list[str]) -> bool:
    spec = PathFinder.find_spec(package, path)
    if spec is None:
        return False
    locations = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    return any(str(location).startswith(place + os.sep) for location in locations)


def safe_path(path: Sequence[str]) -> list[str]:
    """Return `path` (as sys.path) with folders that others may write last, and after them the current folder.

    Frozen code, the standard library and installed packages come before them. Folders of an environment keep their
    place, even if a team may write them: the user asked for that Python.
    """
    groups: tuple[list[str], ...] = ([], [], [])
    try:
        here = Path.cwd()
    except FileNotFoundError:  # deleted meanwhile
        here = Path()
    for entry in dict.fromkeys(os.path.normpath(here / folder) for folder in path):
        groups[_danger(entry)].append(entry)
    if groups[1]:
        sys.stderr.write(f"others may write {', '.join(groups[1])}: searched after the installed packages.\n")
    # PYTHONSAFEPATH is the user's own request for -P: the current folder is left out.
    return [*groups[0], *groups[1], *([] if os.environ.get("PYTHONSAFEPATH") else groups[2][:1])]


def _danger(entry: str) -> int:
    """Rank a path entry by trust: 2 for the current folder, 1 for a folder that others may write, else 0.

    Folders of an environment rank 0, whoever may write them.
    """
    try:
        info = Path(entry).stat()
        is_here = os.path.samestat(info, Path().stat())
    except OSError:
        return 0
    if is_here:
        return 2
    prefixes = (sys.prefix, sys.exec_prefix, sys.base_prefix)
    is_installed = {"site-packages", "dist-packages"} & set(Path(entry).parts) or any(
        is_below(os.path.realpath(entry), os.path.realpath(prefix)) for prefix in prefixes
    )
    return int(not is_installed and stat.S_ISDIR(info.st_mode) and _others_may_write(info))


def _others_may_write(info: os.stat_result) -> bool:
    """Return True unless only the owner may write; a private group of the owner counts as the owner.

    config/compose/own_files.py has the same rule.
    """
    if not info.st_mode & stat.S_IWGRP or info.st_mode & stat.S_IWOTH:
        return bool(info.st_mode & stat.S_IWOTH)
    try:
        account, group = pwd.getpwuid(info.st_uid), grp.getgrgid(info.st_gid)
    except KeyError:
        return True
    is_private = account.pw_gid == group.gr_gid and account.pw_name == group.gr_name
    return not is_private or info.st_uid == 0 or bool(set(group.gr_mem) - {account.pw_name})
