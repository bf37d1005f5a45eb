"""metrics.jsonl: one line for each logged step, monotone in step; steps that are run again replace their lines."""

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
# Some 200 lines, which take 2 ms: a whole file may have 100,000.
_NEWEST_BYTES = 65_536
# Lines that wait for room on a full disk; of more, the oldest are lost.
_MAX_WAITING = 1_000
# From this age of the log on, records wait for others: for a thirtieth of its age, and 10 s at most.
_YOUNG_S, _MOST_S = 30.0, 10.0

SPEED = (
    "steps_per_s", "step_time_s", "step_time_p50_s", "step_time_p95_s", "step_time_p99_s", "samples_per_s",
    "tokens_per_s", "data_wait_s", "data_wait_share", "mfu",
)  # fmt: skip
"""Metrics that say how fast steps go: never the same twice, and no outcome of a run."""
WORK = {"tokens_per_s": "tokens/s", "samples_per_s": "samples/s", "steps_per_s": "steps/s"}
"""Of `SPEED` what counts as the work of a second, the best word first, with its unit."""


def read_metrics(path: Path, faults: Faults | None = None) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl: each has a `step`, the other values are numbers or None."""
    return list(parsed_lines(path, _values, faults))


def newest_metrics_in(path: Path, faults: Faults | None = None) -> list[dict[str, Any]]:
    """As `read_metrics`, the last records alone, 64 KB; what cannot be read is left out and told to nobody."""
    found = []
    for line in read_ends(path, faults, last=_NEWEST_BYTES)[1].splitlines():
        with contextlib.suppress(ValueError):  # the first one may be cut, the last one torn
            found.append(_values(parse_record(line)))
    return found


def _values(record: Mapping[str, Any]) -> dict[str, Any]:
    try:
        as_count(record.get("step"))
    except ValueError as error:
        raise ValueError(f"its step: {error}") from error
    return metric_values(record)


def scores_in(path: Path, metric: str) -> dict[int, float]:
    """Step -> value of `metric`, of the records of a metrics.jsonl that have one."""
    return {each["step"]: float(each[metric]) for each in read_metrics(path) if each.get(metric) is not None}


class MetricsLog:
    """Appends metric records. One writer: rank 0."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: deque[dict[str, Any]] = deque(maxlen=_MAX_WAITING)
        self._begin = self._written = time.monotonic()
        self._is_refused = False

    def rewind(self, step: int) -> None:
        """Drops the records after `step`, and a torn last line: training goes on from there."""
        self._waiting = deque((each for each in self._waiting if each["step"] <= step), maxlen=_MAX_WAITING)
        if not self._path.exists():
            return
        faults = Faults()
        kept = [record for record in read_metrics(self._path, faults) if record["step"] <= step]
        for fault in faults:
            _LOG.warning("WARNING: %s; the line is left out", fault)
        write_atomic(self._path, "".join(to_json(record) + "\n" for record in kept))

    def append(self, step: int, values: dict[str, Any], *, sync: bool = False, may_wait: bool = False) -> None:
        """Add one record; `step` must not be less than the one before.

        A full disk costs no training its life: the record waits for the next one, with a warning for the first.

        Args:
            step: optimizer steps done.
            values: metric -> value.
            sync: the record survives a power cut.
            may_wait: the record may be written with later ones, up to 10 s later in a long run: a file that is opened
                for each record of short steps is ten requests a second to the file server. Call `flush` before
                anything that a restart goes on from.

        Raises:
            OSError: with `sync` the file system refused; without it, for another reason than no room or a fault.
        """
        self._waiting.append({"step": step, **values})
        now = time.monotonic()
        age_s = now - self._begin
        pause_s = 0.0 if age_s < _YOUNG_S else min(age_s / _YOUNG_S, _MOST_S)
        if not may_wait or sync or now - self._written >= pause_s:
            self.flush(sync=sync)

    def flush(self, *, sync: bool = False) -> None:
        """Write the records that wait. Arguments and errors as of `append`."""
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
