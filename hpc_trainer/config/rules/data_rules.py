"""Rules of `data/` that look at the files it names, as far as this machine sees them; and their absolute paths."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpc_trainer.config.data_files.known import known_of
from hpc_trainer.config.data_files.look import home_problems
from hpc_trainer.config.schema.data.shipped import DataConfig
from hpc_trainer.config.schema.task import TaskConfig
from hpc_trainer.errors import HpcTrainerError

_PATHS = ("path", "eval_path", "sources")
"""Keys that name files or folders, whatever the data set."""


def data_problems(data: DataConfig, task: TaskConfig) -> tuple[str, ...]:
    """What is wrong with the files of a data set, a line each; of data without files nothing."""
    unknown = tuple(line for key, path in _named(data) for line in home_problems(key, path))
    return unknown or tuple(_of_files(data, task))


def with_absolute_paths(data: DataConfig) -> DataConfig:
    """A copy whose files and folders are absolute: the worker's working folder may be another one."""
    found: dict[str, Any] = {key: getattr(data, key) for key in _PATHS if getattr(data, key, None)}
    for key, value in found.items():
        is_many = isinstance(value, dict)
        found[key] = {_absolute(path): each for path, each in value.items()} if is_many else _absolute(value)
    return dataclasses.replace(data, **found) if found else data


def _named(data: DataConfig) -> Iterator[tuple[str, str | None]]:
    for key in _PATHS:
        value = getattr(data, key, None)
        yield from (((f"data.{key}", path) for path in value) if isinstance(value, dict) else ((f"data.{key}", value),))


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().resolve())


def _of_files(data: DataConfig, task: TaskConfig) -> Iterator[str]:
    known = known_of(data)
    try:
        yield from known.problems(data)
        known.check(data, task.targets)
    except HpcTrainerError as error:
        yield str(error)
