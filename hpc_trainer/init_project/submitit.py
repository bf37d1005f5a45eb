"""Parameters of submitit, and of hydra-submitit-launcher, as keys of hpc-trainer; the rest is listed with a reason.

Names and meanings are those of submitit 1.5 (`AutoExecutor.update_parameters`, `SlurmExecutor`) and of the launcher 1.2
(`SlurmQueueConf`). docs/coming_from_submitit.md has the table.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpc_trainer.config.rules.cluster_rules import sbatch_problems
from hpc_trainer.config.user_files import read_given
from hpc_trainer.errors import ConfigError
from hpc_trainer.init_project.source import Computed, Source
from hpc_trainer.slurm.limits import parse_minutes

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Translation of a parameter or a call, with the reason."""

    line: int | None
    theirs: str
    ours: str = ""
    """Key of hpc_trainer with its value; empty if there is none."""
    note: str = ""


@dataclass(slots=True)
class Translation:
    """Keys of hpc_trainer, and a row for each parameter."""

    hardware: dict[str, Any] = field(default_factory=dict)
    cluster: dict[str, Any] = field(default_factory=dict)
    account: str | None = None
    """The Slurm account, which belongs into the user's own file."""
    rows: list[Row] = field(default_factory=list)


# --- reading ---


def read_script(path: Path) -> tuple[list[Parameter], list[Row]]:
    """Return the parameters of the executors in a Python file, and rows about its other calls of submitit.

    Raises:
        ConfigError: the file cannot be read, or makes no executor.
    """
    source = Source(path)
    parameters = []
    for call in source.calls("AutoExecutor", "SlurmExecutor"):
        names = ("folder", "cluster" if ast.unparse(call.func).endswith("AutoExecutor") else "max_num_timeout")
        for name, given in zip(names, call.args, strict=False):
            parameters.append(Parameter(name=name, value=source.value(given), line=call.lineno))
        parameters += _keyword_parameters(source, call)
    for call in source.calls("update_parameters"):
        parameters += _keyword_parameters(source, call)
    if not parameters:
        raise ConfigError(
            f"{path} makes no AutoExecutor or SlurmExecutor of submitit and calls no update_parameters. Name the file "
            "that does; `init --from FILE` reads a training script."
        )
    return parameters, sorted(_calls(source), key=lambda row: row.line or 0)


def _keyword_parameters(source: Source, call: ast.Call) -> Iterator[Parameter]:
    for word in call.keywords:
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
                yield replace(parameter, condition=source.condition(node))
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(node, ast.Assign) and isinstance(target, ast.Subscript) and ast.unparse(target.value) == name:
            key = source.value(target.slice)
            if isinstance(key, str):
                value, condition = source.value(node.value), source.condition(node)
                yield Parameter(name=key, value=value, line=node.lineno, condition=condition)


_CALLS = {
    "map_array": "axes of a grid: one `submit` makes the arrays, hpc-trainer submit params.lr=1e-3,1e-2",
    "batch": "axes of a grid: one `submit` makes the arrays",
    "submit": "hpc-trainer submit; it returns at once, and given twice it submits only what is new",
    "result": "hpc-trainer results; submit --wait waits for the runs",
    "JobEnvironment": "run.rank, run.world_size, run.is_rank_zero in main(config, run)",
    "DelayedSubmission": "nothing: a run that is stopped saves, requeues and restores automatically",
    "TorchDistributedEnvironment": "nothing: the process group exists when main(config, run) begins",
}
"""Method or class of submitit -> its replacement."""


def _calls(source: Source) -> Iterator[Row]:
    """Yield a row for each other use of submitit in a script; each name once, at its first line."""
    listed: set[str] = set()
    for call in source.calls(*_CALLS):
        name = ast.unparse(call.func)
        last = name.rpartition(".")[2]
        # Other libraries have methods of these names, too.
        is_theirs = {"submit": "ex", "result": "job"}.get(last, "") in name.lower()
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
    if not isinstance(table, dict) or not table.keys() & _HANDLERS.keys():
        raise ConfigError(
            f"{path} has none of the launcher's keys (timeout_min, partition, gpus_per_node, ..). Name the file of "
            "hydra/launcher, or the one with `hydra: launcher:`."
        )
    return [
        Parameter(name=str(name), value=_of_yaml(value, loaded, table))
        for name, value in table.items()
        if name not in ("defaults", "_target_", "hydra")
    ]


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


