"""logs/attempt-NNN.failure.json: the first failing rank's error, as the journal's `error` too."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_trainer.runs.reading import Faults, as_count, as_text, as_time, read_json

_FIELDS = {
    "rank": as_count, "node": as_text, "exit_code": as_count, "type": as_text, "message": as_text,
    "traceback": as_text, "output": as_text, "time": as_time, "cause": as_text, "start": as_text,
}  # fmt: skip


def read_failure(path: Path, faults: Faults | None = None) -> dict[str, Any]:
    """The record of a failure file; {} if there is none that can be read."""
    return read_error(read_json(path, faults) or {})


def read_error(record: object) -> dict[str, Any]:
    """An error as a worker records it, without values that no worker writes."""
    if not isinstance(record, Mapping):
        return {}
    found = dict(record)
    for key, convert in _FIELDS.items():
        if key in found:
            with contextlib.suppress(ValueError):
                found[key] = convert(found[key])
                continue
            del found[key]
    if not isinstance(found.get("memory", {}), dict):
        del found["memory"]
    return found
