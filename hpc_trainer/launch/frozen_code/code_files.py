"""Files of a folder that are code to freeze: what git knows or would add, or what Python can import from there.

A team's folder may hold files of a colleague, so the owners of the files are checked.
"""

from __future__ import annotations

import functools
import os
import pwd
import re
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import translate
from importlib.machinery import EXTENSION_SUFFIXES, PathFinder
from pathlib import Path

from hpc_trainer.errors import ConfigError, UntrustedFileError
from hpc_trainer.launch.frozen_code.import_path import is_below, is_environment
from hpc_trainer.record.redaction import is_secret
from hpc_trainer.runtime.code import run_git

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


# A home folder under git on a slow file system: an error is better than a login shell that hangs.
_GIT_TIMEOUT_S = 30.0
_NEVER = (
    ".git", ".hg", ".svn", "__pycache__", "*.pyc", "*.pyo", ".venv", ".tox", ".nox", ".mypy_cache", ".ruff_cache",
    ".pytest_cache", ".ipynb_checkpoints", "node_modules", ".DS_Store",
)  # fmt: skip
MODULES = (".py", ".so")
WITH_CONFIGURATION = (*MODULES, ".yaml", ".yml")
"""Suffixes of the files of a script's folder: a Hydra app's configuration is beside the script."""
_OUTPUTS = ("checkpoints", "wandb", "mlruns", "multirun", "*.ckpt", "*.pt", "*.pth", "*.safetensors", "*.gguf")


@dataclass(frozen=True, slots=True)
class Rules:
    """The user's rules on files to freeze or leave out, besides the built-in rules, and the folder of sweeps."""

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    runs_dir: str | None = None
    max_files: int = 10_000
    secrets: list[str] = field(default_factory=list, compare=False)
    """Names that were left out because they look like secrets; `leaves_out` appends them."""

    def leaves_out(self, name: str, *, is_tracked: bool = False, is_folder: bool = False) -> bool:
        """Return True if the file `name` (a path below the root), or the whole folder, is not frozen."""
        if _matches(name, self.exclude) or _matches(name, _NEVER):
            return True
        if is_secret(name):
            self.secrets.append(name)
            return True
        # my_lab/checkpoints/store.py is code.
        is_output = not is_folder and not name.endswith(".py") and _matches(name, _OUTPUTS)
        return is_output and not is_tracked and not _matches(name, self.include)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """Return True if a pattern fits `name`.

    A pattern with a slash fits a path from the root, or a folder above it; one without a slash fits any part of the
    path.
    """
    of_parts, of_paths = _compile(tuple(patterns))
    parts = name.split("/")
    if of_parts is not None and any(map(of_parts.match, parts)):
        return True
    tops = ("/".join(parts[: count + 1]) for count in range(len(parts)))
    return of_paths is not None and any(map(of_paths.match, tops))


@functools.cache
def _compile(patterns: tuple[str, ...]) -> tuple[re.Pattern[str] | None, re.Pattern[str] | None]:
    plain = [pattern.rstrip("/") for pattern in patterns]  # one expression: 300 files × 70 patterns took 80 ms

    def joined(chosen: list[str]) -> re.Pattern[str] | None:
        return re.compile("|".join(map(translate, chosen))) if chosen else None

    return joined([pattern for pattern in plain if "/" not in pattern]), joined(
        [pattern for pattern in plain if "/" in pattern]
    )


def git_top(folder: Path) -> Path | None:
    """Return the top of the git checkout that contains `folder`; None outside a checkout. Runs no command."""
    return next((candidate for candidate in (folder, *folder.parents) if (candidate / ".git").exists()), None)


def git_files(top: Path, rules: Rules) -> list[str] | None:
    """Return the files of the working tree that git tracks or would add, sorted, with submodules and clones inside.

    Ignored files are included only if `rules.include` names them. None if git is missing, or this is no checkout.

    Raises:
        ConfigError: git refuses the folder, or takes longer than 30 s.
    """
    sweeps = _sweeps_below(top, rules.runs_dir)
    listed = _git(top, "ls-files", "-z", "-t", "--cached", "--others", "--exclude-standard", *sweeps)
    if listed is None:
        return None
    wanted: set[str] = set()
    nested: list[str] = []
    for tag, name in ((entry[0], entry[2:]) for entry in listed if entry):
        is_tracked = tag != "?"
        if name.endswith("/") or (is_tracked and (top / name).is_dir() and not (top / name).is_symlink()):
            nested.append(name.rstrip("/"))
        elif not rules.leaves_out(name, is_tracked=is_tracked):
            wanted.add(name)
    if rules.include:
        # --directory: ignored folders (data, environments) are one entry and are not walked through.
        ignored = _git(top, "ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory", *sweeps)
        names = [name for name in ignored or [] if name and not name.endswith("/")]
        wanted.update(name for name in names if _matches(name, rules.include) and not rules.leaves_out(name))
    for folder in nested:
        if not rules.leaves_out(folder, is_folder=True) and (top / folder / ".git").exists():
            of_folder = Rules(rules.include, (), rules.runs_dir, rules.max_files)
            inside = git_files(top / folder, of_folder) or []
            rules.secrets.extend(f"{folder}/{secret}" for secret in of_folder.secrets)
            below = (f"{folder}/{name}" for name in inside)
            wanted.update(name for name in below if not _matches(name, rules.exclude))
    return sorted(name for name in wanted if not _is_below(top / name, rules.runs_dir))


