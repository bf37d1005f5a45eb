"""`train.command`: a user's own program, as words with placeholders that are filled in without a shell.

    python train.py --lr {params.lr} --out {run.dir}

A placeholder is a key of the configuration, or a place of the run (`RUN_PLACES`). `{{` and `}}` are braces, and
`${...}` is left to the program, such as `sh -c`. `{run.resume:WORDS}` means WORDS once the run has a checkpoint, and
nothing before; `{run.resume[FILE]:WORDS}` means WORDS once FILE, in the run's folder, is not empty.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_trainer.config.resume_contract import flatten
from hpc_trainer.config.schema.train import CommandPer, LoopConfig, TrainConfig
from hpc_trainer.config.shell_text import SCRIPTS, place_of_text, runs_of
from hpc_trainer.config.user_files import is_folder
from hpc_trainer.errors import ConfigError, did_you_mean

RUN_PLACES = {
    "run.id": "the run's id",
    "run.dir": "the run's folder",
    "run.checkpoints": "a folder in there for checkpoints of the program's own",
}
"""Placeholders that are known when the run starts, and their meanings."""
_BRACES = re.compile(r"\$\{[^{}]*\}|\{\{|\}\}|\{([^{}]*)\}|[{}]")
_RAW_WORD = re.compile(r"(?:'[^']*'|\"(?:\\.|[^\"\\])*\"|\\.|[^\s'\"\\])+")
_OF_A_SHELL = frozenset({"&&", "||", "|", ";", "&", ">", ">>", "<", "2>", "&>", "2>&1"})
_RESUME = re.compile(r"\$\{[^{}]*\}|\{\{|\}\}|(\{run\.resume(?:\[([^\[\]{}]+)\])?:((?:[^{}]|\{[^{}]*\})*)\})")
OWN_CHECKPOINTS = ""
"""Condition of a `{run.resume:..}` that names no file: the run's folder for checkpoints of the program's own."""
OWN_FOLDER = "run"
"""Value of `train.command_dir` for the run's own folder."""


def resumed(command: str, holds: Callable[[str], bool] = lambda _: True) -> str:
    """Return a command with each `{run.resume:WORDS}` replaced by its words, or by nothing.

    Args:
        holds: returns True if a file, as the placeholder names it, or `OWN_CHECKPOINTS` is not empty.
    """

    def one(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0]
        return match[3] if holds(match[2] or OWN_CHECKPOINTS) else ""

    return _RESUME.sub(one, command)


def resume_files(command: str) -> list[str]:
    """Return the files that a command's `{run.resume..}` look at, `OWN_CHECKPOINTS` among them."""
    return list(dict.fromkeys(match[2] or OWN_CHECKPOINTS for match in _RESUME.finditer(command) if match[1]))


def split_command(command: str) -> list[str]:
    """Return the words of a command, as a resumed run has them, with their placeholders.

    Raises:
        ValueError: a quote is not closed.
    """
    return shlex.split(resumed(command))


def placeholders(command: str) -> Iterator[str]:
    """Yield the names between single braces, in order.

    Raises:
        ValueError: a brace is unmatched.
    """
    for match in _BRACES.finditer(resumed(command)):
        if match[1] is not None:
            yield match[1]
        elif match[0] in "{}":
            raise ValueError(f"the brace at character {match.start() + 1} is alone")


def fill(word: str, value_of: Callable[[str], str]) -> str:
    """Return `word` with each placeholder replaced; the result stays one word, whatever the values hold."""

    def one(match: re.Match[str]) -> str:
        if match[1] is not None:
            return value_of(match[1])
        return {"{{": "{", "}}": "}"}.get(match[0], match[0])

    return _BRACES.sub(one, word)


def values_of(config: Mapping[str, Any], places: Mapping[str, str]) -> Callable[[str], str]:
    """Return a function that maps a placeholder to its value: a text as it is, else JSON (0.001, true, null, [1, 2]).

    Args:
        config: a frozen configuration.
        places: `RUN_PLACES` of one run.
    """

    def value_of(name: str) -> str:
        if name in places:
            return places[name]
        value: Any = config
        for part in name.split("."):
            if not isinstance(value, Mapping) or part not in value:
                raise ConfigError(f"train.command: {unknown(name, config)}")
            value = value[part]
        return value if isinstance(value, str) else json.dumps(value)

    return value_of


