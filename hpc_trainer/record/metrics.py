"""Metrics of a run: metrics.jsonl, and the JSON lines that a user's program logs.

metrics.jsonl has one line for each logged step, monotone in step; steps that run again replace their lines. A program
logs into the file that `$HPC_TRAINER_METRICS` names.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hpc_trainer.config.user_files import open_given
from hpc_trainer.record.files import append_lines, to_json, write_atomic
from hpc_trainer.record.reading import (
    Faults,
    as_count,
    is_storage_error,
    is_torn,
    metric_values,
    parse_record,
    parse_together,
    parsed_lines,
    raw_lines,
    read_bytes,
    read_ends,
    tell,
)

_LOG = logging.getLogger(__name__)
# About 200 lines, which take 2 ms to read: a whole file may have 100,000.
_NEWEST_BYTES = 65_536
_MOST_SAMPLED = 2**29
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


def sampled_metrics(path: Path, most: int, faults: Faults | None = None) -> tuple[list[dict[str, Any]], int]:
    """Return records of a metrics.jsonl in its order, and the largest distance between them: 1 if these are all.

    Lines with equally many values are alike. Of more than `most` such lines about `most` are parsed at equal distances,
    the first and the last among them. So the few records of evaluations are kept whole beside the many of training.

    Args:
        path: the file.
        most: number of lines of each kind to parse, ≥ 2.
        faults: gets a fault for each unreadable line among those that are parsed.
    """
    with contextlib.suppress(OSError):
        if path.stat().st_size > _MOST_SAMPLED:  # too much to hold: read line by line
            return read_metrics(path, faults), 1
    data = read_bytes(path, faults, limit=_MOST_SAMPLED)
    lines = [] if data is None else data.splitlines(keepends=True)
    kinds: dict[int, list[int]] = {}
    for index, line in enumerate(lines):
        kinds.setdefault(line.count(b'":'), []).append(index)
    chosen: list[int] = []
    gaps = [1]
    for places in kinds.values():
        gaps.append(-(-len(places) // most))
        chosen += places if gaps[-1] == 1 else {*places[:: gaps[-1]], places[-1]}
    chosen.sort()
    with contextlib.suppress(ValueError):  # one by one, lines without a step get a fault
        together = parse_together([lines[index] for index in chosen])
        if together is not None:
            return [_values(record) for record in together], max(gaps)
    sampled = []
    for index in chosen:
        try:
            sampled.append(_values(parse_record(lines[index])))
        except ValueError as error:  # noqa: PERF203  (a damaged line must not stop the others)
            if not is_torn(lines[index]):
                tell(faults, path, error, index + 1)
    return sampled, max(gaps)


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


def best_in(
    path: Path, names: Collection[str], is_least_best: Callable[[str], bool], *, last: int, faults: Faults | None = None
) -> dict[str, tuple[float, int]]:
    """Return each metric's best value in a metrics.jsonl, and the first step that had it; NaN is never the best.

    Args:
        path: the file; lines without any of the metrics are not parsed.
        names: the metrics.
        is_least_best: function that returns True for a metric whose least value is the best.
        last: step up to which values count.
        faults: gets a fault for each unreadable line among those with a metric.
    """
    best: dict[str, tuple[float, int]] = {}
    if not names:
        return best
    quoted = {name: to_json(name).encode() for name in names}
    has_one = re.compile(b"|".join(map(re.escape, quoted.values()))).search
    for number, _, data in raw_lines(path, faults):
        if has_one(data) is None:
            continue
        try:
            record = _values(parse_record(data))
        except ValueError as error:
            if not is_torn(data):
                tell(faults, path, error, number)
            continue
        step = record["step"]
        for name in quoted if step <= last else ():
            value = record.get(name)
            if value is None or math.isnan(value):
                continue
            if name not in best or (value < best[name][0] if is_least_best(name) else value > best[name][0]):
                best[name] = float(value), step
    return best


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


VARIABLE = "HPC_TRAINER_METRICS"
# A line is one write and is read whole; this is enough for names and numbers of some hundred metrics.
MAX_LINE_BYTES = 2**16
_NOT_METRICS = ("step", "num_steps", "time")


class Told(NamedTuple):
    """Line of metrics that a program logged."""

    step: int
    num_steps: int | None
    """Steps of the whole run, if the program logs them."""
    metrics: dict[str, float]


def log_metrics(
    step: int, metrics: Mapping[str, Any] | None = None, *, num_steps: int | None = None, **more: Any
) -> bool:
    """Log a step and its metrics, which `status`, `results` and `report` show.

    Only Python is needed: no torch, no configuration. Each call appends one line by a single write, on the first rank
    only.

    Args:
        step: number of steps done, ≥ 0.
        metrics: name -> a number, or an object whose `item()` returns a number. `more` are metrics too.
        num_steps: steps of the whole run, for the progress bar and the ETA.

    Returns:
        False if the line is not written: outside of a run, on all ranks and nodes but the first, and if a pipe has
        replaced the file.

    Raises:
        TypeError, ValueError: a metric is not a number.
    """
    path = os.environ.get(VARIABLE)
    # A program that is started once a node may have no RANK: torchrun sets it, TensorFlow and mpirun do not.
    rank = os.environ.get("RANK") or os.environ.get("NODE_RANK") or "0"
    if not path or rank != "0":
        return False
    numbers = {
        key: float(getattr(value, "item", lambda value=value: value)())
        for key, value in {**(metrics or {}), **more}.items()
    }
    line = {"step": int(step), **({} if num_steps is None else {"num_steps": int(num_steps)}), **numbers}
    try:
        # O_NONBLOCK: without it, a pipe that nobody reads would block the program for ever.
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return False
        raise
    try:
        os.write(descriptor, f"{to_json(line)}\n".encode())
    finally:
        os.close(descriptor)
    return True


class NewLines:
    """Reader of a file of metrics while it grows; each kind of unreadable line is reported once in `problems`."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.problems: list[str] = []

    def read(self) -> Iterator[Told]:
        """Yield the complete lines since the last call."""
        try:
            with open_given(self._path) as file:
                file.seek(self._offset)
                data = file.read(64 * MAX_LINE_BYTES)
        except FileNotFoundError:
            return
        except OSError as error:
            self._tell(f"{self._path.name} cannot be read: {error.strerror or error}")
            return
        end = data.rfind(b"\n") + 1
        if not end and len(data) > MAX_LINE_BYTES:
            self._tell(f"a line is longer than {MAX_LINE_BYTES} bytes")
            end = len(data)
        self._offset += end
        for line in data[:end].splitlines():
            record = self._parse(line)
            if record is not None:
                yield record

    def _parse(self, line: bytes) -> Told | None:
        if not line.strip():
            return None
        try:
            record = parse_record(line)
            step = as_count(record["step"])
            num_steps = None if record.get("num_steps") is None else as_count(record["num_steps"])
        except KeyError:
            self._tell('a line has no "step"')
            return None
        except ValueError as error:
            self._tell(f"a line is not a record of metrics: {error}")
            return None
        numbers = {
            key: value for key, value in metric_values(record).items() if key not in _NOT_METRICS and value is not None
        }
        lost = sorted(set(record) - set(numbers) - set(_NOT_METRICS))
        if lost:
            self._tell(f"{', '.join(lost[:5])}: not a number, left out")
        return Told(step, num_steps, numbers)

    def _tell(self, problem: str) -> None:
        if problem not in self.problems and len(self.problems) < 20:
            self.problems.append(problem)
            print(f'{VARIABLE}: {problem}. A line is JSON, as {{"step": 10, "loss": 0.3}}.', flush=True)  # noqa: T201
