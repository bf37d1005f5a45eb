"""Code that is frozen at submit, from which waiting and requeued runs start (`archive.py` writes it).

`plan` and `submit` list which files of `train.command` are frozen, and which a run reads when it starts.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import pwd
import re
import stat
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import EXTENSION_SUFFIXES, PathFinder
from pathlib import Path
from typing import Any

import hpc_trainer
from hpc_trainer.config.program import (
    is_of_run,
    module_names,
    place_of_text,
    plain_words,
    runs_of,
    script_files,
    shell_files,
    split_command,
)
from hpc_trainer.config.schema.cluster import SnapshotMode
from hpc_trainer.config.targets import targets_of
from hpc_trainer.config.user_files import is_file, is_folder
from hpc_trainer.errors import ConfigError, UntrustedFileError
from hpc_trainer.launch.frozen_code import frozen_worker, import_path, unpacking
from hpc_trainer.launch.frozen_code.files import (
    MODULES,
    WITH_CONFIGURATION,
    Rules,
    beside,
    files_below,
    git_files,
    git_top,
    importable_files,
    is_data,
    linked_names,
    too_many,
)
from hpc_trainer.launch.frozen_code.frozen_worker import IMPORT_PATH, MAIN, UNPACKING, manifest_digest
from hpc_trainer.launch.frozen_code.import_path import is_below, is_environment
from hpc_trainer.launch.frozen_code.unpacking import LINK
from hpc_trainer.record.redaction import secrets_among
from hpc_trainer.record.spec import RunSpec

# A team's folder may hold files of a colleague, so the owners of the files are checked.

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
            f"{_git_names(source, open_to_all)} would be frozen and run as you, and everybody may write "
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
        f"{_git_names('', list(named))}.",
    )


def _git_names(source: str, names: Sequence[str]) -> str:
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


_FORMAT = 1


@dataclass(slots=True, kw_only=True)
class Root:
    """Folder of code: its path, its name in the copy, and the files below it that are frozen."""

    source: str
    """Absolute path of the folder, without symbolic links."""
    name: str = ""
    how: str
    """Way in which the files were chosen: git or copy."""
    packages: dict[str, str] = field(default_factory=dict)
    """Folder below `source` that must be on sys.path, by top-level package."""
    files: list[str] = field(default_factory=list)
    secrets: list[str] = field(default_factory=list)
    """Names left out of the files because they look like secrets."""
    not_frozen: list[str] = field(default_factory=list)
    """Names of data and outputs that may be linked; folders end with a slash."""
    links: list[str] = field(default_factory=list)
    """Names of data and outputs to which the copy has links."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Code at the moment when this object was made, in memory. Nothing is written."""

    digest: str
    """SHA-256 (64 hex digits) over names, modes and contents of all files, and their source folders."""
    manifest: Mapping[str, Any]
    contents: Mapping[str, tuple[str, bytes]]
    """(mode, content) by name in the copy; the content of a link is its target."""
    roots: tuple[Root, ...]
    left_out: tuple[str, ...]
    """Links to nothing, to code outside of their root or to secrets, and files with names of secrets."""
    notes: tuple[str, ...] = ()
    """Notes for the user on the owners of the code, and on data to which it has links."""

    def provenance(self) -> dict[str, Any]:
        """Return the record of this code for sweep.json."""
        return {
            "digest": self.digest,
            "roots": [{"source": root.source, "name": root.name, "how": root.how} for root in self.roots],
            "num_files": len(self.contents),
            "num_bytes": sum(len(content) for _, content in self.contents.values()),
            "left_out": list(self.left_out),
            "linked": _linked(self.contents),
        }


def read_code(specs: Sequence[RunSpec], runs_dir: Path, *, is_look: bool = False) -> Snapshot | None:
    """Read the present code that these runs will import; None with snapshot=off, or if all of it is installed.

    Args:
        is_look: read the code only to compare it, also with snapshot=off.

    Raises:
        ConfigError: the runs disagree about `snapshot`, a package is not among the files that would be frozen, the code
            exceeds `snapshot.max_mb` or `snapshot.max_files`, or a file cannot be read.
        UntrustedFileError: another user's file would replace an installed module, or everybody may write a file.
    """
    if not specs:
        return None
    configs = _distinct(specs)
    config = configs[0]["snapshot"]
    if any(other["snapshot"] != config for other in configs):
        raise ConfigError("a grid has only one value of snapshot: submit each part by a command of its own.")
    if config["mode"] == SnapshotMode.off.value and not is_look:
        return None
    rules = Rules(
        include=tuple(config["include"]),
        exclude=tuple(config["exclude"]),
        runs_dir=os.path.realpath(runs_dir),
        max_files=config["max_files"],
    )
    packages, scripts = _code_names(configs)
    prefer_git = config["mode"] != SnapshotMode.copy.value
    roots = _find_roots(packages - {"hpc_trainer"}, scripts, rules, prefer_git=prefer_git)
    return _read(roots, config) if roots else None