def unknown(name: str, config: Mapping[str, Any]) -> str:
    """Return the problem with a placeholder that names nothing."""
    names = [*RUN_PLACES, *flatten(config)]
    if name.startswith("run.resume"):
        return (
            f"{{{name}}} needs the words of a program that goes on, as {{run.resume:--init_from=resume}}, or "
            "{run.resume[last.pt]:--resume} with the file, of the run's folder, that must be there."
        )
    if not name.strip():
        return "{} names nothing. Write the key, as {params.lr}; {{}} for braces."
    own = sorted(
        (key for key in names if key.rpartition(".")[2] == name), key=lambda key: not key.startswith("params.")
    )
    nearest = f"Did you mean {own[0]}? " if own else did_you_mean(name, names)
    head = name.partition(".")[0]
    if head == "params":
        problem = f"has no value: add {name}=VALUE. {nearest}"
    elif head == "run":
        problem = f"is no place of the run; these are {', '.join(RUN_PLACES)}. {nearest}"
    else:
        problem = (
            f"is no key of the configuration, and no place of the run. {nearest}Values for your program are params: "
            f"{{params.{re.sub(r'[^A-Za-z0-9_]+', '_', name).strip('_') or 'x'}}} and params.NAME=VALUE; places are "
            f"{', '.join(RUN_PLACES)}. "
        )
    return f"{{{name}}} {problem}Write {{{{ and }}}} for braces."


def shell_words(command: str) -> list[str]:
    """Return the unquoted words that only a shell reads, such as `&&` and `>`; no program was meant to get them."""
    return [word for word in _RAW_WORD.findall(command) if word in _OF_A_SHELL]


def script_files(words: Sequence[str]) -> list[str]:
    """Return the words that name files which the command runs: the first word, if it is a path, and scripts."""
    text = place_of_text(words)
    plain = [word for place, word in enumerate(words) if place != text and not any(mark in word for mark in "{}")]
    first = [word for word in words[:1] if "/" in word and word in plain]
    return list(dict.fromkeys([*first, *(word for word in plain if word.endswith(SCRIPTS))]))


def shell_files(words: Sequence[str]) -> list[str]:
    """Return the scripts that the text of `sh -c` runs. The text may create them itself, so they need not exist."""
    place = place_of_text(words)
    return [] if place is None else list(dict.fromkeys(name for _, _, name in runs_of(words[place]).scripts))


def module_names(words: Sequence[str]) -> list[str]:
    """Return the names of modules that Python runs, which follow `-m`."""
    place = place_of_text(words)
    inside = [] if place is None else runs_of(words[place]).modules
    return [*(after for word, after in itertools.pairwise(words) if word == "-m" and "{" not in after), *inside]


def program_name(command: str) -> str:
    """Return the name of the program that a command runs, also in the text of `sh -c`.

    It is `train` for `torchrun --nproc-per-node 2 train.py`, and `fit` for `python -m my.fit`.
    """
    words = shlex.split(resumed(command, lambda _: False))
    text = place_of_text(words)
    inside = [] if text is None else runs_of(words[text]).names()
    if inside:
        return inside[0]
    scripts = [word for place, word in enumerate(words) if place != text and word.endswith(SCRIPTS) and "{" not in word]
    named = [Path(script).stem for script in scripts] or [name.rpartition(".")[2] for name in module_names(words)]
    return (named or [Path(words[0]).stem])[0]


def is_of_shell(command: str) -> bool:
    """Return True if a shell reads a part of the command (`sh -c`)."""
    return place_of_text(shlex.split(resumed(command))) is not None


def is_of_run(folder: str | None) -> bool:
    """Return True if `train.command_dir` is a folder of each run's own: `{run.dir}`, or `run` if there is no ./run."""
    return folder is not None and ("{run." in folder or (folder == OWN_FOLDER and not is_folder(Path(folder))))


def code_folder(train: LoopConfig) -> str:
    """Return the folder that scripts of the command are relative to."""
    start = os.curdir if is_of_run(train.command_dir) else train.command_dir
    return train.command_from or start or os.curdir


def is_one_a_node(config: TrainConfig) -> bool:
    """Return True if a node has one task: a program that starts its own ranks."""
    return config.train.command is not None and config.train.command_per is CommandPer.node