# --- translation ---


def translate(parameters: list[Parameter], rows: list[Row] | None = None) -> Translation:
    """Translate parameters; the last value of a name counts, as it does for submitit."""
    result = Translation()
    named = {_plain(parameter): parameter for parameter in _flat(parameters)}
    named = {
        name: parameter for name, parameter in named.items() if not parameter.name.startswith(("local_", "debug_"))
    }
    conditions = {
        (parameter.line, _shown(parameter)): f"there only if {parameter.condition}"
        for parameter in named.values()
        if parameter.condition
    }
    _gpus_and_cores(named, result)
    for name, parameter in named.items():
        if parameter.value is None:
            continue
        handler = _HANDLERS.get(name)
        if name.startswith("**"):
            _untold(result, parameter, "")
        elif handler is None or (parameter.is_option and name not in _DIRECT):
            _option(parameter, name, result)
        elif isinstance(parameter.value, Computed) and name not in _WITHOUT_TWIN:
            _untold(result, parameter, _KEYS.get(name, ""))
        else:
            handler(parameter, result)
    result.rows = [
        replace(row, note="; ".join(filter(None, (row.note, conditions.get((row.line, row.theirs), "")))))
        for row in sorted(result.rows, key=lambda row: row.line or 0)
    ] + (rows or [])
    return result


def _flat(parameters: list[Parameter]) -> Iterator[Parameter]:
    for parameter in parameters:
        if _plain(parameter) == "additional_parameters" and isinstance(parameter.value, Mapping):
            for name, value in parameter.value.items():
                yield Parameter(name=str(name), value=value, line=parameter.line, is_option=True)
        else:
            yield parameter


_SAME = {
    "timeout_min": "time", "mem_gb": "mem_gb", "tasks_per_node": "ntasks_per_node", "name": "job_name",
    "num_gpus": "gpus_per_node", "submitit_folder": "folder",
}  # fmt: skip


def _plain(parameter: Parameter) -> str:
    """Return the name of sbatch's option, with underscores, for any of submitit's names of it."""
    name = parameter.name.removeprefix("slurm_").replace("-", "_")
    return _SAME.get(name, name)


_JOINT = (
    "gpus_per_node", "gpus_per_task", "gpus", "gres", "ntasks_per_node", "ntasks", "cpus_per_task", "cpus_per_gpu",
)  # fmt: skip


