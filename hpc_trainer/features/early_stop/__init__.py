"""`train.early_stop`: the run ends when an evaluation's metric no longer gets better."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_trainer.config.schema.key import ALWAYS, ONCE_SET, SCHEDULE, key, only_with, section
from hpc_trainer.config.table.feature import Feature, Row

if TYPE_CHECKING:
    from hpc_trainer.config.schema.train import TrainConfig


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


class Keys:
    """Key in the section `train`."""

    early_stop: EarlyStopConfig = section(EarlyStopConfig, ONCE_SET, SCHEDULE)


_LARGEST = 2**20


def _problems(config: TrainConfig) -> Iterator[str]:
    patience = config.train.early_stop.patience
    if patience is not None and not 1 <= patience <= _LARGEST:
        yield f"train.early_stop.patience={patience} must be 1 to {_LARGEST}. Use 3."


FEATURE = Feature(
    on="train.early_stop.patience",
    example="train.early_stop.patience=3 train.eval_every_steps=1",
    excludes=(
        Row(
            "train.eval_every_steps=0",
            "it counts evaluations, and there would be only one, at the end",
            use=lambda config: f"train.eval_every_steps={max(1, config.train.num_steps // 10)}",
        ),
    ),
    problems=_problems,
)