def is_same_code(one: Sequence[RunSpec], other: Sequence[RunSpec]) -> bool:
    """Return True if both groups of runs name the same code."""
    return _code_names(_distinct(one)) == _code_names(_distinct(other))


def _distinct(specs: Sequence[RunSpec]) -> list[Mapping[str, Any]]:
    """Return one configuration for each set of shared sections that name code; most runs of a grid share them."""
    names = ("model", "data", "optim", "train", "snapshot")
    by_sections = {tuple(id(spec.config[name]) for name in names): spec.config for spec in specs}
    return list(by_sections.values())


def _code_names(configs: Sequence[Mapping[str, Any]]) -> tuple[set[str], set[Path]]:
    """Return the top-level packages, and the scripts that commands run."""
    packages = {target.split(".", 1)[0] for config in configs for target in targets_of(config).values()}
    packages |= {name for config in configs for name in config["snapshot"]["packages"]}
    scripts: set[Path] = set()
    for command, folder in commands_of(configs):
        arguments = split_command(command)
        packages |= {module.split(".", 1)[0] for module in module_names(arguments)}
        scripts |= {Path(folder, word) for word in (*script_files(arguments), *shell_files(arguments))}
    return packages, scripts


def commands_of(configs: Iterable[Mapping[str, Any]]) -> set[tuple[str, str]]:
    """Return each command with the folder that its scripts are relative to."""
    trains = [config["train"] for config in configs if config["train"].get("command")]
    return {(train["command"], train.get("command_from") or train.get("command_dir") or ".") for train in trains}


def _find_roots(packages: Iterable[str], scripts: Iterable[Path], rules: Rules, *, prefer_git: bool) -> list[Root]:
    roots: dict[str, Root] = {}
    for path in sorted(scripts):
        if path.is_file() and not _is_installed(path.resolve()):
            name = path.name.removesuffix(".py")  # Python puts a script's folder on the import path
            _add_root(roots, name, path.absolute(), rules, prefer_git=prefer_git)
    for package in sorted(packages):
        for location in locations_of(package):
            if not _is_installed(location):
                _add_root(roots, package, location, rules, prefer_git=prefer_git)
    ours = Path(hpc_trainer.__file__).resolve().parent
    if not _is_installed(ours) and not any(_provides(root, "hpc_trainer", ours) for root in roots.values()):
        # Only the package of our own checkout: nothing in it needs the tests, and a run's conf/ is in its spec.
        source = str(ours.parent)
        root = roots.setdefault(source, Root(source=source, how="copy"))
        root.files = sorted({*root.files, *files_below(ours.parent, ["hpc_trainer"], Rules())})
        root.packages["hpc_trainer"] = "."
    for root in roots.values():  # once all files are known: none of them is a link
        root.links = linked_names(Path(root.source), root.not_frozen, root.files, rules.runs_dir)
    return _named(roots.values())


def locations_of(package: str) -> list[Path]:
    """Return the places of a top-level package or module, searched like in the worker: the current folder first.

    Nothing is imported.
    """
    spec = PathFinder.find_spec(package, [str(Path.cwd()), *(entry for entry in sys.path if entry)])
    if spec is None:
        try:
            spec = importlib.util.find_spec(package)  # editable installs with their own finder
        except (ImportError, ValueError):
            spec = None
    if spec is None:
        return []  # the nodes may have it
    if spec.submodule_search_locations:
        return [Path(location).absolute() for location in spec.submodule_search_locations]
    return [Path(spec.origin).absolute()] if spec.has_location and spec.origin else []


def _is_installed(location: Path) -> bool:
    if {"site-packages", "dist-packages"} & set(location.parts):
        return True
    return any(location.is_relative_to(sysconfig.get_path(key)) for key in ("stdlib", "platstdlib"))


def _add_root(roots: dict[str, Root], package: str, location: Path, rules: Rules, *, prefer_git: bool) -> None:
    # The target of a link to a package elsewhere is frozen, if it can be imported by the same name.
    real = location.resolve()
    if real.name != location.name:
        real = location.parent.resolve() / location.name
    entry = real.parent
    provider = next((root for root in roots.values() if _provides(root, package, real)), None)
    if provider is not None:
        return
    top = git_top(entry) if prefer_git else None
    if top is not None and str(top) not in roots:
        files = git_files(top, rules)
        if files is not None:
            root = Root(source=str(top), how="git", files=files, secrets=_taken(rules.secrets))
            root.not_frozen = _taken(rules.not_frozen)
            if _provides(root, package, real):
                roots[root.source] = root
                return
    # No checkout, or git ignores the package.
    root = roots.get(str(entry)) or Root(source=str(entry), how="copy")
    script = [real.name] if real.is_file() else []
    kinds = WITH_CONFIGURATION if script else MODULES
    root.files = sorted({*root.files, *importable_files(entry, [package], rules, kinds), *script})
    root.secrets = sorted({*root.secrets, *_taken(rules.secrets)})
    root.not_frozen += [*beside(entry, rules), *_taken(rules.not_frozen)]
    if not _provides(root, package, real):
        raise ConfigError(
            f"{package} is found at {location} and would not be frozen: it has no Python file, is excluded, or is a "
            f"link to another name. See snapshot.exclude, or use snapshot=off."
        )
    roots[root.source] = root


