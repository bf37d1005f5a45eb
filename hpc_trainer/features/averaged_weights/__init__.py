"""`train.ema_decay`: evaluations with an average of the weights."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.feature import Feature, Row


def _problems(config: TrainConfig) -> Iterator[str]:
    decay = config.train.ema_decay
    if decay is not None and not 0 < decay < 1:
        yield f"train.ema_decay={decay:g} must be in (0, 1), both ends excluded. Use 0.999."


FEATURE = Feature(
    on="train.ema_decay",
    example="train.ema_decay=0.999",
    excludes=(Row("parallel.sync", "each of both averages weights"),),
    problems=_problems,
)
