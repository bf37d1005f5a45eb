"""Owners of the files to freeze: a team's folder may contain a colleague's files.

Another user's file is reported, because it runs as the user who submits. It is refused if it would be imported in place
of an installed module, because then nobody has asked for it by name. A file that everybody may write is refused.
"""

from __future__ import annotations

import os
import pwd
import stat
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES, PathFinder
from pathlib import Path

from hpc_trainer.errors import UntrustedFileError
from hpc_trainer.launch.frozen_code.import_path import is_below, is_environment

_SUFFIXES = (*EXTENSION_SUFFIXES, ".py")
# Python imports these by itself when it starts.
_AT_START = ("sitecustomize", "usercustomize")
# Folders that every checkout has and that packages install by mistake; no installed module imports them.
_NOT_IMPORTED = frozenset({"tests", "test", "docs", "examples", "benchmarks", "scripts", "setup", "conftest"})
_SHOWN = 3


def user_name(uid: int) -> str:
    """Return the name of a user: `alice`, or `user 1234` if the id has no name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def check_owners(source: str, places: Sequence[str], files: Mapping[str, os.stat_result]) -> tuple[str, ...]:
    """Return notes for the user on files of one root that belong to other users.

    Args:
        source: the root.
        places: folders below the root that are on the import path: package.parent, current folder, PYTHONPATH.
        files: lstat results by name below the root.

    Raises:
        UntrustedFileError: everybody may write a file, or another user's file would replace an installed module.
    """
    open_to_all = [name for name, info in files.items() if stat.S_ISREG(info.st_mode) and info.st_mode & stat.S_IWOTH]
    if open_to_all:
        raise UntrustedFileError(
            f"{_listed(source, open_to_all)} would be frozen and run as you, and everybody may write "
            f"{'it' if len(open_to_all) == 1 else 'them'}. Look at what is in there, then: chmod -R o-w {source}"
        )
    foreign = {name: info.st_uid for name, info in files.items() if info.st_uid not in (os.getuid(), 0)}
    for name, uid in foreign.items():
        module = next(filter(None, (_module(name, place) for place in places)), None)
        if module is not None and _is_known(module, source):
            raise UntrustedFileError(
                f"{source}/{name} belongs to {user_name(uid)}. It would be frozen, and run as you in place of the "
                f"module {module} that is installed. Look at it, and remove it or leave it out: "
                f"'snapshot.exclude=[{name}]'. If you mean it, replace it by a copy of your own."
            )
    named = {name: uid for name, uid in foreign.items() if not name.startswith("hpc_trainer/")}
    if not named:
        return ()
    owners = ", ".join(sorted({user_name(uid) for uid in named.values()}))
    return (
        f"{len(named)} of the frozen files in {source} belong to {owners} and will run as you: "
        f"{_listed('', list(named))}.",
    )


def _listed(source: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(f"{source}/{name}" if source else name for name in names[:_SHOWN]) + more


def _module(name: str, place: str) -> str | None:
    """Return the module that Python would import from the file `name` if `place` is on the path; None if none."""
    if place != ".":
        if not name.startswith(f"{place}/"):
            return None
        name = name[len(place) + 1 :]
    top, _, rest = name.partition("/")
    file = rest or top
    suffix = next((ending for ending in _SUFFIXES if file.endswith(ending)), None)
    stem = file.removesuffix(suffix or "")
    module = top if rest else stem
    is_one = suffix is not None and module.isidentifier() and (not rest or stem == "__init__")
    return module if is_one else None


def _is_known(module: str, source: str) -> bool:
    """Return True if Python finds a module of this name when the root is not on the path."""
    if module in _NOT_IMPORTED:
        return False
    if module in sys.stdlib_module_names or module in _AT_START:
        return True
    elsewhere = [
        entry
        for entry in map(os.path.realpath, filter(None, sys.path))
        if not is_below(entry, source) or is_environment(entry, source)
    ]
    return PathFinder.find_spec(module, elsewhere) is not None


def places_of(source: str, packages: Mapping[str, str]) -> list[str]:
    """Return the folders below a root, relative to it, that are or were on the import path."""
    entries = (os.path.realpath(entry) for entry in (str(Path.cwd()), *filter(None, sys.path)))
    inside = (
        os.path.relpath(entry, source)
        for entry in entries
        if is_below(entry, source) and not is_environment(entry, source)
    )
    return list(dict.fromkeys((*packages.values(), *inside)))
