"""What may be logged: metrics that are one number each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hpc_trainer.errors import LoopError
from hpc_trainer.runs.states import NOT_FINITE

RESERVED = ("step", "time")
"""Of each line of metrics.jsonl."""


def cause_of_end(metrics: Mapping[str, float], early_reason: str | None) -> str:
    """Of a run that has finished: `not_finite` if a final metric is NaN or infinite, else `done` or `early_stop`."""
    if not all(map(math.isfinite, metrics.values())):
        return NOT_FINITE
    return "done" if early_reason is None else "early_stop"


def read_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Numbers, also of tensors and arrays that hold one. Raises LoopError for anything else, and for reserved names."""
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
