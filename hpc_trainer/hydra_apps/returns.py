"""Return value of a Hydra app's task, as the run's results and the sweeper's value."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from hpc_trainer.record.files import write_json
from hpc_trainer.record.layout import RETURNED, RunPaths
from hpc_trainer.record.metrics import VARIABLE, NewLines, log_metrics
from hpc_trainer.record.reading import read_json

log = logging.getLogger(__name__)

NAME = "return_value"
"""Name of the metric of a task that returns one number."""


class Returns(Callback):
    """Callback that Hydra calls when a run's task has ended; the run's command names it."""

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Record the task's return value, if the task ended well."""
        if job_return.status is JobStatus.COMPLETED:
            tell_return(job_return.return_value)


def tell_return(value: Any) -> None:
    """Record the return value on the first rank: numbers become metrics, and a file keeps the value for the launcher.

    A value that JSON cannot represent is named in the log and becomes None, because no pickle that a run has written is
    loaded.
    """
    log_path = os.environ.get(VARIABLE)
    if value is None or log_path is None or os.environ.get("RANK", "0") != "0":
        return
    folder = Path(log_path).parent
    plain = _plain(value)
    try:
        json.dumps(plain, allow_nan=True)
    except (TypeError, ValueError):
        log.warning(
            f"the task returned a {type(value).__name__}, which JSON cannot hold: it is not recorded as the result."
        )
        return
    write_json(folder / RETURNED, {"value": plain})
    numbers = dict(_numbers(plain, ""))
    if numbers:
        log_metrics(max([1, *_told_steps(folder)]), numbers)


def _told_steps(folder: Path) -> Iterator[int]:
    """Yield the steps of all metrics that the attempts of this run have logged."""
    for path in folder.glob("attempt-*.jsonl"):
        lines = NewLines(path)
        while batch := list(lines.read()):
            yield from (line.step for line in batch)


def returned_value(paths: RunPaths) -> Any:
    """Return the value that a run's task returned; None if there is none, or JSON cannot represent it."""
    old = Path(paths.at(RETURNED))  # where earlier versions wrote it
    return (read_json(paths.returned) or read_json(old) or {}).get("value")


def _plain(value: Any) -> Any:
    """Convert numbers of numpy and torch to Python numbers, and configurations and tuples to dicts and lists."""
    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value, resolve=True, enum_to_str=True)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, (int, float)):
        yield name or NAME, float(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(item, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from _numbers(item, f"{name or NAME}.{place}")
