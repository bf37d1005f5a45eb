"""`train.command`: a user's own program, as arguments with placeholders that are filled in without a shell.

    python train.py --lr {params.lr} --out {run.dir}

A placeholder is a key of the configuration, or a place of the run (`RUN_PLACES`). `{after.NAME.checkpoint}` is the
newest checkpoint of a run that is followed, and `{after.NAME.run}` its name, SWEEP/RUN. `{{` and `}}` are braces, and
`${...}` is left to the program, such as `sh -c`. `{run.resume:WORDS}` means WORDS once the run has a checkpoint, and
nothing before; `{run.resume[FILE]:WORDS}` means WORDS once FILE, in the run's folder, is not empty.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from hpc_trainer.config import script_words
from hpc_trainer.config.load import to_plain
from hpc_trainer.config.resume_contract import flatten
from hpc_trainer.config.schema.cluster import EnvironmentConfig, Executor
from hpc_trainer.config.schema.train import CommandEnv, CommandPer, LoopConfig, TrainConfig
from hpc_trainer.config.user_files import is_file, is_folder
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
_FOLLOWED = re.compile(r"after\.(.+)\.(checkpoint|run)")
_RESUME = re.compile(r"\$\{[^{}]*\}|\{\{|\}\}|(\{run\.resume(?:\[([^\[\]{}]+)\])?:((?:[^{}]|\{[^{}]*\})*)\})")
OWN_CHECKPOINTS = ""
"""Condition of a `{run.resume:..}` that names no file: the run's folder for checkpoints of the program's own."""
OWN_FOLDER = "run"
"""Value of `train.command_dir` for the run's own folder."""