def _taken(names: list[str]) -> list[str]:
    """Return the names that were found since the last call, sorted, and clear the list."""
    taken = sorted(set(names))
    names.clear()
    return taken


def _provides(root: Root, package: str, location: Path) -> bool:
    """Return True if the root's files include the package that Python finds at `location`, and record its place."""
    if not location.is_relative_to(root.source):
        return False
    name = str(location.relative_to(root.source))
    is_there = name in root.files or any(file.startswith(f"{name}/") for file in root.files)
    if is_there:
        root.packages[package] = str(Path(name).parent)
    return is_there


def _named(roots: Iterable[Root]) -> list[Root]:
    """Return the roots, sorted, with unique names for their folders in the copy that are readable in a traceback."""
    taken: set[str] = set()
    listed = sorted(roots, key=lambda root: root.source)
    for root in listed:
        plain = re.sub(r"[^A-Za-z0-9._-]", "_", Path(root.source).name).strip(".")[:50] or "code"
        number = 1
        root.name = plain
        while root.name in taken:
            number += 1
            root.name = f"{plain}-{number}"
        taken.add(root.name)
    return listed


def _read(roots: Sequence[Root], config: Mapping[str, Any]) -> Snapshot:
    _check_size(roots, config)
    left_out: list[str] = []
    notes: list[str] = []
    contents: dict[str, tuple[str, bytes]] = {}
    for root in roots:
        infos: dict[str, os.stat_result] = {}
        contents |= {f"{root.name}/{name}": content for name, content in _contents(root, left_out, infos)}
        contents |= {f"{root.name}/{name}": (LINK, os.fsencode(f"{root.source}/{name}")) for name in root.links}
        notes += check_owners(root.source, places_of(root.source, root.packages), infos)
        left_out += [f"{root.source}/{name}" for name in root.secrets]
    if linked := [name.partition("/")[2] for name in _linked(contents)]:
        notes.append(f"The frozen code has links to data that is read as it is when a run starts: {_listed(linked)}.")
    starters = {name: hashlib.sha256(content).hexdigest() for name, content in starter_code().items()}
    manifest = {
        "format": _FORMAT,
        "main": starters[MAIN],
        "import_path": starters[IMPORT_PATH],
        "unpacking": starters[UNPACKING],
        "roots": [{"name": root.name, "source": root.source, "packages": root.packages} for root in roots],
        "files": {name: [mode, hashlib.sha256(content).hexdigest()] for name, (mode, content) in contents.items()},
    }
    return Snapshot(
        digest=manifest_digest(manifest),
        manifest=manifest,
        contents=contents,
        roots=tuple(roots),
        left_out=tuple(left_out),
        notes=tuple(notes),
    )


def _linked(contents: Mapping[str, tuple[str, bytes]]) -> list[str]:
    """Return the names of the links that lead out of the copy: links within it are relative."""
    return [name for name, (mode, target) in contents.items() if mode == LINK and target.startswith(b"/")]


def starter_code() -> dict[str, bytes]:
    """Return the content of the files that open an archive on the node, by their names in it."""
    files = {MAIN: frozen_worker.__file__, IMPORT_PATH: import_path.__file__, UNPACKING: unpacking.__file__}
    return {name: Path(file).read_bytes() for name, file in files.items()}


def _contents(
    root: Root, left_out: list[str], infos: dict[str, os.stat_result]
) -> Iterator[tuple[str, tuple[str, bytes]]]:
    """Yield the name, mode and content of each frozen file.

    Args:
        left_out: gets the paths of links that are not frozen.
        infos: gets the lstat result of each frozen file.
    """
    folders = {name[:end] for name in root.files for end in range(len(name)) if name[end] == "/"}
    frozen = {*root.files, *folders}
    for name in root.files:
        path = Path(root.source, name)
        if path.is_symlink():
            # A relative target leads into the copy, not back to the files that are being edited.
            goal = os.path.realpath(path)
            if os.path.relpath(goal, root.source) in frozen and not Path(goal).is_symlink():  # no loop
                target = os.path.relpath(goal, os.path.realpath(path.parent))
                infos[name] = path.lstat()
                yield name, (LINK, os.fsencode(target))
            elif is_data(path) and not secrets_among([os.path.relpath(goal, "/")]):
                yield name, (LINK, os.fsencode(goal))
            else:
                left_out.append(str(path))
            continue
        read = read_file(path)
        if read is not None:
            infos[name], content = read
            yield name, ("755" if infos[name].st_mode & stat.S_IXUSR else "644", content)


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


