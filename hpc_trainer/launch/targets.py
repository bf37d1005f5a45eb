"""Lookup of names of the user's own code in files, as the workers will find them.

Nothing is imported, because `plan` runs no user code. Names that a module makes only when it runs are not judged.
"""

from __future__ import annotations

import ast
import os
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_trainer.config.environment import changes_python
from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.config.targets import TO_BE_FOUND, targets_of
from hpc_trainer.errors import did_you_mean
from hpc_trainer.launch.frozen_code.import_path import is_environment
from hpc_trainer.launch.frozen_code.snapshot import Snapshot, locations_of
from hpc_trainer.launch.frozen_code.unpacking import LINK
from hpc_trainer.record.spec import RunSpec

# A module whose text contains one of these may make names or modules that no file shows.
_MADE_WHEN_RUN = ("__path__", "sys.modules", "__getattr__", "globals(", "vars(", "exec(", "setattr(")
_FOLDERS_SHOWN = 8
_FOLDERS_ABOVE = 4


@dataclass(slots=True)
class Unfound:
    """Messages on names that cannot be found."""

    problems: list[str] = field(default_factory=list)
    """Messages on names that the runs certainly cannot find."""
    notes: list[str] = field(default_factory=list)
    """Messages on names that the runs' own Python may find."""


class _NowhereError(Exception):
    """Error of a name that cannot be found. `is_sure`: no Python of the runs can find it."""

    def __init__(self, why: str, *, is_sure: bool) -> None:
        super().__init__(why)
        self.is_sure = is_sure


def find_nowhere(specs: Iterable[RunSpec], code: Snapshot | None) -> Unfound:
    """Look up each name in the runs' `_target_` and `train.main` once.

    Args:
        code: the frozen code that the runs import; None: each start imports the files then on the disk.
    """
    asked: dict[tuple[str, str], Mapping[str, Any]] = {}
    for spec in specs:
        asked.update(((key, target), spec.config["cluster"]) for key, target in targets_of(spec.config).items())
    unfound, files = Unfound(), _Files(code)
    for (key, target), cluster in asked.items():
        package = target.partition(".")[0]
        if package == "hpc_trainer" or package in sys.stdlib_module_names:
            continue
        try:
            _look_up(target, files)
        except _NowhereError as why:
            message = f"{key}={target} was not found: {why}"
            if why.is_sure:
                unfound.problems.append(message)
            elif _is_this_python(cluster):
                is_far = cluster["executor"] != Executor.local.value
                way = f" If this Python has other packages on the nodes, name it: cluster.python={sys.executable}"
                unfound.problems.append(message + (way if is_far else ""))
            else:
                unfound.notes.append(
                    f"here {message} The runs may find it: cluster={cluster['name']} sets another Python for them."
                )
    return unfound


def _is_this_python(cluster: Mapping[str, Any]) -> bool:
    """Return True if no option of a cluster's profile can set another Python or import path."""
    others = ("python", "setup", "srun_args", "sbatch")
    is_set = any(cluster.get(option) for option in others) or changes_python(cluster)
    return not is_set and "PYTHONPATH" not in cluster["env"]


class _Files:
    """Files as the runs will have them: frozen files below a frozen root, files on the disk elsewhere."""

    def __init__(self, code: Snapshot | None) -> None:
        self._contents = code.contents if code is not None else {}
        self._roots = {root.source: root.name for root in code.roots} if code is not None else {}
        self._folders = {name[:end] for name in self._contents for end in range(len(name)) if name[end] == "/"}

    def frozen_name(self, path: Path) -> str | None:
        """Return a path's name in the copy, whether or not it exists there; None outside the frozen roots."""
        root = next((source for source in self._roots if path.is_relative_to(source)), None)
        if root is None or is_environment(str(path), str(root)):  # .venv of a project: runs import it from the disk
            return None
        return f"{self._roots[root]}/{path.relative_to(root)}"

    def is_file(self, path: Path) -> bool:
        name = self.frozen_name(path)
        return path.is_file() if name is None else name in self._contents

    def is_folder(self, path: Path) -> bool:
        name = self.frozen_name(path)
        if name is None:
            return path.is_dir()
        return name in self._folders or (name in self._contents and self._contents[name][0] == LINK and path.is_dir())

    def text(self, path: Path) -> str | None:
        """Return the text of a file; None if it is unreadable or a link in the copy."""
        name = self.frozen_name(path)
        try:
            mode, content = ("", path.read_bytes()) if name is None else self._contents[name]
        except OSError:
            return None
        return None if mode == LINK else content.decode("utf-8", errors="replace")

    def modules(self, folder: Path) -> set[str]:
        """Return the names of the modules in a package's folder, for a message."""
        name = self.frozen_name(folder)
        if name is None:
            names = {entry.name for entry in folder.iterdir()}
        else:
            names = {file[len(name) + 1 :].partition("/")[0] for file in self._contents if file.startswith(f"{name}/")}
        return {module.partition(".")[0] for module in names} - {"__init__", "__pycache__", ""}