def resumed(command: str, holds: Callable[[str], bool] = lambda _: True) -> str:
    """Return a command with each `{run.resume:WORDS}` replaced by its WORDS, or removed.

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
            raise ValueError(f"the brace at character {match.start() + 1} is unmatched")


def followed_places(command: str) -> dict[str, tuple[str, str]]:
    """Return {after.NAME.checkpoint} and {after.NAME.run} of a command, each with NAME and its last word.

    NAME is a run that this one follows (docs/chain.md).
    """
    try:
        matches = [(name, _FOLLOWED.fullmatch(name)) for name in placeholders(command)]
    except ValueError:  # an unmatched brace, which `command_problems` reports
        return {}
    return {name: (match[1], match[2]) for name, match in matches if match is not None}


def fill(word: str, value_of: Callable[[str], str]) -> str:
    """Return `word` with each placeholder replaced; the result stays one word, with any characters in the values."""

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
            f"{{{name}}} needs the arguments with which the program resumes, as {{run.resume:--init_from=resume}}, or "
            "{run.resume[last.pt]:--resume} with the file of the run's folder from which it resumes."
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
        problem = f"is not a place of the run; its places are {', '.join(RUN_PLACES)}. {nearest}"
    else:
        problem = (
            f"is neither a key of the configuration nor a place of the run. {nearest}Values for your program are "
            f"params: {{params.{re.sub(r'[^A-Za-z0-9_]+', '_', name).strip('_') or 'x'}}} and params.NAME=VALUE; "
            f"places are {', '.join(RUN_PLACES)}. "
        )
    return f"{{{name}}} {problem}Write {{{{ and }}}} for braces."


def shell_words(command: str) -> list[str]:
    """Return the unquoted words that only a shell reads, such as `&&` and `>`: no program expects them."""
    return [word for word in _RAW_WORD.findall(command) if word in _OF_A_SHELL]


def script_files(arguments: Sequence[str]) -> list[str]:
    """Return the words that name files which the command runs: the first word, if it is a path, and scripts."""
    text = place_of_text(arguments)
    plain = [word for place, word in enumerate(arguments) if place != text and not any(mark in word for mark in "{}")]
    first = [word for word in arguments[:1] if "/" in word and word in plain]
    return list(dict.fromkeys([*first, *(word for word in plain if word.endswith(SCRIPTS))]))


def shell_files(arguments: Sequence[str]) -> list[str]:
    """Return the scripts that the text of `sh -c` runs. The text may create them itself, so they need not exist."""
    place = place_of_text(arguments)
    return [] if place is None else list(dict.fromkeys(name for _, _, name in runs_of(arguments[place]).scripts))


def module_names(arguments: Sequence[str]) -> list[str]:
    """Return the names of modules that Python runs, which follow `-m`."""
    place = place_of_text(arguments)
    inside = [] if place is None else runs_of(arguments[place]).modules
    return [*(after for word, after in itertools.pairwise(arguments) if word == "-m" and "{" not in after), *inside]


def program_name(command: str) -> str:
    """Return the name of the program that a command runs, also in the text of `sh -c`.

    It is `train` for `torchrun --nproc-per-node 2 train.py`, and `fit` for `python -m my.fit`.
    """
    arguments = shlex.split(resumed(command, lambda _: False))
    text = place_of_text(arguments)
    inside = [] if text is None else runs_of(arguments[text]).names()
    if inside:
        return inside[0]
    scripts = [
        word for place, word in enumerate(arguments) if place != text and word.endswith(SCRIPTS) and "{" not in word
    ]
    named = [Path(script).stem for script in scripts] or [name.rpartition(".")[2] for name in module_names(arguments)]
    return (named or [Path(arguments[0]).stem])[0]


def is_of_shell(command: str) -> bool:
    """Return True if a shell reads a part of the command (`sh -c`)."""
    return place_of_text(shlex.split(resumed(command))) is not None


def is_of_run(folder: str | None) -> bool:
    """Return True if each run has its own `train.command_dir`: `{run.dir}`, or `run` if there is no ./run."""
    return folder is not None and ("{run." in folder or (folder == OWN_FOLDER and not is_folder(Path(folder))))


def code_folder(train: LoopConfig) -> str:
    """Return the folder that scripts of the command are relative to."""
    start = os.curdir if is_of_run(train.command_dir) else train.command_dir
    return train.command_from or start or os.curdir


def is_one_a_node(config: TrainConfig) -> bool:
    """Return True if a node has one task: a program that starts its own ranks."""
    return config.train.command is not None and config.train.command_per is CommandPer.node


# Keys that a program run uses, whether its command names them or not.
_OF_EVERY_RUN = frozenset({
    "experiment", "experiment_name", "sweep_name", "seed", "hardware", "cluster", "params", "snapshot", "local",
    "paths", "sweep", "search", "budget", "pool", "trust", "debug", "after", "notify",
})  # fmt: skip
_KEYS = frozenset({
    "train.command", "train.command_per", "train.command_env", "train.command_signal", "train.command_dir",
    "train.command_from", "monitor.heartbeat_every_s", "monitor.telemetry_every_s", "monitor.on_overheat",
    "monitor.move_after_s", "monitor.co2_g_per_kwh", "monitor.prometheus_dir", "parallel.timeout_s",
})  # fmt: skip


def command_problems(config: TrainConfig) -> Iterator[str]:
    """Yield each problem with the command."""
    command = config.train.command or ""
    if config.train.main is not None:
        yield (
            f"train.command and train.main={config.train.main} exclude each other. Keep one: a "
            "main(config, run) of your own, or a program that is started."
        )
    if is_one_a_node(config) and config.train.command_env is CommandEnv.torchrun:
        yield (
            "train.command_env=torchrun has no effect with train.command_per=node: the program starts its ranks and "
            "numbers them itself. Leave one of the two out."
        )
    if config.train.command_env is CommandEnv.tensorflow and "TF_CONFIG" in config.cluster.env:
        yield (
            "cluster.env.TF_CONFIG is replaced by the one that train.command_env=tensorflow makes of the run's ranks. "
            "Leave one of the two out."
        )
    yield from script_words.argument_problem("train.command", command)
    try:
        arguments, names = split_command(command), list(placeholders(command))
        first = shlex.split(resumed(command, lambda _: False))[:1]
    except ValueError as error:
        yield (
            f"train.command={script_words.shown(command)}: {error}. Quote words as a shell would; {{{{ and }}}} are "
            "braces outside placeholders."
        )
        return
    if not first or first[0].startswith("-"):
        yield (
            f"train.command={script_words.shown(command)} must begin with a program, as: "
            "python train.py --lr {params.lr}"
        )
        return
    value_of = values_of(to_plain(config), dict.fromkeys((*RUN_PLACES, *followed_places(command)), ""))
    yield from (problem for name in dict.fromkeys(names) for problem in _wrong_place(name, value_of))
    yield from (
        problem for name in placeholders(config.train.command_dir or "") for problem in _wrong_place(name, value_of)
    )
    folder = Path(code_folder(config.train)).expanduser()
    for key in ("command_dir", "command_from"):
        given = getattr(config.train, key)
        if given is not None and not is_of_run(given) and not is_folder(Path(given).expanduser()):
            yield f"train.{key}={given}: there is no such folder."
            return
    if is_of_run(config.train.command_from):
        yield "train.command_from must be a folder that exists when the run is submitted. Name one, or leave it out."
        return
    for word in shell_words(command)[:1]:
        yield (
            f"train.command: {word} is shell syntax, but no shell reads the command. Write "
            f"sh -c {shlex.quote(command)}."
        )
    yield from _no_program(config, arguments[0], folder)
    for name in script_files(arguments):
        if not is_file(folder / name):
            yield (
                f"train.command runs {name}, and {folder.absolute()} has no such file. Submit from the folder that it "
                "is relative to, set train.command_dir to that folder, or write the full path."
            )


def _no_program(config: TrainConfig, word: str, folder: Path) -> Iterator[str]:
    """Yield the problem with the first word. The PATH of this process is not that of a node."""
    if "{" in word:
        return
    if "/" in word:
        file = folder / word
        if is_file(file) and not os.access(file, os.X_OK):
            yield f"train.command: {word} is not executable: chmod +x {word}, or name its interpreter: python {word}"
        return
    cluster = config.cluster
    is_changed = cluster.setup or "PATH" in cluster.env or cluster.environment != EnvironmentConfig()
    is_here = cluster.executor is Executor.local and not is_changed
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    if is_here and cluster.python is None and shutil.which(word, path=path) is None:
        yield (
            f"train.command: {word} is not a program on this machine's PATH. Write its full path, or sh -c '...' for "
            "a command of the shell."
        )


def _wrong_place(name: str, value_of: Callable[[str], str]) -> Iterator[str]:
    try:
        value_of(name)
    except ConfigError as error:
        yield str(error)


def unread_overrides(config: TrainConfig, overrides: Iterable[str], axes: Iterable[str] = ()) -> Iterator[str]:
    """Yield each override that changes nothing: the command does not read its key, so only the run's name would differ.

    Args:
        config: the configuration of a point.
        overrides: overrides as the user typed them.
        axes: keys that differ over the grid. A fixed key of `params` is allowed, because it may name runs.
    """
    read = set(placeholders(config.train.command or ""))
    for line in overrides:
        key = line.lstrip("+~").partition("=")[0].partition("@")[0]
        head = key.replace("/", ".").partition(".")[0]
        is_read = any(f"{name}.".startswith(f"{key}.") or key.startswith(f"{name}.") for name in read)
        if head == "params" and key in axes and not is_read:
            yield (
                f"{key} is an axis of the grid, but train.command does not use it: all its runs would be the same. "
                f"Pass it on as {{{key}}}, or repeat runs by seed=0,1,2."
            )
        is_read = is_read or (head == "tracker" and config.tracker.name.is_synced)
        if head in _OF_EVERY_RUN or key in _KEYS or is_read or ("." not in key and head not in _SECTIONS):
            continue
        yield (
            f"{line} has no effect: train.command does not use it. Leave it out, or pass it on as {{{key}}}. For "
            "values of your own use params.NAME=VALUE."
        )


_SECTIONS = frozenset(field.name for field in dataclasses.fields(TrainConfig))


def with_command(train: LoopConfig) -> LoopConfig:
    """Return `train` with absolute folders for the program.

    `num_steps` is 0 (unknown) unless the command has the placeholder `{train.num_steps}`.
    """
    is_passed = "train.num_steps" in placeholders(train.command or "")
    start, code = train.command_dir, train.command_from
    if is_of_run(start):
        start, code = "{run.dir}" if start == OWN_FOLDER else start, code or "."
    else:
        start = str(Path(start or ".").expanduser().absolute())
    return dataclasses.replace(
        train,
        command_dir=start,
        command_from=None if code is None else str(Path(code).expanduser().absolute()),
        num_steps=train.num_steps if is_passed else 0,
    )


SCRIPTS = (".py", ".sh", ".bash", ".zsh", ".R", ".jl", ".pl", ".rb")
"""Ends of the names of files that a user edits and an interpreter runs."""
PYTHON = re.compile(r"python[0-9.]*")
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh"})
_OPTION_C = re.compile(r"-[A-Za-z]*c[A-Za-z]*")
_TOKEN = re.compile(
    r"""(?P<comment>(?<!\S)\#[^\n]*)|(?P<redirect>\d*(?:>>|<<|>&|<&|&>|>|<)\|?)|(?P<end>&&|\|\||;;|[;|&()\n])"""
    r"""|(?P<word>(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|\$\{[^}]{0,1000}\}|[^\s'"\\;|&()<>])+)""",
    re.DOTALL,
)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
# A further command begins after these words.
_BEFORE_COMMANDS = frozenset({"if", "then", "elif", "else", "while", "until", "do", "!", "time", "exec", "nohup", "{"})
_RUNNERS = _SHELLS | {
    "torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "srun", "env", "nice", "timeout", "uv", "poetry",
    "conda", "pixi", "ipython", "Rscript", "julia", "perl", "ruby", "source", ".", "numactl", "taskset", "stdbuf",
    "xvfb-run",
}  # fmt: skip
_MOVES = frozenset({"cd", "pushd"})


