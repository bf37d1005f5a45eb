"""Parameters of submitit in a Python file or in a launcher's YAML, and its other calls.

A Python file is parsed, and never run or imported. A value that the file computes is `Computed`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_trainer.config.user_files import read_given
from hpc_trainer.errors import ConfigError
from hpc_trainer.init_project.source import Computed, Source, last_name

_LARGEST = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """Parameter of submitit with the value that the user wrote."""

    name: str
    value: Any
    line: int | None = None
    is_option: bool = False
    """True for an option of sbatch from `additional_parameters`."""
    condition: str = ""
    """Condition under which the script sets it; empty if always."""
    is_off: bool = False
    """True if the condition is false by the defaults of the script's arguments."""
    is_overridden: bool = False
    """True if a later line sets it to another value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Translation of a parameter or a call, with the reason."""

    line: int | None
    theirs: str
    ours: str = ""
    """Key of hpc_trainer with its value; empty if there is none."""
    note: str = ""


def read_script(path: Path) -> tuple[list[Parameter], list[Row]]:
    """Return the parameters of the executors in a Python file, and rows about its other calls of submitit.

    Raises:
        ConfigError: the file cannot be read, or makes no executor.
    """
    source = Source(path)
    parameters = []
    around = set()
    for call in source.calls("AutoExecutor", "SlurmExecutor", *_HERE):
        kind = last_name(call.func)
        around.add(source.condition(call))
        names = ("folder", "cluster" if kind == "AutoExecutor" else "max_num_timeout")
        for name, given in zip(names, call.args, strict=False):
            parameters.append(Parameter(name=name, value=source.value(given), line=call.lineno))
        parameters += _keyword_parameters(source, call)
        if kind in _HERE:
            parameters.append(Parameter(name="cluster", value="local", line=call.lineno))
    for call in source.calls("update_parameters"):
        condition = source.condition(call)
        for parameter in _keyword_parameters(source, call):
            if condition in around or parameter.condition:
                parameters.append(parameter)
            else:
                parameters.append(replace(parameter, condition=condition, is_off=source.is_off(call)))
    if not parameters:
        raise ConfigError(
            f"{path} makes no AutoExecutor or SlurmExecutor of submitit and calls no update_parameters. Name the file "
            "that does; `init --from FILE` reads a training script."
        )
    return parameters, sorted(_calls(source), key=lambda row: row.line or 0)


def _keyword_parameters(source: Source, call: ast.Call) -> Iterator[Parameter]:
    words = call.keywords
    if last_name(call.func) == "update_parameters":
        words = [*(ast.keyword(arg=None, value=given) for given in call.args), *words]
    for word in words:
        value = source.value(word.value)
        line = word.value.lineno
        if word.arg is not None:
            yield Parameter(name=word.arg, value=value, line=line)
        elif isinstance(value, dict):  # **parameters
            yield from (Parameter(name=str(name), value=item, line=line) for name, item in value.items())
            yield from _set_later(source, ast.unparse(word.value))
        else:
            yield Parameter(name=f"**{ast.unparse(word.value)}", value=Computed(ast.unparse(word.value)), line=line)


def _set_later(source: Source, name: str) -> Iterator[Parameter]:
    """Yield parameters that a script adds to a dict: `parameters["mem_gb"] = 64`, `parameters.update(mem_gb=64)`."""
    for node in source.nodes:
        call = node.value if isinstance(node, ast.Expr) else None
        if isinstance(call, ast.Call) and isinstance(node, ast.stmt) and ast.unparse(call.func) == f"{name}.update":
            parameters = [*(ast.keyword(arg=None, value=given) for given in call.args), *call.keywords]
            for parameter in _keyword_parameters(source, ast.Call(func=call.func, args=[], keywords=parameters)):
                yield replace(parameter, condition=source.condition(node), is_off=source.is_off(node))
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(node, ast.Assign) and isinstance(target, ast.Subscript) and ast.unparse(target.value) == name:
            key = source.value(target.slice)
            if isinstance(key, str):
                yield Parameter(
                    name=key, value=source.value(node.value), line=node.lineno, condition=source.condition(node),
                    is_off=source.is_off(node),
                )  # fmt: skip