def _check_size(roots: Sequence[Root], config: Mapping[str, Any]) -> None:
    """Refuse too much code before anything is read, because the login node's memory is shared.

    Raises:
        ConfigError: the code exceeds `snapshot.max_files` or `snapshot.max_mb`.
    """
    num_files = sum(len(root.files) for root in roots)
    if num_files > config["max_files"]:
        largest = max(roots, key=lambda root: len(root.files))
        raise ConfigError(too_many(Path(largest.source), largest.files, config["max_files"]))
    sizes: list[tuple[int, str]] = []
    for root in roots:
        for name in root.files:
            with contextlib.suppress(OSError):  # deleted, though git still lists it
                sizes.append((os.lstat(f"{root.source}/{name}").st_size, name))
    total = sum(size for size, _ in sizes)
    if total > config["max_mb"] * 1e6:
        biggest = sorted(sizes, reverse=True)[:5]
        listed = ", ".join(f"{name!r} ({size / 1e6:.1f} MB)" for size, name in biggest)
        raise ConfigError(
            f"the code to freeze in {', '.join(root.source for root in roots)} has {total / 1e6:.1f} MB in "
            f"{num_files} files, more than snapshot.max_mb={config['max_mb']:g}. The biggest: {listed}. Leave out what "
            f"is not code: 'snapshot.exclude=[{json.dumps(biggest[0][1])}]', or .gitignore; or raise snapshot.max_mb; "
            "or snapshot=off."
        )


_MOST_COMMANDS, _MOST_NAMES = 20, 8


def frozen_of_command(specs: Sequence[RunSpec], code: Snapshot | None) -> Iterator[str]:
    """Yield a sentence on the frozen parts of the runs' commands; none for apps, and with snapshot=off.

    Args:
        code: the frozen code; None if all code is installed.
    """
    configs = [spec.config for spec in specs if spec.config["snapshot"]["mode"] != SnapshotMode.off.value]
    commands = sorted(commands_of(configs))[:_MOST_COMMANDS]
    if not commands:
        return
    frozen: dict[str, None] = {}
    other: dict[str, None] = {}
    for command, folder in commands:
        arguments = split_command(command)
        place = place_of_text(arguments)
        for name in (*script_files(arguments), *shell_files(arguments)):
            (frozen if _is_frozen(Path(folder, name), code) else other)[name] = None
        for module in module_names(arguments):
            if (package := module.partition(".")[0]) in (() if code is None else _packages(code)):
                frozen[f"-m {module}"] = None
            elif not locations_of(package):
                other[f"-m {module}"] = None
        inside: list[str] = []
        if place is not None:
            other |= dict.fromkeys(runs_of(arguments[place]).unclear)
            inside = plain_words(arguments[place])
        other |= dict.fromkeys(_data([*arguments, *inside], folder, {*frozen, *other}))
    is_own = any(is_of_run(config["train"].get("command_dir")) for config in configs)
    yield _sentence(list(frozen), list(other), is_own)


def _packages(code: Snapshot) -> set[str]:
    return {package for root in code.roots for package in root.packages}


def _is_frozen(path: Path, code: Snapshot | None) -> bool:
    if code is None:
        return False
    places = (os.path.normpath(path.absolute()), os.path.realpath(path))
    return any(
        f"{root.name}/{os.path.relpath(place, root.source)}" in code.contents
        for place in places for root in code.roots
    )  # fmt: skip


def _data(words: Sequence[str], folder: str, known: set[str]) -> Iterator[str]:
    """Yield the arguments, and the values of options, that name an existing file or folder."""
    for word in words[1:]:
        name = word.partition("=")[2] if word.startswith("-") else word
        if not name or "{" in name or name in known or name in (".", "..", "/"):
            continue
        path = Path(folder, name)
        if is_file(path) or is_folder(path):
            yield name


def _sentence(frozen: list[str], other: list[str], is_own: bool) -> str:
    are = "is" if len(frozen) == 1 else "are"
    said = f"train.command: {_listed(frozen)} {are} frozen." if frozen else "train.command: nothing of it is frozen."
    if other:
        said += f" Not frozen, but read as it is when a run starts: {_listed(other)}."
        relative = [name for name in other if not name.startswith(("/", "-", "$"))]
        if is_own and relative:
            said += f" Runs start in folders of their own: write the whole path of {_listed(relative)}."
    return said


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
