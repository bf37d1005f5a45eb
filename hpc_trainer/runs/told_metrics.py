"""Metrics that a user's program logs: JSON lines in the file that `$HPC_TRAINER_METRICS` names.

    {"step": 10, "loss": 0.31, "num_steps": 1000}

A program writes the lines itself, by `hpc_trainer.log_metrics`, or by `hpc-trainer log` from a shell. Each attempt has
a file of its own. The worker of rank 0 copies new lines into metrics.jsonl and the heartbeat (worker/program_story.py).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hpc_trainer.config.data_files.given import open_given
from hpc_trainer.runs.files import to_json
from hpc_trainer.runs.reading import parse_record
from hpc_trainer.runs.record_values import as_count, metric_values

VARIABLE = "HPC_TRAINER_METRICS"
# A line is one write and is read whole; this is enough for names and numbers of some hundred metrics.
MAX_LINE_BYTES = 2**16
_NOT_METRICS = ("step", "num_steps", "time")


class Told(NamedTuple):
    """One line of a program's metrics."""

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
            told = self._parse(line)
            if told is not None:
                yield told

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
            self._tell(f"a line is no metrics: {error}")
            return None
        numbers = {
            key: value for key, value in metric_values(record).items() if key not in _NOT_METRICS and value is not None
        }
        lost = sorted(set(record) - set(numbers) - set(_NOT_METRICS))
        if lost:
            self._tell(f"{', '.join(lost[:5])}: no number, left out")
        return Told(step, num_steps, numbers)

    def _tell(self, problem: str) -> None:
        if problem not in self.problems and len(self.problems) < 20:
            self.problems.append(problem)
            print(f'{VARIABLE}: {problem}. A line is JSON, as {{"step": 10, "loss": 0.3}}.', flush=True)  # noqa: T201
