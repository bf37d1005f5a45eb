"""`task=multi_label`: any number of labels a sample, each there or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch.nn import functional

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.tasks.pairs import PairTask, checked_count, like_targets


def build(config: TrainConfig) -> MultiLabel:
    """That of `task=multi_label`."""
    return MultiLabel()


class MultiLabel(PairTask):
    """Outputs are a logit for each label, targets 0 or 1; the loss is binary cross entropy.

    Evaluations tell `eval_loss` (nats), `eval_accuracy` (share of labels that are right) and `eval_f1` (of all labels
    together; 1 where there is none, and none was told). A label is told where its logit is above 0.
    """

    num_sums: ClassVar[int] = 5

    def loss_of(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """In fp32."""
        return functional.binary_cross_entropy_with_logits(*like_targets(outputs, targets))

    def sums_of(self, outputs: torch.Tensor, targets: torch.Tensor) -> Sequence[torch.Tensor]:
        """Of all labels: the losses, the right ones, those told that are there, those told or there; and all."""
        logits, targets = like_targets(outputs, targets)
        loss = functional.binary_cross_entropy_with_logits(logits, targets, reduction="sum")
        told, there = logits > 0, targets > 0.5
        count = logits.new_tensor(logits.numel(), dtype=torch.int64)
        return loss, (told == there).sum(), (told & there).sum(), told.sum() + there.sum(), count

    def predictions_of(self, outputs: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Of each label: whether it is told (`labels`, 0 or 1), and its probability."""
        return {"labels": (outputs > 0).int(), "probabilities": outputs.float().sigmoid()}

    def figures(self, totals: Sequence[float]) -> dict[str, float]:
        """As the class says."""
        loss, num_right, num_hit, num_told_and_there, count = totals
        count = checked_count(count, "empty")
        f1 = 2 * num_hit / num_told_and_there if num_told_and_there else 1.0
        return {"eval_loss": loss / count, "eval_accuracy": num_right / count, "eval_f1": f1}
