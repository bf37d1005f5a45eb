"""Parameters of submitit, and of hydra-submitit-launcher, as keys of hpc-trainer; the rest is listed with a reason.

Names and meanings are those of submitit 1.5 (`AutoExecutor.update_parameters`, `SlurmExecutor`) and of the launcher 1.2
(`SlurmQueueConf`). docs/coming_from_submitit.md has the table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hpc_trainer.config.rules.cluster_rules import sbatch_problems
from hpc_trainer.init_project.source import Computed
from hpc_trainer.init_project.submitit_files import Parameter, Row
from hpc_trainer.slurm.limits import parse_minutes


@dataclass(slots=True)
class Translation:
    """Keys of hpc_trainer, and a row for each parameter."""

    hardware: dict[str, Any] = field(default_factory=dict)
    cluster: dict[str, Any] = field(default_factory=dict)
    account: str | None = None
    """The Slurm account, which belongs into the user's own file."""
    rows: list[Row] = field(default_factory=list)


def translate(parameters: list[Parameter], rows: list[Row] | None = None) -> Translation:
    """Translate parameters; the last value of a name counts, as it does for submitit."""
    result = Translation()
    used, unused = _last_of_each(parameters)
    for parameter in unused:
        name = _plain(parameter)
        if parameter.is_off and parameter.value is not None and parameter.value != "":
            key = f": {_KEYS[name]}" if name in _KEYS else ""
            note = f"not set here, as by default; set it yourself{key}"
        elif parameter.is_overridden:
            note = "a later line sets another value; an executor with other values needs a profile of its own"
        else:
            continue
        result.rows.append(Row(line=parameter.line, theirs=_shown(parameter), note=note))
    named = {_plain(parameter): parameter for parameter in used}
    conditions = {
        (parameter.line, _shown(parameter)): f"there only if {parameter.condition}"
        for parameter in (*used, *unused)
        if parameter.condition
    }
    has_time = "time" in named or any(name.startswith("**") for name in named)
    _gpus_and_cores(named, result)
    for name, parameter in named.items():
        _translate_one(name, parameter, result)
    if not has_time:
        note = "not set there: submitit's short default counts; set hardware.time_limit_min"
        result.rows.append(Row(line=None, theirs="timeout_min", note=note))
    result.rows = [
        replace(row, note="; ".join(filter(None, (row.note, conditions.get((row.line, row.theirs), "")))))
        for row in sorted(result.rows, key=lambda row: row.line or 0)
    ] + (rows or [])
    return result


def _last_of_each(parameters: list[Parameter]) -> tuple[list[Parameter], list[Parameter]]:
    """Return the parameters that count, the last of each name, and the others with the reason."""
    used: dict[str, Parameter] = {}
    unused = []
    for parameter in _flat(parameters):
        if parameter.name.startswith(("local_", "debug_")):
            continue
        earlier = used.get(_plain(parameter))
        if parameter.is_off:
            unused.append(parameter)
            continue
        if earlier is not None and earlier.value not in (None, parameter.value):
            unused.append(replace(earlier, is_overridden=True))
        used[_plain(parameter)] = parameter
    return [*used.values()], unused


def _translate_one(name: str, parameter: Parameter, result: Translation) -> None:
    handler = _HANDLERS.get(name)
    if parameter.value is None:
        return
    if name.startswith(("**", "defaults:")):
        _untold(result, parameter, "")
    elif handler is None or (parameter.is_option and name not in _DIRECT):
        _option(parameter, name, result)
    elif isinstance(parameter.value, Computed) and name not in _WITHOUT_TWIN and name != "job_name":
        _untold(result, parameter, _KEYS.get(name, ""))
    else:
        handler(parameter, result)


def _flat(parameters: list[Parameter]) -> Iterator[Parameter]:
    for parameter in parameters:
        if _plain(parameter) == "additional_parameters" and isinstance(parameter.value, Mapping):
            for name, value in parameter.value.items():
                yield replace(parameter, name=str(name), value=value, is_option=True)
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
    has_tasks = bool({"ntasks_per_node", "ntasks"} & (taken.keys() | unknown.keys()))
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
        _joint_row(name, parameter, result, count=count, tasks=tasks, has_tasks=has_tasks)


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
                    note="no equivalent: not whole GPUs. For a share of one set hardware.gpus_per_node=1 and use "
                    "pool.per_gpu (docs/pool.md)",
                )
            )
        elif match is not None and int(match[2]):
            return match[1], int(match[2]), name == "gres"
    return None, 0, False


_STARTS_ITSELF = "one rank for each of the {} GPUs: remove what your script starts itself (torchrun, spawn)"


def _joint_row(
    name: str, parameter: Parameter, result: Translation, *, count: int, tasks: int, has_tasks: bool
) -> None:
    ours, note = "", ""
    if name in ("gpus_per_node", "gpus_per_task", "gpus", "gres"):
        shown = [key for key in ("gpus_per_node", "gpu_type", "gpu_request") if key in result.hardware]
        ours = ", ".join(f"hardware.{key}={result.hardware[key]}" for key in shown)
        if not shown and parameter.value != 0:
            return
        ours = ours or "nothing"
        if count > 1 and not has_tasks:
            note = _STARTS_ITSELF.format(count)
    elif name in ("ntasks_per_node", "ntasks"):
        if count and tasks != count:
            note = _STARTS_ITSELF.format(count)
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


