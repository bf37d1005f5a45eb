"""`train.early_stop`: end a run that no longer gets better."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from hpc_trainer.config.schema.effect import only_with


class Mode(str, enum.Enum):
    """Which values of a metric are better."""

    min = "min"
    max = "max"


@dataclass(kw_only=True, slots=True)
class EarlyStopConfig:
    metric: str = field(default="eval_loss", metadata=only_with("train.early_stop.patience"))
    """What is compared: a metric of the evaluation. The best value so far is kept also with `patience=null`."""
    mode: Mode = field(default=Mode.min, metadata=only_with("train.early_stop.patience"))
    """min: smaller is better; max: larger is better."""
    patience: int | None = None
    """Evaluations in a row without a better value after which the run ends, COMPLETED, ≥ 1; null: never."""