def _sweeps_below(top: Path, runs_dir: str | None) -> list[str]:
    """Return options that keep git from walking through the folder of sweeps; listed files in it are dropped later."""
    if not _is_below(Path(runs_dir or "/"), str(top)):
        return []
    return ["--exclude=/" + re.sub(r"([\\*?\[!# ])", r"\\\1", os.path.relpath(runs_dir or "/", top)) + "/"]


def _git(top: Path, *argv: str) -> list[str] | None:
    try:
        done = run_git(top, *argv, timeout_s=_GIT_TIMEOUT_S)
    except FileNotFoundError:
        return None
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"git took more than {_GIT_TIMEOUT_S:g} s to list {top}. Put what is no code into .gitignore, or use "
            "snapshot=copy, or snapshot=off."
        ) from error
    if done.returncode == 0:
        return [os.fsdecode(name) for name in done.stdout.split(b"\0")]
    said = done.stderr.decode(errors="replace").strip()
    if "not a git repository" in said:
        return None
    first = said.splitlines()[0] if said else f"exit {done.returncode}"
    raise ConfigError(f"git does not list {top}: {first}. Put that right, or use snapshot=copy, or snapshot=off.")


def importable_files(root: Path, packages: Iterable[str], rules: Rules, kinds: tuple[str, ...] = MODULES) -> list[str]:
    """Return the files that Python can import from `root`, sorted: modules, `packages`, and folders with a module.

    All files of such folders are included, also data beside the code, but no hidden files, environments or weights.

    Args:
        kinds: suffixes of the files to include; a folder is included if it contains such a file.

    Raises:
        ConfigError: there are more than `rules.max_files` files.
    """
    names: list[str] = []
    for name in _importable(root, set(packages), rules, kinds):
        names.append(name)
        if len(names) > rules.max_files:
            raise ConfigError(too_many(root, names, rules.max_files))
    return sorted(names)


def _importable(root: Path, named: Collection[str], rules: Rules, kinds: tuple[str, ...]) -> Iterator[str]:
    for entry in _scan(root):
        if entry.is_symlink() or entry.is_file(follow_symlinks=False):
            is_module = entry.name.endswith(kinds) or (entry.is_symlink() and entry.name in named)
            if is_module and not entry.name.startswith(".") and not rules.leaves_out(entry.name):
                yield entry.name
        elif entry.name in named or _holds(entry.path, kinds):
            yield from files_below(root, entry.name, rules)


def _scan(folder: Path | str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except PermissionError as error:
        raise ConfigError(
            f"{folder} cannot be read, so it cannot be frozen. Give yourself the permission, or leave it out by "
            "snapshot.exclude."
        ) from error


def _holds(folder: str, kinds: tuple[str, ...]) -> bool:
    try:
        with os.scandir(folder) as entries:
            return any(entry.name.endswith(kinds) and not entry.name.endswith(".so") for entry in entries)
    except OSError:
        return False


def files_below(root: Path, name: str, rules: Rules) -> Iterator[str]:
    """Yield all files of the folder `name` in `root`, except hidden files, environments and weights."""
    folder = root / name
    if rules.leaves_out(name, is_folder=True) or name.rsplit("/", 1)[-1].startswith("."):
        return
    if rules.runs_dir is not None and os.path.realpath(folder) == rules.runs_dir:
        return
    entries = _scan(folder)
    if {"pyvenv.cfg", "conda-meta"} & {entry.name for entry in entries}:
        return
    for entry in entries:
        below = f"{name}/{entry.name}"
        if entry.is_dir(follow_symlinks=False):
            yield from files_below(root, below, rules)
        elif not rules.leaves_out(below) and not entry.name.startswith("."):
            yield below


def _is_below(path: Path, folder: str | None) -> bool:
    return folder is not None and (os.path.normpath(path) + "/").startswith(folder + "/")


def too_many(root: Path, names: Sequence[str], limit: int) -> str:
    """Return the error message for more files than may be frozen."""
    most = Counter(name.split("/", 1)[0] for name in names).most_common(3)
    listed = ", ".join(f"{top} ({count} files)" for top, count in most)
    largest = most[0][0]
    return (
        f"the code to freeze in {root} has more than snapshot.max_files={limit} files. Most are in {listed}. Leave out "
        f"what is no code: 'snapshot.exclude=[{largest}]', or .gitignore; or raise snapshot.max_files; or snapshot=off."
    )


def read_file(path: Path) -> tuple[os.stat_result, bytes] | None:
    """Return the fstat result and the content of a regular file; None for another kind of file, or a missing one.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        # Do not follow a link that was put there this moment, and do not wait for a pipe's writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if not os.path.lexists(path) or not stat.S_ISREG(path.lstat().st_mode):
            return None
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}), so it cannot be frozen. Give yourself the permission, or leave "
            "it out by snapshot.exclude."
        ) from error
    with os.fdopen(descriptor, "rb") as file:
        info = os.fstat(descriptor)
        return (info, file.read()) if stat.S_ISREG(info.st_mode) else None
