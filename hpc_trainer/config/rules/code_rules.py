"""Rules about a user's own code: names that may be used, and `train.command` as far as a plan can judge it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from hpc_trainer.config import script_words
from hpc_trainer.config.keys import DECLARED
from hpc_trainer.config.load import to_plain
from hpc_trainer.config.program import (
    OWN_FOLDER,
    RUN_PLACES,
    code_folder,
    is_of_run,
    is_one_a_node,
    placeholders,
    resumed,
    script_files,
    shell_words,
    split_command,
    values_of,
)
from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.config.schema.train import CommandEnv, LoopConfig, TrainConfig
from hpc_trainer.config.store import VARIANTS
from hpc_trainer.config.targets import check_target
from hpc_trainer.config.user_files import is_file, is_folder
from hpc_trainer.errors import ConfigError

_MAY_NAME_CODE = (
    ("model", "_target_"), ("data", "_target_"), ("task", "_target_"), ("optim", "_target_"), ("train", "main"),
)  # fmt: skip
MISSING = "???"
"""Value of a choice for a user's own code: its name has to be given."""
_MOST_MEANT = 3


def targets_of(config: TrainConfig | Mapping[str, Any]) -> dict[str, str]:
    """Return the code names in a configuration, typed or plain, by key: `model._target_`, `train.main`."""
    if isinstance(config, TrainConfig):
        targets = {f"{group}.{key}": getattr(getattr(config, group), key, None) for group, key in _MAY_NAME_CODE}
    else:
        targets = {f"{group}.{key}": config.get(group, {}).get(key) for group, key in _MAY_NAME_CODE}
        replayed = config.get("replay", {}).get("data", [])
        targets |= {f"replay.data[{place}]._target_": data.get("_target_") for place, data in enumerate(replayed)}
    return {key: str(target) for key, target in targets.items() if target is not None}


def packages_of(config: TrainConfig) -> list[str]:
    """Return the top-level packages whose sources decide what a run does: ours, and those that it names."""
    named = {target.partition(".")[0] for target in targets_of(config).values()} - {"torch"}
    return sorted({"hpc_trainer", *named, *config.snapshot.packages})


def target_problems(config: TrainConfig) -> Iterator[str]:
    """Yield each problem with a name of code: not on the allow-list, or used where something shipped is built."""
    for key, target in targets_of(config).items():
        problem = check_target(key, target, config.trust) or _shipped_problem(config, key, target)
        if problem:
            yield problem


def _shipped_problem(config: TrainConfig, key: str, target: str) -> str | None:
    """Return the problem with a choice that fixes what is built; a user's own loop may read any key as it likes."""
    group, _, name = key.partition(".")
    if config.train.main is not None or name != "_target_":
        return None
    section: Any = getattr(config, group)
    built = {kind.name: _built_by(kind) for kind in (cls() for cls in VARIANTS[group].values())}
    own = _built_by(type(section)())
    if own in (target, MISSING):
        return None
    shipped = next((choice for choice, code in built.items() if code == target), None)
    use = f"{group}={shipped}" if shipped else f"{group}=custom {key}={target}"
    return (
        f"{key}={target} is for {group}=custom: {group}={section.name} is built by {own}. Use {use}, or leave {key} "
        "out."
    )


def _built_by(section: Any) -> str | None:
    """Return the code that a section names; None if it names none, as for a shipped optimizer."""
    return getattr(section, "_target_", None)


def unread_params(
    config: TrainConfig, overrides: Iterable[str], axes: Iterable[str], is_taken_from: Callable[[], bool]
) -> Iterator[str]:
    """Yield each value of `params` that nothing reads: it would only give the run another name.

    Args:
        config: the configuration of a point.
        overrides: overrides as the user typed them.
        axes: keys that differ over the grid.
        is_taken_from: True if another key takes its value from `params`, as ${params.lr}; called once at most.
    """
    lines = [override.lstrip("+") for override in overrides]
    given = [line for line in lines if line.partition("=")[0].partition(".")[0] == "params"]
    if not given or config.train.main is not None or is_taken_from():
        return
    for line in given:
        key, _, value = line.partition("=")
        is_axis = key in axes
        meant = [name for name in _keys_called(key.rpartition(".")[2], config) if name != key][:_MOST_MEANT]
        ways = meant if is_axis else [f"{name}={value}" for name in meant]
        use = f"Use {' or '.join(ways)}" if ways else "Leave it out"
        yield (
            f"{key if is_axis else line} has no effect: params is for code of your own, and this is "
            f"model={config.model.name} with the shared loop, which reads none. {use}, or take a key's value from it: "
            f"KEY=${{{key}}}."
        )


def _keys_called(name: str, config: TrainConfig) -> Iterator[str]:
    """Yield the keys of this configuration whose last part is `name`."""
    for key in DECLARED:
        if key.rpartition(".")[2] == name:
            with contextlib.suppress(AttributeError):
                attrgetter(key)(config)
                yield key