def _look_up(target: str, files: _Files) -> None:
    """Look up one name; do nothing if the files cannot decide.

    Raises:
        _NowhereError: the files have nothing of this name.
    """
    package, *parts, attribute = target.split(".")
    places = locations_of(package)
    if not places:
        raise _NowhereError(_not_there(package), is_sure=False)
    here = places[0].resolve()
    is_sure = files.frozen_name(here) is not None
    done = package
    for part in parts:
        inside = _module_in(here, part, files)
        if inside is None:
            if len(places) > 1 or _is_made_when_run(here, files):
                return
            raise _NowhereError(_no_module(done, part, here, files), is_sure=is_sure)
        here, done = inside, f"{done}.{part}"
    source = here / "__init__.py" if files.is_folder(here) else here
    if not files.is_file(source) or source.suffix != ".py" or _module_in(here, attribute, files) is not None:
        return
    names = _names_in(source, files)
    if names is not None and attribute not in names:
        hint = did_you_mean(attribute, [name for name in names if not name.startswith("_")])
        raise _NowhereError(f"{source} defines no {attribute}. {hint}".rstrip(), is_sure=is_sure)


def _module_in(folder: Path, name: str, files: _Files) -> Path | None:
    """Return the folder or file of this package or module in a package's folder; None if there is none."""
    if not files.is_folder(folder):
        return None
    if files.is_folder(folder / name):
        return folder / name
    endings = (".py", *_extension_suffixes())
    return next((path for path in (folder / f"{name}{ending}" for ending in endings) if files.is_file(path)), None)


def _extension_suffixes() -> Sequence[str]:
    from importlib.machinery import BYTECODE_SUFFIXES, EXTENSION_SUFFIXES

    return (*EXTENSION_SUFFIXES, *BYTECODE_SUFFIXES)


def _is_made_when_run(here: Path, files: _Files) -> bool:
    source = here / "__init__.py" if files.is_folder(here) else here
    text = files.text(source) if files.is_file(source) else ""
    return text is None or any(word in text for word in _MADE_WHEN_RUN)


def _names_in(source: Path, files: _Files) -> set[str] | None:
    """Return the names that a module's own lines bind; None if the module may make other names when it runs."""
    text = files.text(source)
    if text is None or any(word in text for word in _MADE_WHEN_RUN):
        return None
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):  # the file may need a newer Python
        return None
    names: set[str] = set()
    left: list[ast.AST] = [tree]
    while left:
        for node in ast.iter_child_nodes(left.pop()):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(node.name)
                names.update(name for inner in ast.walk(node) if isinstance(inner, ast.Global) for name in inner.names)
                continue  # names bound inside are local
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
                names.add(node.name)
            left.append(node)
    return None if "*" in names else names


def _no_module(package: str, name: str, folder: Path, files: _Files) -> str:
    if not files.is_folder(folder):
        return f"{package} is the module {folder}, and no package that holds {name}."
    unfrozen = next((path for path in (folder / f"{name}.py", folder / name) if path.exists()), None)
    if files.frozen_name(folder) is not None and unfrozen is not None:
        return f"{unfrozen} is not frozen: git ignores it, or snapshot.exclude names it. See snapshot.include."
    return f"{folder} holds no module {name}. {did_you_mean(name, files.modules(folder))}".rstrip()


def _not_there(package: str) -> str:
    stdlib = {sysconfig.get_path(key) for key in ("stdlib", "platstdlib")}
    path = [entry for entry in sys.path if entry and Path(entry).is_dir() and entry not in stdlib]
    looked = [folder for folder in dict.fromkeys((str(Path.cwd()), *path)) if "lib-dynload" not in folder]
    more = f" and {len(looked) - _FOLDERS_SHOWN} more" if len(looked) > _FOLDERS_SHOWN else ""
    above = [folder for folder in list(Path.cwd().parents)[:_FOLDERS_ABOVE] if _holds(folder, package)]
    hint = f" It is in {above[0]}: submit from there." if above else ""
    where = ", ".join(looked[:_FOLDERS_SHOWN])
    return f"there is no package or module {package} in {where}{more}.{hint} {TO_BE_FOUND}"


def _holds(folder: Path, package: str) -> bool:
    return os.path.isfile(folder / f"{package}.py") or os.path.isfile(folder / package / "__init__.py")  # noqa: PTH113
