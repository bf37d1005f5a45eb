"""`train.ema_decay`: evaluations with an average of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpc_trainer.config.schema.key import ALWAYS, ONCE_SET, SCHEDULE, key
from hpc_trainer.config.table.feature import Feature, Row

if TYPE_CHECKING:
    from hpc_trainer.config.schema.train import TrainConfig


class Keys:
    """Key in the section `train`."""

    ema_decay: float | None = key(None, ALWAYS, ONCE_SET, SCHEDULE, limits="(0, 1)")
    """Share of the averaged weights that a step keeps, such as 0.999; evaluations use the average. null: no average."""


def _problems(config: TrainConfig) -> Iterator[str]:
    decay = config.train.ema_decay
    if decay is not None and not 0 < decay < 1:
        yield f"train.ema_decay={decay:g} must be in (0, 1), both ends excluded. Use 0.999."


FEATURE = Feature(
    on="train.ema_decay",
    example="train.ema_decay=0.999",
    excludes=(Row("parallel.sync", "both average weights"),),
    problems=_problems,
)
