"""Rules of `data/` and `task/`: named files, combinations of data and loss, and names of metrics."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpc_trainer.config.schema.data import CustomDataConfig, DataConfig
from hpc_trainer.config.schema.task import CustomTaskConfig, TargetKind, TaskConfig
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.choice import holds
from hpc_trainer.config.table.declarations import features
from hpc_trainer.config.user_files import home_problems, is_file
from hpc_trainer.errors import HpcTrainerError, valid

_PATHS = ("path", "eval_path", "sources")
"""Keys that name files or folders in any data set."""


def data_problems(data: DataConfig, task: TaskConfig) -> tuple[str, ...]:
    """Return each problem with the files of a data set; none for data without files."""
    unknown = tuple(line for key, path in _named(data) for line in home_problems(key, path))
    return unknown or tuple(_of_files(data, task))


def with_absolute_paths(data: DataConfig) -> DataConfig:
    """Return a copy with absolute files and folders: the worker's working folder may be another one."""
    paths: dict[str, Any] = {key: getattr(data, key) for key in _PATHS if getattr(data, key, None)}
    for key, value in paths.items():
        is_many = isinstance(value, dict)
        paths[key] = {_absolute(path): share for path, share in value.items()} if is_many else _absolute(value)
    return dataclasses.replace(data, **paths) if paths else data


def _named(data: DataConfig) -> Iterator[tuple[str, str | None]]:
    for key in _PATHS:
        value = getattr(data, key, None)
        yield from (((f"data.{key}", path) for path in value) if isinstance(value, dict) else ((f"data.{key}", value),))


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().resolve())


def _of_files(data: DataConfig, task: TaskConfig) -> Iterator[str]:
    try:
        yield from data.problems()
        data.check(task.targets)
    except HpcTrainerError as error:
        yield str(error)


_FIX = "Give it loss(self, model, batch), which returns the mean loss of the batch (docs/tasks.md)."


def task_problems(config: TrainConfig) -> Iterator[str]:
    """Yield each problem with the chosen task."""
    task, train = config.task, config.train
    if train.main is not None:
        return
    has_own = config.data.takes_task or isinstance(config.data, CustomDataConfig)
    if task.targets in (TargetKind.numbers, TargetKind.labels) and not has_own:
        yield (
            f"task={task.name} needs data with other targets: those of data={config.data.name} are classes. Use "
            "data=custom or arrays, or task=classification."
        )
    if task.targets is not TargetKind.classes and train.label_smoothing:
        yield (
            f"train.label_smoothing={train.label_smoothing:g} applies to cross entropy over classes, but this is task="
            f"{task.name}. Use train.label_smoothing=0."
        )
    if isinstance(task, CustomTaskConfig):
        yield from _class_problems(task._target_)


def _class_problems(target: str) -> Iterator[str]:
    """Yield each problem with a custom task's class, read from its source below the current folder."""
    *path, name = target.split(".")
    file = next(
        (candidate for candidate in (Path(*path).with_suffix(".py"), Path(*path, "__init__.py")) if is_file(candidate)),
        None,
    )
    if not path or file is None:
        return
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return
    definition = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)
    if definition is None:  # a function, or a name that is imported there
        return
    loss = next((item for item in definition.body if isinstance(item, ast.FunctionDef) and item.name == "loss"), None)
    is_plain = not definition.bases and not definition.decorator_list and not definition.keywords
    if loss is None:
        if is_plain and not any(_may_set(node, "loss") for node in ast.walk(definition)):
            yield f"task._target_={target}: the class {name} ({file}) has no method loss. {_FIX}"
    elif not loss.decorator_list:
        yield from _loss_problems(loss, f"task._target_={target}: loss in line {loss.lineno} of {file}")


def _may_set(node: ast.AST, name: str) -> bool:
    """Return True if an AST node may set the attribute `name`: `name = ..` in the class, or `self.name = ..`."""
    if isinstance(node, ast.Name):
        return node.id == name and isinstance(node.ctx, ast.Store)
    return isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Store)


def _loss_problems(loss: ast.FunctionDef, where: str) -> Iterator[str]:
    arguments = loss.args
    given = len(arguments.posonlyargs) + len(arguments.args)
    most = given if arguments.vararg is None else max(given, 3)
    if not given - len(arguments.defaults) <= 3 <= most or any(default is None for default in arguments.kw_defaults):
        yield f"{where} cannot be called as loss(model, batch). {_FIX}"
    own = list(_own_nodes(loss))
    if any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in own):
        yield f"{where} is a generator (yield), not a number. {_FIX}"
        return
    values = [node.value for node in own if isinstance(node, ast.Return)]
    ends_otherwise = any(isinstance(node, ast.Raise) for node in own)
    is_nothing = all(value is None or (isinstance(value, ast.Constant) and value.value is None) for value in values)
    if is_nothing and not (ends_otherwise and not values):
        yield f"{where} returns nothing. {_FIX}"
    for value in values:
        called = value.func if isinstance(value, ast.Call) else None
        if value is not None and isinstance(called, ast.Attribute) and called.attr in ("item", "tolist", "detach"):
            yield f"{where} returns {ast.unparse(value)!r}, cut off from the weights. Return the tensor itself."


def _own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield the nodes of a function, without those of functions and classes inside it."""
    left: list[ast.AST] = list(function.body)
    while left:
        node = left.pop()
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            yield node
            left.extend(ast.iter_child_nodes(node))


_OF_STEPS = (
    "loss", "lr", "grad_norm", "skipped_steps", "steps_per_s", "step_time_s", "step_time_p50_s", "step_time_p95_s",
    "step_time_p99_s", "samples_per_s", "tokens_per_s", "data_wait_s", "data_wait_share",
)  # fmt: skip


def of_steps() -> tuple[str, ...]:
    """Return the metrics besides evaluations that the shared loop and features write into metrics.jsonl."""
    return (*_OF_STEPS, *(name for feature in features() for name in feature.logs))


def metric_problems(config: TrainConfig) -> Iterator[str]:
    """Yield a problem for each name that is not a metric. The metrics of a user's own loop are unknown here."""
    if config.train.main is not None:
        return
    early = config.train.early_stop.metric if holds(config, "train.early_stop.patience") else None
    best = config.checkpoint.keep_best
    evaluated = _evaluated(config, early, best)
    if holds(config, "replay.share"):
        evaluated += tuple(f"eval_old_{name.removeprefix('eval_')}" for name in evaluated)
    if early is not None and early not in evaluated:
        yield f"train.early_stop.metric={early} is not a metric of the evaluation. {valid(early, evaluated)}"
    if best is not None and best not in (logged := (*evaluated, *of_steps())):
        yield (
            f"checkpoint.keep_best={best} is not a metric that the run logs, so nothing would be kept. "
            f"{valid(best, logged)}"
        )


def _evaluated(config: TrainConfig, *names: str | None) -> tuple[str, ...]:
    """Return the evaluation's metrics; for a custom task also those of `names` that may be its metrics."""
    if isinstance(config.task, CustomTaskConfig):
        return (*config.task.evaluated, *(name for name in names if name and name.startswith("eval_")))
    return config.task.evaluated