_HERE = ("LocalExecutor", "DebugExecutor")
"""Executors of this machine."""
_CALLS = {
    "map_array": "axes of a grid: one `submit` makes the arrays, hpc-trainer submit params.lr=1e-3,1e-2",
    "batch": "axes of a grid: one `submit` makes the arrays",
    "submit": "hpc-trainer submit; it returns at once, and given twice it submits only what is new",
    "result": "hpc-trainer results; submit --wait waits for the runs",
    "results": "hpc-trainer results; submit --wait waits for the runs",
    "wait": "hpc-trainer submit --wait",
    "done": "hpc-trainer status",
    "exception": "hpc-trainer why",
    "stdout": "hpc-trainer logs",
    "stderr": "hpc-trainer logs",
    "cancel": "hpc-trainer cancel",
    "as_completed": "hpc-trainer submit --wait; search=.. decides by results (docs/search.md)",
    "monitor_jobs": "hpc-trainer status --watch, hpc-trainer top",
    "CommandFunction": "hpc-trainer submit --command '..' (docs/any_program.md)",
    "RsyncSnapshot": "nothing: submit copies the code of the runs (docs/frozen_code.md)",
    "clean_env": "nothing: submit passes no SLURM_ and SBATCH_ variables on",
    "JobEnvironment": "run.rank, run.world_size, run.is_rank_zero in main(config, run)",
    "DelayedSubmission": "nothing: a run that is stopped saves, requeues and restores automatically",
    "TorchDistributedEnvironment": "nothing: the process group exists when main(config, run) begins",
}
"""Method or class of submitit -> its replacement."""
_OF_JOBS = ("result", "results", "wait", "done", "exception", "stdout", "stderr", "cancel")


def _calls(source: Source) -> Iterator[Row]:
    """Yield a row for each other use of submitit in a script; each name once, at its first line."""
    listed: set[str] = set()
    for call in source.calls(*_CALLS):
        name = ast.unparse(call.func)
        last = name.rpartition(".")[2]
        # Other libraries have methods of these names, too.
        is_theirs = {"submit": "ex", **dict.fromkeys(_OF_JOBS, "job")}.get(last, "") in name.lower()
        if last not in listed and is_theirs:
            listed.add(last)
            yield Row(line=call.lineno, theirs=f"{name}(..)", ours=_CALLS[last])
    for node in source.nodes:
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.FunctionDef) and part.name == "checkpoint":
                    yield Row(
                        line=part.lineno, theirs=f"{node.name}.checkpoint",
                        ours="run.should_stop(step), run.save(step, ..), run.restore(..) in main(config, run)",
                        note="docs/own_loop.md",
                    )  # fmt: skip


_LAUNCHER_KEYS = frozenset({
    "account", "additional_parameters", "array_parallelism", "comment", "constraint", "cpus_per_gpu", "cpus_per_task",
    "exclude", "gpus_per_node", "gpus_per_task", "gres", "max_num_timeout", "mem_gb", "mem_per_cpu", "mem_per_gpu",
    "name", "nodes", "partition", "qos", "setup", "signal_delay_s", "srun_args", "stderr_to_stdout", "submitit_folder",
    "tasks_per_node", "timeout_min",
})  # fmt: skip


def read_launcher(path: Path) -> list[Parameter]:
    """Return the parameters of a launcher's YAML: a file of `hydra/launcher/`, or one that has `hydra: launcher:`.

    Raises:
        ConfigError: the file cannot be read, or has no such part.
    """
    import yaml

    try:
        loaded = yaml.safe_load(read_given(path, _LARGEST).decode("utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from error
    table = loaded
    for key in ("hydra", "launcher"):
        table = table[key] if isinstance(table, dict) and isinstance(table.get(key), dict) else table
    if not isinstance(table, dict) or not table.keys() & _LAUNCHER_KEYS:
        raise ConfigError(
            f"{path} has none of the launcher's keys (timeout_min, partition, gpus_per_node, ..). Name the file of "
            "hydra/launcher, or the one with `hydra: launcher:`."
        )
    parameters = [
        Parameter(name=str(name), value=_of_yaml(value, loaded, table))
        for name, value in table.items()
        if name not in ("defaults", "_target_", "hydra")
    ]
    bases = [str(entry) for entry in table.get("defaults") or ()]
    if "submitit_local" in bases or str(table.get("_target_")).endswith("LocalLauncher"):
        parameters.append(Parameter(name="cluster", value="local"))
    others = [base for base in bases if base not in ("submitit_slurm", "submitit_local", "_self_")]
    if table is loaded or "defaults" not in loaded:
        parameters += [Parameter(name=f"defaults: {base}", value=Computed(base)) for base in others]
    return parameters


def _of_yaml(value: Any, root: Any, table: Any, depth: int = 4) -> Any:
    """Return a value of YAML; an interpolation is resolved within the file, `oc.env` stays, any other is computed.

    Args:
        root: content of the file, from which `${a.b}` counts.
        table: the launcher's part of it, from which `${.b}` counts.
    """
    if isinstance(value, dict):
        return {key: _of_yaml(item, root, table) for key, item in value.items()}
    if isinstance(value, list):
        return [_of_yaml(item, root, table) for item in value]
    whole = re.fullmatch(r"\$\{(\.?)(\w[\w.]*)\}", value) if isinstance(value, str) else None
    if whole is not None and depth:
        target = table if whole[1] else root
        for key in whole[2].split("."):
            target = target.get(key) if isinstance(target, dict) else None
        if target is not None and not isinstance(target, (dict, list)):
            return _of_yaml(target, root, table, depth - 1)
    is_foreign = isinstance(value, str) and re.search(r"\$\{(?!oc\.env:)", value) is not None
    return Computed(str(value)) if is_foreign else value
