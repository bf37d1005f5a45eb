"""Files of a folder that are frozen: what git knows or would add, or what Python can import from there.

Code that finds its data by `Path(__file__).parent / "data"` looks into the frozen copy. Data, weights and outputs are
not frozen, so the copy has links to them (docs/decisions/0084). A folder with Python modules gets no link, because its
modules would be imported as they are when a run starts.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch, translate
from importlib.machinery import EXTENSION_SUFFIXES
from itertools import islice
from pathlib import Path

from hpc_trainer.errors import ConfigError
from hpc_trainer.record.redaction import secrets_among
from hpc_trainer.runtime.code import run_git

# A home folder under git on a slow file system: an error is better than a login shell that hangs.
_GIT_TIMEOUT_S = 30.0
_NEVER = (
    ".git", ".hg", ".svn", "__pycache__", "*.pyc", "*.pyo", ".venv", ".tox", ".nox", ".mypy_cache", ".ruff_cache",
    ".pytest_cache", ".ipynb_checkpoints", "node_modules", ".DS_Store",
)  # fmt: skip
_ENVIRONMENTS = frozenset({"pyvenv.cfg", "conda-meta"})
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
    """Names that were left out because they look like secrets; `kept` adds them."""
    not_frozen: list[str] = field(default_factory=list, compare=False)
    """Outputs of runs, and names that git ignores; folders end with a slash. `kept` and `git_files` add them."""

    def kept(self, names: Iterable[str], *, tracked: Collection[str] = (), are_folders: bool = False) -> list[str]:
        """Return the files that are frozen, in the same order; of folders, those that are not left out.

        Args:
            names: paths below the root.
            tracked: the files that git tracks: outputs of runs among them are frozen.
            are_folders: True if `names` are folders.
        """
        names = [name for name in names if not self.leaves_out(name)]
        secrets = dict.fromkeys(secrets_among(names))
        self.secrets.extend(secrets)
        names = [name for name in names if name not in secrets]
        if are_folders:
            return names
        outputs = {name: self._output(name) for name in names if name not in tracked}
        self.not_frozen.extend(filter(None, outputs.values()))
        return [name for name in names if not outputs.get(name)]

    def leaves_out(self, name: str) -> bool:
        """Return True for a file or folder that is neither frozen nor linked: `exclude` or a built-in rule names it."""
        return _matches(name, (*self.exclude, *_NEVER))

    def _output(self, name: str) -> str | None:
        """Return an output of runs that `include` does not name, or its folder of outputs; None for other files.

        my_lab/checkpoints/store.py is code.
        """
        if name.endswith(".py") or not _matches(name, _OUTPUTS) or _matches(name, self.include):
            return None
        parts = name.split("/")
        depth = next(depth for depth, part in enumerate(parts, 1) if _matches(part, _OUTPUTS))
        return name if depth == len(parts) else "/".join(parts[:depth]) + "/"


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

    Ignored files are included only if `rules.include` names them. None if git is missing, or the folder is not in a
    checkout.

    Raises:
        ConfigError: git refuses the folder, or takes longer than 30 s.
    """
    sweeps = _sweeps_below(top, rules.runs_dir)
    listed = _git(top, "ls-files", "-z", "-t", "--cached", "--others", "--exclude-standard", *sweeps)
    if listed is None:
        return None
    files: list[str] = []
    tracked: set[str] = set()
    nested: list[str] = []
    for tag, name in ((entry[0], entry[2:]) for entry in listed if entry):
        is_tracked = tag != "?"
        if name.endswith("/") or (is_tracked and (top / name).is_dir() and not (top / name).is_symlink()):
            nested.append(name.rstrip("/"))
        else:
            files.append(name)
            if is_tracked:
                tracked.add(name)
    wanted = set(rules.kept(files, tracked=tracked))
    # --directory: ignored folders (data, environments) are one entry and are not walked through.
    ignored = _git(top, "ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory", *sweeps)
    names = [name for name in ignored or [] if name and not rules.leaves_out(name.rstrip("/"))]
    wanted.update(rules.kept(name for name in names if not name.endswith("/") and _matches(name, rules.include)))
    rules.not_frozen.extend(name for name in names if name not in wanted)
    for folder in rules.kept(nested, are_folders=True):
        if (top / folder / ".git").exists():
            of_folder = Rules(rules.include, (), rules.runs_dir, rules.max_files)
            inside = git_files(top / folder, of_folder) or []
            rules.secrets.extend(f"{folder}/{secret}" for secret in of_folder.secrets)
            rules.not_frozen.extend(f"{folder}/{name}" for name in of_folder.not_frozen)
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
            f"git took more than {_GIT_TIMEOUT_S:g} s to list {top}. Add what is not code to .gitignore, or use "
            "snapshot=copy, or snapshot=off."
        ) from error
    if done.returncode == 0:
        return [os.fsdecode(name) for name in done.stdout.split(b"\0")]
    said = done.stderr.decode(errors="replace").strip()
    if "not a git repository" in said:
        return None
    first = said.splitlines()[0] if said else f"exit {done.returncode}"
    raise ConfigError(f"git does not list {top}: {first}. Fix that, or use snapshot=copy, or snapshot=off.")


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
    modules: list[str] = []
    folders: list[str] = []
    for entry in _scan(root):
        if entry.is_symlink() or entry.is_file(follow_symlinks=False):
            is_module = entry.name.endswith(kinds) or (entry.is_symlink() and entry.name in named)
            if is_module and not entry.name.startswith("."):
                modules.append(entry.name)
        elif entry.name in named or _holds(entry.path, kinds):
            folders.append(entry.name)
    yield from rules.kept(modules)
    yield from files_below(root, folders, rules)


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


