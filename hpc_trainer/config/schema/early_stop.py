"""`train.early_stop`: end a run that no longer gets better."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Mode(str, enum.Enum):
    """Which values of a metric are better."""

    min = "min"
    max = "max"


@dataclass(kw_only=True, slots=True)
class EarlyStopConfig:
    metric: str = "eval_loss"
    """What is compared: a metric of the evaluation. The best value so far is kept also with `patience=null`."""
    mode: Mode = Mode.min
    """min: smaller is better; max: larger is better."""
    patience: int | None = None
    """Evaluations in a row without a better value after which the run ends, COMPLETED, ≥ 1; null: never."""
