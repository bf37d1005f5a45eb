"""metrics.jsonl: one line for each logged step, monotone in step; steps that are run again replace their lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpc_trainer.runs.files import append_lines, read_lines, write_atomic


class MetricsLog:
    """Appends metric records. One writer: rank 0."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def rewind(self, step: int) -> None:
        """Drops the records after `step`, and a torn last line: training goes on from there."""
        if not self._path.exists():
            return
        kept = [record for record in read_lines(self._path) if record.get("step", 0) <= step]
        write_atomic(self._path, "".join(json.dumps(record) + "\n" for record in kept))

    def append(self, step: int, values: dict[str, Any], *, sync: bool = False) -> None:
        """Adds one record; `step` must not be less than the one before. `sync`: it survives a power cut."""
        append_lines(self._path, [{"step": step, **values}], sync=sync)


def last_metrics(path: Path) -> dict[str, Any]:
    """The newest value of each metric; {} without a file."""
    merged: dict[str, Any] = {}
    for record in read_lines(path):
        merged.update(record)
    return merged
