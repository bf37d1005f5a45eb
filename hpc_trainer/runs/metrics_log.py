"""metrics.jsonl: one line for each logged step, in increasing order; steps that run again replace their lines."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_trainer.runs.files import append_lines, to_json, write_atomic
from hpc_trainer.runs.reading import Faults, is_storage_error, parse_record, parsed_lines, read_ends
from hpc_trainer.runs.record_values import as_count, metric_values

_LOG = logging.getLogger(__name__)
# About 200 lines, which take 2 ms to read: a whole file may have 100,000.
_NEWEST_BYTES = 65_536
# Largest number of records that wait for room on a full disk; beyond it the oldest are lost.
_MAX_WAITING = 1_000
# Once the log is older than `_YOUNG_S`, records wait for others: a thirtieth of its age, `_MOST_S` at most, in seconds.
_YOUNG_S, _MOST_S = 30.0, 10.0

SPEED = (
    "steps_per_s", "step_time_s", "step_time_p50_s", "step_time_p95_s", "step_time_p99_s", "samples_per_s",
    "tokens_per_s", "data_wait_s", "data_wait_share", "mfu",
)  # fmt: skip
"""Metrics of speed: they differ from run to run, and are not a result of the training."""
WORK = {"tokens_per_s": "tokens/s", "samples_per_s": "samples/s", "steps_per_s": "steps/s"}
"""Metrics of `SPEED` that count work per second, with their units, the preferred metric first."""


def read_metrics(path: Path, faults: Faults | None = None) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl: each has a `step`; the other values are numbers or None."""
    return list(parsed_lines(path, _values, faults))


def newest_metrics_in(path: Path, faults: Faults | None = None) -> list[dict[str, Any]]:
    """Return the newest records of a metrics.jsonl, from its last 64 KB; damaged lines are skipped without a fault."""
    newest = []
    for line in read_ends(path, faults, last=_NEWEST_BYTES)[1].splitlines():
        with contextlib.suppress(ValueError):  # the first one may be cut, the last one torn
            newest.append(_values(parse_record(line)))
    return newest


def _values(record: Mapping[str, Any]) -> dict[str, Any]:
    try:
        as_count(record.get("step"))
    except ValueError as error:
        raise ValueError(f"its step: {error}") from error
    return metric_values(record)


def scores_in(path: Path, metric: str) -> dict[int, float]:
    """Return step -> value of `metric` for the records of a metrics.jsonl that have a value."""
    return {record["step"]: float(record[metric]) for record in read_metrics(path) if record.get(metric) is not None}


class MetricsLog:
    """Writer of metric records; only rank 0 writes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: deque[dict[str, Any]] = deque(maxlen=_MAX_WAITING)
        self._begin = self._written = time.monotonic()
        self._is_refused = False

    def rewind(self, step: int) -> None:
        """Remove the records after `step` and a torn last line, because training continues from `step`."""
        self._waiting = deque((record for record in self._waiting if record["step"] <= step), maxlen=_MAX_WAITING)
        if not self._path.exists():
            return
        faults = Faults()
        kept = [record for record in read_metrics(self._path, faults) if record["step"] <= step]
        for fault in faults:
            _LOG.warning("WARNING: %s; the line is left out", fault)
        write_atomic(self._path, "".join(to_json(record) + "\n" for record in kept))

    def append(self, step: int, values: dict[str, Any], *, sync: bool = False, may_wait: bool = False) -> None:
        """Add one record; `step` must not be less than the one before.

        A full disk does not end the training: the record waits for the next write, with a warning for the first.

        Args:
            step: optimizer steps done.
            values: metric -> value.
            sync: True if the record must survive a power cut.
            may_wait: True if the record may be written with later ones, up to 10 s later in a long run. Opening a file
                for each record of short steps would cost the file server ten requests a second. Call `flush` before
                writing anything that a restart resumes from.

        Raises:
            OSError: the file system refused; without `sync`, only for a reason other than a full or failing disk.
        """
        self._waiting.append({"step": step, **values})
        now = time.monotonic()
        age_s = now - self._begin
        pause_s = 0.0 if age_s < _YOUNG_S else min(age_s / _YOUNG_S, _MOST_S)
        if not may_wait or sync or now - self._written >= pause_s:
            self.flush(sync=sync)

    def flush(self, *, sync: bool = False) -> None:
        """Write the records that wait; arguments and errors as for `append`."""
        if not self._waiting:
            return
        try:
            append_lines(self._path, list(self._waiting), sync=sync)
        except OSError as error:
            if sync or not is_storage_error(error):
                raise
            if not self._is_refused:
                step = self._waiting[-1]["step"]
                _LOG.warning("WARNING: step %d: metrics wait for room on the disk: %s", step, error)
            self._is_refused = True
            return
        self._is_refused = False
        self._written = time.monotonic()
        self._waiting.clear()
