"""Rules of `data/` on the files that it names, as far as this machine sees them; and their absolute paths."""

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
    facts = known_of(data)
    try:
        yield from facts.problems(data)
        facts.check(data, task.targets)
    except HpcTrainerError as error:
        yield str(error)