def files_below(root: Path, folders: Iterable[str], rules: Rules) -> Iterator[str]:
    """Yield all files of these folders in `root`, except hidden files, environments and weights, level by level."""
    level = rules.kept(folders, are_folders=True)
    while level:
        files: list[str] = []
        below: list[str] = []
        for name in level:
            folder = root / name
            if name.rsplit("/", 1)[-1].startswith("."):
                continue
            if rules.runs_dir is not None and os.path.realpath(folder) == rules.runs_dir:
                continue
            entries = _scan(folder)
            if _ENVIRONMENTS & {entry.name for entry in entries}:
                continue
            for entry in entries:
                kind = below if entry.is_dir(follow_symlinks=False) else files
                kind.append(f"{name}/{entry.name}")
        yield from (name for name in rules.kept(files) if not name.rsplit("/", 1)[-1].startswith("."))
        level = rules.kept(below, are_folders=True)


def _is_below(path: Path, folder: str | None) -> bool:
    return folder is not None and (os.path.normpath(path) + "/").startswith(folder + "/")


def too_many(root: Path, names: Sequence[str], limit: int) -> str:
    """Return the error message for more files than may be frozen."""
    most = Counter(name.split("/", 1)[0] for name in names).most_common(3)
    listed = ", ".join(f"{top} ({count} files)" for top, count in most)
    largest = most[0][0]
    return (
        f"the code to freeze in {root} has more than snapshot.max_files={limit} files. Most are in {listed}. Leave "
        f"out what is not code: 'snapshot.exclude=[{largest}]', or .gitignore; or raise snapshot.max_files; or "
        "snapshot=off."
    )


# --- links to what is not frozen ---

# A folder with thousands of ignored files is reached by its few folders, which come first.
_MOST_LINKS = 200

_CODE = (".py", ".pyc", ".pyi", *EXTENSION_SUFFIXES)
# Products of builds, logs of earlier starts, and unfinished files: nothing that code reads, and they come and go.
_NOT_READ = ("build", "dist", "*.egg-info", "*.log", "*.out", "*.err", "*.tmp", "*.swp", "*~", "core", "core.*")
# A data set has millions of files: whether modules are among them is decided by the first ones of two levels.
_LOOKED_AT = 200


def linked_names(root: Path, names: Iterable[str], frozen: Iterable[str], runs_dir: str | None) -> list[str]:
    """Return those of the names to which the frozen copy has links, sorted; folders come first.

    Args:
        root: the frozen folder.
        names: paths below the root that may be linked; a folder ends with a slash.
        frozen: the frozen files below the root: neither they nor their folders are links.
        runs_dir: real path of the folder of sweeps, which gets no link.
    """
    plain = {name.rstrip("/"): name.endswith("/") for name in names}
    paths = (name.split("/") for name in frozen)
    with_files = {"/".join(parts[:depth]) for parts in paths for depth in range(1, len(parts) + 1)}
    for name in {*secrets_among(plain), *(with_files & plain.keys())}:
        del plain[name]
    chosen = [
        (not is_folder, name) for name, is_folder in plain.items()
        if not _is_passed_over(name) and os.path.realpath(root / name) != runs_dir and is_data(root / name)
    ]  # fmt: skip
    return [name for _, name in islice(sorted(chosen), _MOST_LINKS)]


def _is_passed_over(name: str) -> bool:
    return any(part.startswith(".") or any(fnmatch(part, kind) for kind in _NOT_READ) for part in name.split("/"))


def is_data(path: Path) -> bool:
    """Return True for an existing file that is no module, and for a folder without modules and environments."""
    if not path.is_dir():
        return path.is_file() and not path.name.endswith(_CODE)
    entries = list(_entries(path))
    below = (entry for folder in entries if _is_real_folder(folder) for entry in _entries(folder.path))
    return not any(
        entry.name.endswith(_CODE) or entry.name in _ENVIRONMENTS for entry in (*entries, *islice(below, _LOOKED_AT))
    )


def _entries(folder: Path | str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            yield from islice(found, _LOOKED_AT)
    except OSError:
        return


def _is_real_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def beside(folder: Path, rules: Rules) -> list[str]:
    """Return the entries of a folder without git that are not left out, folders with a slash; none of a home folder."""
    if folder == Path.home():
        return []
    entries = [entry for entry in _scan(folder) if not rules.leaves_out(entry.name)]
    return [f"{entry.name}/" if entry.is_dir() else entry.name for entry in entries]