@dataclass(slots=True)
class ShellRuns:
    """Scripts, modules and Pythons that a text for a shell runs. A place is the index of a character in the text."""

    scripts: list[tuple[int, int, str]] = field(default_factory=list)
    """Begin, end and name of each word that names a script."""
    modules: list[str] = field(default_factory=list)
    """Names of the modules after `python -m`."""
    pythons: list[int] = field(default_factory=list)
    """Ends of the words that name a Python before `-m`."""
    unclear: list[str] = field(default_factory=list)
    """Scripts whose files cannot be known: their names hold a variable, or the shell has changed its folder."""

    def names(self) -> list[str]:
        """Return the names of the programs: scripts without their suffixes, then modules without their packages."""
        scripts = [*(word for _, _, word in self.scripts), *(raw.strip("'\"") for raw in self.unclear)]
        return [*(PurePath(word).stem for word in scripts), *(module.rpartition(".")[2] for module in self.modules)]


def place_of_text(arguments: Sequence[str]) -> int | None:
    """Return the index of the word that a shell reads as its commands, after `sh -c`; None if there is none."""
    for place, word in enumerate(arguments):
        if PurePath(word).name not in _SHELLS:
            continue
        rest = place + 1
        is_text = False
        while rest < len(arguments) and arguments[rest][:1] in "-+" and len(arguments[rest]) > 1:
            is_text = is_text or _OPTION_C.fullmatch(arguments[rest]) is not None
            takes_name = arguments[rest].endswith("o") and not arguments[rest].startswith("--")
            rest += 2 if takes_name else 1
        if is_text and rest < len(arguments):
            return rest
    return None