def param_problems(params: dict[str, Any]) -> tuple[str, ...]:
    """Return the problems with values of `params` that a frozen run cannot hold."""
    return tuple(_not_json("params", params))


def _not_json(key: str, value: Any) -> Iterator[str]:
    """Yield each problem with a value that is not JSON: a frozen run would hand the worker something else."""
    if isinstance(value, dict):
        for name, item in value.items():
            if isinstance(name, str):
                yield from _not_json(f"{key}.{name}", item)
            else:
                yield f"{key} has the key {name!r}, and keys must be texts. Use '{name}' in quotes."
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _not_json(f"{key}[{index}]", item)
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        yield f"{key}={value!r} must be a number, a text, true, false, null, or lists and mappings of them."


# Keys that a program run uses, whether its command names them or not.
_OF_EVERY_RUN = frozenset({
    "experiment", "experiment_name", "sweep_name", "seed", "hardware", "cluster", "params", "snapshot", "local",
    "paths", "sweep", "budget", "trust", "debug",
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
            f"train.command and train.main={config.train.main} are two programs for one run. Keep one: a "
            "main(config, run) of your own, or a program that is started."
        )
    if is_one_a_node(config) and config.train.command_env is CommandEnv.torchrun:
        yield (
            "train.command_env=torchrun has no effect with train.command_per=node: the program starts its ranks "
            "itself, and tells each its rank. Leave one of the two out."
        )
    if config.train.command_env is CommandEnv.tensorflow and "TF_CONFIG" in config.cluster.env:
        yield (
            "cluster.env.TF_CONFIG is replaced by the one that train.command_env=tensorflow makes of the run's ranks. "
            "Leave one of the two out."
        )
    yield from script_words.argument_problem("train.command", command)
    try:
        words, names = split_command(command), list(placeholders(command))
        first = shlex.split(resumed(command, lambda _: False))[:1]
    except ValueError as error:
        yield (
            f"train.command={script_words.shown(command)}: {error}. Quote words as a shell would; {{{{ and }}}} are "
            "braces that are no placeholder."
        )
        return
    if not first or first[0].startswith("-"):
        yield (
            f"train.command={script_words.shown(command)} must begin with a program, as: "
            "python train.py --lr {params.lr}"
        )
        return
    value_of = values_of(to_plain(config), dict.fromkeys(RUN_PLACES, ""))
    yield from (problem for name in dict.fromkeys(names) for problem in _wrong_place(name, value_of))
    yield from (
        problem for name in placeholders(config.train.command_dir or "") for problem in _wrong_place(name, value_of)
    )
    folder = Path(code_folder(config.train)).expanduser()
    for key in ("command_dir", "command_from"):
        given = getattr(config.train, key)
        if given is not None and not is_of_run(given) and not is_folder(Path(given).expanduser()):
            yield f"train.{key}={given} must be a folder; there is none."
            return
    if is_of_run(config.train.command_from):
        yield "train.command_from must be a folder that is there when the run is submitted. Name one, or leave it out."
        return
    for word in shell_words(command)[:1]:
        yield f"train.command: {word} is a shell's, and no shell reads the command. Write sh -c {shlex.quote(command)}."
    yield from _no_program(config, words[0], folder)
    for name in script_files(words):
        if not is_file(folder / name):
            yield (
                f"train.command runs {name}, and {folder.absolute()} has no such file. Submit from the folder that it "
                "is relative to, name that by train.command_dir, or write the whole path."
            )


def _no_program(config: TrainConfig, word: str, folder: Path) -> Iterator[str]:
    """Yield the problem with the first word. The PATH of this process is not that of a node."""
    if "{" in word:
        return
    if "/" in word:
        file = folder / word
        if is_file(file) and not os.access(file, os.X_OK):
            yield f"train.command: {word} is not executable: chmod +x {word}, or name what runs it, as: python {word}"
        return
    cluster = config.cluster
    is_here = cluster.executor is Executor.local and not cluster.setup and "PATH" not in cluster.env
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    if is_here and cluster.python is None and shutil.which(word, path=path) is None:
        yield (
            f"train.command: {word} is no program on this machine's PATH. Write its whole path, or sh -c '...' for "
            "what a shell knows."
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
                f"{key} is an axis of the grid, and train.command does not read it: its runs would all do the same. "
                f"Hand it on: {{{key}}}; or repeat runs by seed=0,1,2."
            )
        is_read = is_read or (head == "tracker" and config.tracker.name.is_synced)
        if head in _OF_EVERY_RUN or key in _KEYS or is_read or ("." not in key and head not in _SECTIONS):
            continue
        yield (
            f"{line} has no effect: the run is train.command, which does not read it. Leave it out, or hand it on: "
            f"{{{key}}}; values of your own are params.NAME=VALUE."
        )


_SECTIONS = frozenset(each.name for each in dataclasses.fields(TrainConfig))


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
