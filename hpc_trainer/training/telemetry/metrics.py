"""Checks of the metrics that a run logs: each is one number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hpc_trainer.errors import LoopError
from hpc_trainer.runs.states import NOT_FINITE

RESERVED = ("step", "time")
"""Keys that each line of metrics.jsonl has already."""


def cause_of_end(metrics: Mapping[str, float], early_reason: str | None) -> str:
    """Return a finished run's cause: `not_finite` if a final metric is NaN or infinite, else `done` or `early_stop`."""
    if not all(map(math.isfinite, metrics.values())):
        return NOT_FINITE
    return "done" if early_reason is None else "early_stop"


def read_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Convert metrics to numbers; a tensor or an array must hold one number.

    Raises:
        LoopError: a value is not one number, or a name is reserved.
    """
    numbers = {}
    for key, value in values.items():
        try:
            numbers[key] = value if isinstance(value, (int, float)) else value.item()
            float(numbers[key])
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise LoopError(f"the metric {key}={value!r} must be one number.") from error
        if key in RESERVED:
            raise LoopError(f"the metric {key!r} has a name that each line of metrics.jsonl has already. Rename it.")
    return numbers
