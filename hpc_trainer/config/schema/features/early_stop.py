"""`train.early_stop`: end a run that no longer improves."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hpc_trainer.config.schema.key import ALWAYS, key, only_with


class Mode(str, enum.Enum):
    """Direction in which a metric improves."""

    min = "min"
    max = "max"


@dataclass(kw_only=True, slots=True)
class EarlyStopConfig:
    metric: str = key("eval_loss", only_with("train.early_stop.patience"))
    """Metric of the evaluation to compare. The best value so far is kept even with `patience=null`."""
    mode: Mode = key(Mode.min, only_with("train.early_stop.patience"))
    """min: smaller is better; max: larger is better."""
    patience: int | None = key(None, ALWAYS, limits="≥ 1")
    """Evaluations in a row without a better value after which the run ends as COMPLETED; null: never."""
