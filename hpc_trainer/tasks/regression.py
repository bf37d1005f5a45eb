"""`task=regression`: numbers, compared one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch.nn import functional

from hpc_trainer.config.schema.task import RegressionConfig, RegressionLoss
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.tasks.pairs import PairTask, checked_count, like_targets


def build(config: TrainConfig) -> Regression:
    """Build the task of `task=regression`."""
    assert isinstance(config.task, RegressionConfig)
    return Regression(config.task)


class Regression(PairTask):
    """Regression loss of outputs that have as many elements as the targets.

    Evaluations report `eval_loss`, `eval_mae` (mean |d|) and `eval_rmse` (root of the mean d²); d is output - target.
    """

    num_sums: ClassVar[int] = 4

    def __init__(self, config: RegressionConfig) -> None:
        self._config = config

    def loss_of(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss, computed in fp32."""
        return self._loss(*like_targets(outputs, targets), "mean")

    def sums_of(self, outputs: torch.Tensor, targets: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the sums of the losses, of |d| and of d² over all elements; and the number of elements."""
        outputs, targets = like_targets(outputs, targets)
        off, count = outputs - targets, outputs.new_tensor(outputs.numel(), dtype=torch.int64)
        return self._loss(outputs, targets, "sum"), off.abs().sum(), off.square().sum(), count

    def figures(self, totals: Sequence[float]) -> dict[str, float]:
        """Return `eval_loss`, `eval_mae` and `eval_rmse`."""
        loss, absolute, squared, count = totals
        count = checked_count(count, "empty")
        return {"eval_loss": loss / count, "eval_mae": absolute / count, "eval_rmse": math.sqrt(squared / count)}

    def _loss(self, outputs: torch.Tensor, targets: torch.Tensor, reduction: str) -> torch.Tensor:
        if self._config.loss is RegressionLoss.l1:
            return functional.l1_loss(outputs, targets, reduction=reduction)
        if self._config.loss is RegressionLoss.huber:
            return functional.huber_loss(outputs, targets, reduction=reduction, delta=self._config.huber_delta)
        return functional.mse_loss(outputs, targets, reduction=reduction)
