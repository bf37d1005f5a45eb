"""`train.command`: a program of a person's own, as words with placeholders that we fill in; no shell has a part in it.

    python train.py --lr {params.lr} --out {run.dir}

A placeholder is a key of the configuration, or a place of the run (`RUN_PLACES`). `{{` and `}}` are braces, and
`${...}` is left to the program, as `sh -c`.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_trainer.config.resume_contract import flatten
from hpc_trainer.config.schema.train import CommandPer, TrainConfig
from hpc_trainer.errors import ConfigError, did_you_mean

RUN_PLACES = {
    "run.id": "the run's id",
    "run.dir": "the run's folder",
    "run.checkpoints": "a folder in there for checkpoints of the program's own",
}
"""Placeholders that are known when the run starts, and what they stand for."""
_BRACES = re.compile(r"\$\{[^{}]*\}|\{\{|\}\}|\{([^{}]*)\}|[{}]")
_RAW_WORD = re.compile(r"(?:'[^']*'|\"(?:\\.|[^\"\\])*\"|\\.|[^\s'\"\\])+")
_OF_A_SHELL = frozenset({"&&", "||", "|", ";", "&", ">", ">>", "<", "2>", "&>", "2>&1"})
_SCRIPTS = (".py", ".sh", ".bash", ".zsh", ".R", ".jl", ".pl", ".rb")
"""How names end of files that a person edits and an interpreter runs."""


def placeholders(command: str) -> Iterator[str]:
    """The names between single braces, in order.

    Raises:
        ValueError: a brace is alone.
    """
    for found in _BRACES.finditer(command):
        if found[1] is not None:
            yield found[1]
        elif found[0] in "{}":
            raise ValueError(f"the brace at character {found.start() + 1} is alone")


def fill(word: str, value_of: Callable[[str], str]) -> str:
    """`word` with each placeholder replaced; what it is replaced by stays one word, whatever it holds."""

    def one(found: re.Match[str]) -> str:
        if found[1] is not None:
            return value_of(found[1])
        return {"{{": "{", "}}": "}"}.get(found[0], found[0])

    return _BRACES.sub(one, word)


def values_of(config: Mapping[str, Any], places: Mapping[str, str]) -> Callable[[str], str]:
    """What a placeholder stands for: a text as it is, anything else as JSON (0.001, true, null, [1, 2]).

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
    """What is wrong with a placeholder that names nothing."""
    known = [*RUN_PLACES, *flatten(config)]
    if not name.strip():
        return "{} names nothing. Write the key, as {params.lr}; {{}} for braces."
    own = sorted(
        (key for key in known if key.rpartition(".")[2] == name), key=lambda key: not key.startswith("params.")
    )
    nearest = f"Did you mean {own[0]}? " if own else did_you_mean(name, known)
    head = name.partition(".")[0]
    if head == "params":
        told = f"has no value: add {name}=VALUE. {nearest}"
    elif head == "run":
        told = f"is no place of the run; these are {', '.join(RUN_PLACES)}. {nearest}"
    else:
        told = (
            f"is no key of the configuration, and no place of the run. {nearest}Values for your program are params: "
            f"{{params.{re.sub(r'[^A-Za-z0-9_]+', '_', name).strip('_') or 'x'}}} and params.NAME=VALUE; places are "
            f"{', '.join(RUN_PLACES)}. "
        )
    return f"{{{name}}} {told}Write {{{{ and }}}} for braces."


def shell_words(command: str) -> list[str]:
    """Words without quotes that mean something to a shell alone, as `&&` and `>`: no program was meant to get them."""
    return [word for word in _RAW_WORD.findall(command) if word in _OF_A_SHELL]


def script_files(words: Sequence[str]) -> list[str]:
    """Those of the words that name files which the command runs: the first, if it is a path, and scripts."""
    plain = [word for word in words if not any(mark in word for mark in "{}")]
    first = [word for word in words[:1] if "/" in word and word in plain]
    return list(dict.fromkeys([*first, *(word for word in plain if word.endswith(_SCRIPTS))]))


def module_names(words: Sequence[str]) -> list[str]:
    """What follows `-m`: modules that Python runs."""
    return [after for word, after in itertools.pairwise(words) if word == "-m" and "{" not in after]


def program_name(command: str) -> str:
    """What the program is called: `train` of `torchrun --nproc-per-node 2 train.py`, `fit` of `python -m my.fit`."""
    words = shlex.split(command)
    scripts = [word for word in words if word.endswith(_SCRIPTS) and "{" not in word]
    named = [Path(each).stem for each in scripts] or [each.rpartition(".")[2] for each in module_names(words)]
    return (named or [Path(words[0]).stem])[0]


def is_one_a_node(config: TrainConfig) -> bool:
    """True if a node has one task: a program that starts its own ranks."""
    return config.train.command is not None and config.train.command_per is CommandPer.node