_WITHOUT_VALUE = frozenset({
    "contiguous", "exclusive", "hold", "no-kill", "overcommit", "oversubscribe", "reboot", "spread-job", "stepmgr",
    "use-min-nodes",
})  # fmt: skip
"""Options of sbatch that need no value."""


def _option(parameter: Parameter, name: str, result: Translation) -> None:
    """Keep an option of sbatch that `cluster.sbatch` takes unchanged; else report why it does not."""
    option = name.replace("_", "-")
    value = parameter.value
    if value == "":
        value = True if option in _WITHOUT_VALUE else None
    elif isinstance(value, str) and "${" in value:
        value = Computed(value)
    problem = next(sbatch_problems({option: None if isinstance(value, Computed) else value}), None)
    if problem is not None:
        said = problem.partition("which hpc_trainer sets itself. ")[2].removeprefix("Remove it: ") or problem
        result.rows.append(Row(line=parameter.line, theirs=_shown(parameter), note=f"no equivalent: {said}"))
    elif isinstance(value, Computed):
        _untold(result, parameter, f"cluster.sbatch.{option}")
    elif value is None:
        result.rows.append(Row(line=parameter.line, theirs=_shown(parameter), note="left out: it has no value"))
    elif value is not False:
        result.cluster.setdefault("sbatch", {})[option] = value
        shown = "true" if value is True else value
        result.rows.append(Row(line=parameter.line, theirs=_shown(parameter), ours=f"cluster.sbatch.{option}={shown}"))


def _time(parameter: Parameter, result: Translation) -> None:
    value = parameter.value
    minutes = math.ceil(value) if isinstance(value, (int, float)) else parse_minutes(str(value))
    if not minutes:
        result.rows.append(
            Row(
                line=parameter.line,
                theirs=_shown(parameter),
                note="not a number of minutes: set hardware.time_limit_min",
            )
        )
        return
    _take(parameter, result, "hardware", "time_limit_min", minutes)


_UNITS = {"": 1 / 1024, "K": 2**-20, "M": 1 / 1024, "G": 1, "T": 1024}


def _memory(key: str) -> Callable[[Parameter, Translation], None]:
    def take(parameter: Parameter, result: Translation) -> None:
        match = re.fullmatch(r"([\d.]+)\s*([KMGT]?)i?B?", str(parameter.value).strip(), re.IGNORECASE)
        unit = "G" if _plain(parameter) == "mem_gb" else match[2].upper() if match else ""
        amount = float(match[1]) * _UNITS[unit] if match else 0.0
        if not amount:
            note = (
                "no equivalent: 0 asks for all memory of a node; leave it out where nodes are whole, or use "
                "hardware.whole_node=true"
            )
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
        _take(parameter, result, "hardware", key, int(amount) if amount == int(amount) else round(amount, 10))

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


def _lead(parameter: Parameter, result: Translation) -> None:
    seconds = _whole(parameter)
    if seconds:
        _take(parameter, result, "cluster", "signal_lead_s", seconds)
    else:
        _none("a run needs time to save; null chooses it by the time limit")(parameter, result)


def _job_name(parameter: Parameter, result: Translation) -> None:
    if isinstance(parameter.value, Computed) or not re.fullmatch(r"[\w.-]+", str(parameter.value)):
        _none("jobs are named after the sweep, sweep_name")(parameter, result)
    else:
        name = f"sweep_name={parameter.value}"
        result.rows.append(Row(line=parameter.line, theirs=_shown(parameter), ours=name, note="when you submit"))


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
    if is_here:
        result.cluster = {"executor": "local", **result.cluster}
    result.rows.append(
        Row(
            line=parameter.line,
            theirs=_shown(parameter),
            ours="cluster=local" if is_here else "",
            note=f"the cluster file says executor: {'local' if is_here else 'slurm'}",
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
    "comment": "hpc-trainer recognises its jobs by the comment",
    "dependency": "hpc-trainer sets it for jobs that follow each other",
    "stderr_to_stdout": "a run's log has both",
    "teardown": "put work for the end of a job into your program",
    "max_num_timeout": (
        "a run restarts as long as it makes progress; cluster.max_no_progress and cluster.min_goodput bound it"
    ),
    "max_pickle_size_gb": "nothing is pickled: code is frozen, configurations are JSON",
    "additional_parameters": "its options are not known here",
    "ntasks_per_gpu": "each GPU has one rank; pool.per_gpu=2 trains two runs on a GPU (docs/pool.md)",
    "map_count": "hpc-trainer counts the runs of an array itself",
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
    "signal_delay_s": _lead,
    "job_name": _job_name,
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
    "comment", "dependency", "job_name", "ntasks_per_gpu", *_JOINT,
})  # fmt: skip
"""Options that `additional_parameters` may hold and that have a key of hpc_trainer."""