def _gpus_and_cores(named: dict[str, Parameter], result: Translation) -> None:
    """Translate the parameters that together give a rank's GPUs and cores; set one rank for each GPU."""
    taken = {name: named.pop(name) for name in _JOINT if name in named and named[name].value is not None}
    computed = {name for name, parameter in taken.items() if isinstance(parameter.value, Computed)}
    unknown = {name: taken.pop(name) for name in computed}
    kind, count, is_gres = _gpus(taken, result)
    has_gpus = count or unknown.keys() & {"gpus_per_node", "gpus_per_task", "gpus", "gres"}
    for name, parameter in unknown.items():
        key = _KEYS.get(name, "hardware.gpus_per_node")
        if name in ("ntasks_per_node", "ntasks") and has_gpus:
            result.rows.append(Row(line=parameter.line, theirs=_shown(parameter), ours="one rank for each GPU"))
        else:
            _untold(result, parameter, "hardware.cpus_per_gpu" if name == "cpus_per_task" and has_gpus else key)
    if has_gpus and "cpus_per_task" in taken and unknown.keys() - {"cpus_per_task", "cpus_per_gpu"}:
        parameter = taken.pop("cpus_per_task")
        note = "cores of a task, and the script computes its tasks or GPUs: set hardware.cpus_per_gpu yourself"
        result.rows.append(Row(line=parameter.line, theirs=_shown(parameter), note=note))
    tasks = _whole(taken.get("ntasks_per_node") or taken.get("ntasks")) or 1
    if count and "gpus_per_task" in taken and "gpus_per_node" not in taken and "gres" not in taken:
        count *= tasks
    if count:
        result.hardware["gpus_per_node"] = count
        result.hardware |= {"gpu_type": kind} if kind else {}
        result.hardware |= {"gpu_request": "gres"} if is_gres else {}
    elif tasks > 1:
        result.hardware["tasks_per_node"] = tasks
    cores = _whole(taken.get("cpus_per_gpu")) if count else None
    cpus_per_task = _whole(taken.get("cpus_per_task"))
    if cores is None and cpus_per_task is not None:
        cores = max(1, cpus_per_task * tasks // count) if count else cpus_per_task
    if cores is not None:
        result.hardware["cpus_per_gpu" if count else "cpus_per_task"] = cores
    for name, parameter in taken.items():
        _joint_row(name, parameter, result, count=count, tasks=tasks)


def _gpus(taken: Mapping[str, Parameter], result: Translation) -> tuple[str | None, int, bool]:
    """Return (type, number, whether by gres) of the GPUs of a node, or of a task."""
    for name in ("gpus_per_node", "gres", "gpus_per_task", "gpus"):
        value = taken[name].value if name in taken else None
        match = re.fullmatch(r"(?:gpu:)?(?:([A-Za-z][\w.-]*):)?(\d+)", str(value))
        if name == "gres" and value is not None and (match is None or not str(value).startswith("gpu")):
            if str(value) == "gpu":
                return None, 1, True
            result.rows.append(
                Row(
                    line=taken[name].line,
                    theirs=f"gres={value}",
                    note="no equivalent: a gres other than GPUs; set by hand",
                )
            )
        elif match is not None:
            return match[1], int(match[2]), name == "gres"
    return None, 0, False


def _joint_row(name: str, parameter: Parameter, result: Translation, *, count: int, tasks: int) -> None:
    ours, note = "", ""
    if name in ("gpus_per_node", "gpus_per_task", "gpus", "gres"):
        shown = [key for key in ("gpus_per_node", "gpu_type", "gpu_request") if key in result.hardware]
        ours = ", ".join(f"hardware.{key}={result.hardware[key]}" for key in shown)
        if not shown:
            return
    elif name in ("ntasks_per_node", "ntasks"):
        if count and tasks != count:
            note = f"one rank for each of the {count} GPUs: remove what your script starts itself (torchrun, spawn)"
            ours = "nothing"
        else:
            ours = "one rank for each GPU" if count else f"hardware.tasks_per_node={tasks}"
    else:
        key = "cpus_per_gpu" if count else "cpus_per_task"
        ours = f"hardware.{key}={result.hardware.get(key)}"
        if count and tasks != count and name == "cpus_per_task":
            note = f"{parameter.value} cores for each of {tasks} tasks, divided among {count} ranks"
    result.rows.append(Row(line=parameter.line, theirs=_shown(parameter), ours=ours, note=note))


def _whole(parameter: Parameter | None) -> int | None:
    if parameter is None or isinstance(parameter.value, bool):
        return None
    match = re.fullmatch(r"\d+", str(parameter.value))
    return int(match[0]) if match else None


def _untold(result: Translation, parameter: Parameter, key: str) -> None:
    what = f"set {key} yourself" if key else "set it yourself"
    result.rows.append(Row(line=parameter.line, theirs=_shown(parameter), note=f"computed there: {what}"))


def _shown(parameter: Parameter) -> str:
    if parameter.name.startswith("**"):
        return parameter.name
    value = parameter.value.text if isinstance(parameter.value, Computed) else parameter.value
    return f"{parameter.name}={value}"


def _take(parameter: Parameter, result: Translation, section: str, key: str, value: Any, note: str = "") -> None:
    getattr(result, section)[key] = value
    result.rows.append(
        Row(line=parameter.line, theirs=_shown(parameter), ours=f"{section}.{key}={value}", note=note)
    )  # fmt: skip


def _option(parameter: Parameter, name: str, result: Translation) -> None:
    """Keep an option of sbatch that `cluster.sbatch` takes unchanged; else report why it does not."""
    option = name.replace("_", "-")
    value = True if parameter.value == "" else parameter.value  # an option without a value
    problem = next(sbatch_problems({option: None if isinstance(value, Computed) else value}), None)
    if problem is not None:
        said = problem.partition("which hpc_trainer sets itself. ")[2].removeprefix("Remove it: ") or problem
        result.rows.append(Row(line=parameter.line, theirs=_shown(parameter), note=f"no equivalent: {said}"))
    elif isinstance(value, Computed):
        _untold(result, parameter, f"cluster.sbatch.{option}")
    elif value is not False:
        result.cluster.setdefault("sbatch", {})[option] = value
        shown = "true" if value is True else value
        result.rows.append(Row(line=parameter.line, theirs=_shown(parameter), ours=f"cluster.sbatch.{option}={shown}"))


def _time(parameter: Parameter, result: Translation) -> None:
    value = parameter.value
    minutes = math.ceil(value) if isinstance(value, (int, float)) else parse_minutes(str(value))
    if not minutes:
        result.rows.append(Row(line=parameter.line, theirs=_shown(parameter), note="set hardware.time_limit_min"))
        return
    _take(parameter, result, "hardware", "time_limit_min", minutes)


_UNITS = {"": 1 / 1024, "K": 2**-20, "M": 1 / 1024, "G": 1, "T": 1024}


def _memory(key: str) -> Callable[[Parameter, Translation], None]:
    def take(parameter: Parameter, result: Translation) -> None:
        match = re.fullmatch(r"([\d.]+)\s*([KMGT]?)i?B?", str(parameter.value).strip(), re.IGNORECASE)
        unit = "G" if _plain(parameter) == "mem_gb" else match[2].upper() if match else ""
        amount = float(match[1]) * _UNITS[unit] if match else 0.0
        if not amount:
            note = "no equivalent: 0 asks for all memory of a node; on sites that give whole nodes leave it out"
            result.rows.append(Row(line=parameter.line, theirs=_shown(parameter), note=note))
            return
        other = next((name for name in result.hardware if name.startswith("mem_gb_per_")), key)
        if other != key:
            note = f"no equivalent: a job has one memory option, and hardware.{other} is set"
            result.rows.append(Row(line=parameter.line, theirs=_shown(parameter), note=note))
            return
        if key == "mem_gb_per_gpu" and not result.hardware.get("gpus_per_node"):
            result.rows.append(Row(line=parameter.line, theirs=_shown(parameter), note="needs GPUs: set their number"))
            return
        _take(parameter, result, "hardware", key, int(amount) if amount == int(amount) else round(amount, 3))

    return take


def _same(section: str, key: str) -> Callable[[Parameter, Translation], None]:
    def take(parameter: Parameter, result: Translation) -> None:
        _take(parameter, result, section, key, parameter.value)

    return take


def _lines(key: str) -> Callable[[Parameter, Translation], None]:
    def take(parameter: Parameter, result: Translation) -> None:
        lines = parameter.value if isinstance(parameter.value, list) else [parameter.value]
        texts = [line for line in lines if isinstance(line, str)]
        note = "" if len(texts) == len(lines) else "some lines are computed there: add them yourself"
        _take(parameter, result, "cluster", key, texts, note)

    return take


def _account(parameter: Parameter, result: Translation) -> None:
    result.account = str(parameter.value)
    result.rows.append(
        Row(
            line=parameter.line,
            theirs=_shown(parameter),
            ours=f"cluster.account={parameter.value}",
            note="in ~/.config/hpc_trainer/config.yaml, not in the repository",
        )
    )


def _none(reason: str) -> Callable[[Parameter, Translation], None]:
    def tell(parameter: Parameter, result: Translation) -> None:
        result.rows.append(Row(line=parameter.line, theirs=_shown(parameter), note=f"no equivalent: {reason}"))

    return tell


def _executor(parameter: Parameter, result: Translation) -> None:
    is_here = parameter.value in ("local", "debug")
    result.rows.append(
        Row(
            line=parameter.line,
            theirs=_shown(parameter),
            ours="cluster=local" if is_here else "",
            note="for runs on this machine" if is_here else "the cluster file says executor: slurm",
        )
    )


def _srun(parameter: Parameter, result: Translation) -> None:
    if parameter.value is False:
        _none("srun starts each rank, and hands signals on to it")(parameter, result)


_KEYS = {
    "time": "hardware.time_limit_min", "nodes": "hardware.num_nodes", "partition": "hardware.partition",
    "qos": "hardware.qos", "constraint": "hardware.constraint", "exclude": "hardware.exclude",
    "mem": "hardware.mem_gb_per_node", "mem_gb": "hardware.mem_gb_per_node", "mem_per_gpu": "hardware.mem_gb_per_gpu",
    "mem_per_cpu": "hardware.mem_gb_per_cpu", "cpus_per_task": "hardware.cpus_per_task",
    "cpus_per_gpu": "hardware.cpus_per_gpu", "ntasks_per_node": "hardware.tasks_per_node",
    "account": "cluster.account", "array_parallelism": "cluster.array_parallelism",
    "signal_delay_s": "cluster.signal_lead_s", "python": "cluster.python", "folder": "paths.runs_dir",
    "setup": "cluster.setup", "srun_args": "cluster.srun_args", "job_name": "sweep_name",
}  # fmt: skip
"""Name -> the key to set where a script computes the value."""
_WITHOUT_TWIN = {
    "folder": "each run has a folder of its own below paths.runs_dir",
    "job_name": "jobs are named after the sweep, sweep_name",
    "comment": "hpc-trainer recognises its jobs by the comment",
    "dependency": "hpc-trainer sets it for jobs that follow each other",
    "stderr_to_stdout": "a run's log has both",
    "teardown": "put work for the end of a job into your program",
    "max_num_timeout": (
        "a run restarts as long as it makes progress; cluster.max_no_progress and cluster.min_goodput bound it"
    ),
    "max_pickle_size_gb": "nothing is pickled: code is frozen, configurations are JSON",
    "additional_parameters": "its options are not known here",
}
"""Name -> reason why no key of hpc_trainer takes its place."""
_HANDLERS: dict[str, Callable[[Parameter, Translation], None]] = {
    "time": _time,
    "nodes": _same("hardware", "num_nodes"),
    **{name: _same("hardware", name) for name in ("partition", "qos", "constraint", "exclude")},
    "mem": _memory("mem_gb_per_node"),
    "mem_gb": _memory("mem_gb_per_node"),
    "mem_per_gpu": _memory("mem_gb_per_gpu"),
    "mem_per_cpu": _memory("mem_gb_per_cpu"),
    "account": _account,
    "array_parallelism": _same("cluster", "array_parallelism"),
    "signal_delay_s": _same("cluster", "signal_lead_s"),
    "python": _same("cluster", "python"),
    "setup": _lines("setup"),
    "srun_args": _lines("srun_args"),
    "use_srun": _srun,
    "cluster": _executor,
    **{name: _none(reason) for name, reason in _WITHOUT_TWIN.items()},
    **dict.fromkeys(_JOINT, _none("see the other GPU parameters")),
}
_DIRECT = frozenset({
    "time", "nodes", "partition", "qos", "constraint", "exclude", "mem", "mem_per_gpu", "mem_per_cpu", "account",
    "comment", "dependency", "job_name", *_JOINT,
})  # fmt: skip
"""Options that `additional_parameters` may hold and that have a key of hpc_trainer."""
