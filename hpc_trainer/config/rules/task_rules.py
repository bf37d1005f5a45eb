"""Rules of `task/`: what goes with data and loss, and what the file of a person's class tells. Imports none of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from hpc_trainer.config.data_files.look import is_file
from hpc_trainer.config.schema.data.shipped import CustomDataConfig
from hpc_trainer.config.schema.task import CustomTaskConfig, TargetKind
from hpc_trainer.config.schema.train import TrainConfig

_FIX = "Give it loss(self, model, batch), which returns the mean loss of the batch (docs/tasks.md)."


def task_problems(config: TrainConfig) -> Iterator[str]:
    """What the chosen task breaks, a line each."""
    task, train = config.task, config.train
    if train.main is not None:
        return
    has_own = config.data.takes_task or isinstance(config.data, CustomDataConfig)
    if task.targets in (TargetKind.numbers, TargetKind.labels) and not has_own:
        yield (
            f"task={task.name} needs data of its own, and the targets of data={config.data.name} are classes. Use "
            "data=custom or arrays, or task=classification."
        )
    if task.targets is not TargetKind.classes and train.label_smoothing:
        yield (
            f"train.label_smoothing={train.label_smoothing:g} is of cross entropy over classes, and this is task="
            f"{task.name}. Use train.label_smoothing=0."
        )
    if isinstance(task, CustomTaskConfig):
        yield from _class_problems(task._target_)


def _class_problems(target: str) -> Iterator[str]:
    """As far as a file below the current folder tells; code that is installed is looked at by the worker."""
    *path, name = target.split(".")
    file = next((each for each in (Path(*path).with_suffix(".py"), Path(*path, "__init__.py")) if is_file(each)), None)
    if not path or file is None:
        return
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return
    found = next((each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name), None)
    if found is None:  # a function, or a name that is imported there
        return
    loss = next((each for each in found.body if isinstance(each, ast.FunctionDef) and each.name == "loss"), None)
    is_plain = not found.bases and not found.decorator_list and not found.keywords
    if loss is None:
        if is_plain and not any(_may_set(each, "loss") for each in ast.walk(found)):
            yield f"task._target_={target}: the class {name} ({file}) has no method loss. {_FIX}"
    elif not loss.decorator_list:
        yield from _loss_problems(loss, f"task._target_={target}: loss in line {loss.lineno} of {file}")


def _may_set(node: ast.AST, name: str) -> bool:
    """`loss = ..` in the class, or `self.loss = ..`."""
    if isinstance(node, ast.Name):
        return node.id == name and isinstance(node.ctx, ast.Store)
    return isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Store)


def _loss_problems(loss: ast.FunctionDef, where: str) -> Iterator[str]:
    arguments = loss.args
    given = len(arguments.posonlyargs) + len(arguments.args)
    most = given if arguments.vararg is None else max(given, 3)
    if not given - len(arguments.defaults) <= 3 <= most or any(each is None for each in arguments.kw_defaults):
        yield f"{where} cannot be called as loss(model, batch). {_FIX}"
    own = list(_own_nodes(loss))
    if any(isinstance(each, (ast.Yield, ast.YieldFrom)) for each in own):
        yield f"{where} is a generator (yield), and no number. {_FIX}"
        return
    values = [each.value for each in own if isinstance(each, ast.Return)]
    ends_otherwise = any(isinstance(each, ast.Raise) for each in own)
    is_nothing = all(each is None or (isinstance(each, ast.Constant) and each.value is None) for each in values)
    if is_nothing and not (ends_otherwise and not values):
        yield f"{where} returns nothing. {_FIX}"
    for value in values:
        called = value.func if isinstance(value, ast.Call) else None
        if value is not None and isinstance(called, ast.Attribute) and called.attr in ("item", "tolist", "detach"):
            yield f"{where} returns {ast.unparse(value)!r}, cut off from the weights. Return the tensor itself."


def _own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Of a function, but not of functions and classes inside."""
    left: list[ast.AST] = list(function.body)
    while left:
        node = left.pop()
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            yield node
            left.extend(ast.iter_child_nodes(node))
