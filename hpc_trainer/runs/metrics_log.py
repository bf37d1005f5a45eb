"""metrics.jsonl: one line for each logged step, monotone in step; steps that are run again replace their lines."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpc_trainer.runs.files import append_lines, is_storage_error, read_lines, to_json, write_atomic

_LOG = logging.getLogger(__name__)
# Lines that wait for room on a full disk; of more, the oldest are lost.
_MAX_WAITING = 1_000

SPEED = (
    "steps_per_s", "step_time_s", "samples_per_s", "tokens_per_s", "data_wait_s", "data_wait_share", "mfu",
)  # fmt: skip
"""Metrics that say how fast steps go: never the same twice, and no outcome of a run."""

# As `files.to_json` writes them; older versions wrote what Python's json reads by itself.
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def numbers_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics as they were logged: also those that are no finite number."""
    return {key: _NOT_FINITE.get(value, value) if isinstance(value, str) else value for key, value in record.items()}


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The records of metrics.jsonl, in order; nothing if there is no file."""
    return map(numbers_of, read_lines(path))


class MetricsLog:
    """Appends metric records. One writer: rank 0."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: deque[dict[str, Any]] = deque(maxlen=_MAX_WAITING)

    def rewind(self, step: int) -> None:
        """Drops the records after `step`, and a torn last line: training goes on from there."""
        self._waiting = deque((each for each in self._waiting if each["step"] <= step), maxlen=_MAX_WAITING)
        if not self._path.exists():
            return
        kept = [record for record in read_lines(self._path) if record.get("step", 0) <= step]
        write_atomic(self._path, "".join(to_json(record) + "\n" for record in kept))

    def append(self, step: int, values: dict[str, Any], *, sync: bool = False) -> None:
        """Adds one record; `step` must not be less than the one before. `sync`: it survives a power cut.

        A full disk costs no training its life: the record waits for the next one, with a warning for the first.

        Raises OSError: with `sync` the file system refused; without it, for another reason than no room or a fault.
        """
        self._waiting.append({"step": step, **values})
        try:
            append_lines(self._path, list(self._waiting), sync=sync)
        except OSError as error:
            if sync or not is_storage_error(error):
                raise
            if len(self._waiting) == 1:
                _LOG.warning("WARNING: step %d: metrics wait for room on the disk: %s", step, error)
            return
        self._waiting.clear()
