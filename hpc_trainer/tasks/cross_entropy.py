"""`task=classification` and `task=language_model`: cross entropy over classes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.nn import functional

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.tasks.pairs import PairTask, checked_count

IGNORED = -100
"""A target that counts nothing: cross_entropy's default `ignore_index`."""


def build(config: TrainConfig) -> CrossEntropy:
    """That of `task=classification`."""
    return CrossEntropy(config.train.label_smoothing)


def build_language_model(config: TrainConfig) -> LanguageModel:
    """That of `task=language_model`."""
    return LanguageModel(config.train.label_smoothing)


class CrossEntropy(PairTask):
    """Outputs are logits [batch, ..., classes], targets class ids [batch, ...] in int64; -100 (padding) counts nothing.

    In training targets may be shares of classes instead, [batch, classes] in a float format, of mixed samples: rows add
    up to 1, and a row of zeros counts nothing.

    Evaluations tell `eval_loss` (nats, without label smoothing) and `eval_accuracy` (share of right ones, 0 to 1).
    """

    counts_targets: ClassVar[bool] = True
    needs_classes: ClassVar[bool] = True
    num_sums: ClassVar[int] = 3

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = label_smoothing

    def loss_of(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Nats."""
        if targets.is_floating_point():
            return _of_shares(outputs, targets, self.label_smoothing)
        if outputs.ndim > 2:  # asked, as flattening what is flat takes 14 µs
            outputs, targets = outputs.flatten(0, -2), targets.flatten()
        return functional.cross_entropy(outputs, targets, label_smoothing=self.label_smoothing)

    def num_targets(self, batch: Any) -> int:
        """Those that are not -100."""
        targets: torch.Tensor = batch[1]
        return int((_have_shares(targets) if targets.is_floating_point() else targets != IGNORED).sum())

    def sums_of(self, outputs: torch.Tensor, targets: torch.Tensor) -> Sequence[torch.Tensor]:
        """The cross entropies, the right predictions, and the targets that count, each added up."""
        logits, targets = outputs.flatten(0, -2), targets.flatten()
        loss = functional.cross_entropy(logits, targets, reduction="sum")
        right, counted = logits.argmax(-1) == targets, targets != IGNORED
        return loss, right.sum(), counted.sum()

    def predictions_of(self, outputs: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """The likeliest `class` and all `probabilities`; of a sequence each token's `class` and its `probability`."""
        probabilities = outputs.float().softmax(-1)
        if outputs.ndim == 2:
            return {"class": outputs.argmax(-1), "probabilities": probabilities}
        highest, chosen = probabilities.max(-1)
        return {"class": chosen, "probability": highest}

    def figures(self, totals: Sequence[float]) -> dict[str, float]:
        """As the class says."""
        loss, num_right, count = totals
        count = checked_count(count, str(IGNORED))
        return {"eval_loss": loss / count, "eval_accuracy": num_right / count}


class LanguageModel(CrossEntropy):
    """Besides, `eval_perplexity`: e to the power of `eval_loss`."""

    def figures(self, totals: Sequence[float]) -> dict[str, float]:
        """As the class says; inf where the power is too large for a float."""
        found = super().figures(totals)
        try:
            return {**found, "eval_perplexity": math.exp(found["eval_loss"])}
        except OverflowError:
            return {**found, "eval_perplexity": math.inf}


def _of_shares(logits: torch.Tensor, shares: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    """Of two classes with weights w and 1 - w it is w times the loss of one and 1 - w times that of the other."""
    losses = functional.cross_entropy(logits, shares, reduction="none", label_smoothing=label_smoothing)
    counted = _have_shares(shares)
    return torch.where(counted, losses, 0.0).sum() / counted.sum()


def _have_shares(shares: torch.Tensor) -> torch.Tensor:
    """Which rows count, [batch]."""
    return shares.sum(-1) > 0.5