def runs_of(text: str) -> ShellRuns:
    """Find the scripts and modules that a text runs: the first one of each command that runs any."""
    runs = ShellRuns()
    has_moved = False
    for command in _commands(text):
        parts = [(begin, end, _plain(raw), raw) for begin, end, raw in command]
        while parts and (_ASSIGNMENT.match(parts[0][3]) or parts[0][3] in _BEFORE_COMMANDS):
            parts = parts[1:]
        if not parts:
            continue
        name = PurePath(parts[0][2] or "").name
        is_script = "/" in parts[0][3] and parts[0][3].endswith(SCRIPTS)
        if not is_script and not (PYTHON.fullmatch(name) or name in _RUNNERS):
            has_moved = has_moved or name in _MOVES
            continue
        for place, (begin, end, plain, raw) in enumerate(parts):
            if raw == "-m" and place and place + 1 < len(parts) and parts[place + 1][2]:
                runs.modules.append(parts[place + 1][2] or "")
                if PYTHON.fullmatch(PurePath(parts[place - 1][2] or "").name):
                    runs.pythons.append(parts[place - 1][1])
                break
            if (plain or raw.strip("'\"")).endswith(SCRIPTS):
                if plain is None or (has_moved and not plain.startswith("/")):
                    runs.unclear.append(raw)
                else:
                    runs.scripts.append((begin, end, plain))
                break
    return runs


def plain_words(text: str) -> list[str]:
    """Return all words of a text in which neither a shell nor hpc-trainer would substitute anything."""
    return [word for command in _commands(text) for _, _, raw in command if (word := _plain(raw))]


def _commands(text: str) -> Iterator[list[tuple[int, int, str]]]:
    """Yield the words of each simple command with their places, without redirections."""
    tokens: list[tuple[int, int, str]] = []
    is_goal = False
    for token in _TOKEN.finditer(text):
        if token.lastgroup == "word":
            if not is_goal:
                tokens.append((token.start(), token.end(), token[0]))
            is_goal = False
        elif token.lastgroup == "redirect":
            is_goal = True
        elif token.lastgroup == "end":
            yield tokens
            tokens, is_goal = [], False
    yield tokens


def _plain(raw: str) -> str | None:
    """Return a word without its quotes; None if a shell or hpc-trainer would substitute something in it."""
    if any(sign in raw for sign in "$`*?{"):
        return None
    try:
        (word,) = shlex.split(raw) or [""]
    except ValueError:
        return None
    return word
