"""`task=multi_label`: any number of labels per sample, each present or absent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch.nn import functional

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.tasks.pairs import PairTask, checked_count, like_targets


def build(config: TrainConfig) -> MultiLabel:
    """Build the task of `task=multi_label`."""
    return MultiLabel()


class MultiLabel(PairTask):
    """Binary cross entropy of one logit per label, with targets 0 or 1.

    Evaluations report `eval_loss` (nats), `eval_accuracy` (share of correct labels) and `eval_f1` (over all labels
    together; 1 if no label is present or predicted). A label is predicted if its logit is above 0.
    """

    num_sums: ClassVar[int] = 5

    def loss_of(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean binary cross entropy, in nats, computed in fp32."""
        return functional.binary_cross_entropy_with_logits(*like_targets(outputs, targets))

    def sums_of(self, outputs: torch.Tensor, targets: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return five scalars over all labels, for `figures`.

        They are the sum of the losses; the numbers of correct labels, of true positives, and of predicted labels plus
        present labels; and the number of all labels.
        """
        logits, targets = like_targets(outputs, targets)
        loss = functional.binary_cross_entropy_with_logits(logits, targets, reduction="sum")
        predicted, present = logits > 0, targets > 0.5
        count = logits.new_tensor(logits.numel(), dtype=torch.int64)
        return loss, (predicted == present).sum(), (predicted & present).sum(), predicted.sum() + present.sum(), count

    def predictions_of(self, outputs: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return for each label whether it is predicted (`labels`, 0 or 1), and its probability."""
        return {"labels": (outputs > 0).int(), "probabilities": outputs.float().sigmoid()}

    def figures(self, totals: Sequence[float]) -> dict[str, float]:
        """Return `eval_loss`, `eval_accuracy` and `eval_f1`."""
        loss, num_right, num_hits, num_predicted_plus_present, count = totals
        count = checked_count(count, "empty")
        f1 = 2 * num_hits / num_predicted_plus_present if num_predicted_plus_present else 1.0
        return {"eval_loss": loss / count, "eval_accuracy": num_right / count, "eval_f1": f1}
