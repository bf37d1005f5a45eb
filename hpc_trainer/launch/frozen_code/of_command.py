"""Note for `plan` and `submit` on files of `train.command`: frozen files, and files that a run reads at its start."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpc_trainer.config.data_files.look import is_file, is_folder
from hpc_trainer.config.program import is_of_run, module_names, script_files, shell_files, split_command
from hpc_trainer.config.schema.snapshot import SnapshotMode
from hpc_trainer.config.shell_text import place_of_text, plain_words, runs_of
from hpc_trainer.launch.frozen_code.snapshot import Snapshot, commands_of, locations_of
from hpc_trainer.runs.spec import RunSpec

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
        words = split_command(command)
        place = place_of_text(words)
        for name in (*script_files(words), *shell_files(words)):
            (frozen if _is_frozen(Path(folder, name), code) else other)[name] = None
        for module in module_names(words):
            if (package := module.partition(".")[0]) in (() if code is None else _packages(code)):
                frozen[f"-m {module}"] = None
            elif not locations_of(package):
                other[f"-m {module}"] = None
        inside: list[str] = []
        if place is not None:
            other |= dict.fromkeys(runs_of(words[place]).unclear)
            inside = plain_words(words[place])
        other |= dict.fromkeys(_data([*words, *inside], folder, {*frozen, *other}))
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
    said = f"train.command: frozen is {_listed(frozen)}." if frozen else "train.command: nothing of it is frozen."
    if other:
        said += f" Not frozen, but read as it is when a run starts: {_listed(other)}."
        relative = [name for name in other if not name.startswith(("/", "-", "$"))]
        if is_own and relative:
            said += f" Runs start in folders of their own: write the whole path of {_listed(relative)}."
    return said


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
