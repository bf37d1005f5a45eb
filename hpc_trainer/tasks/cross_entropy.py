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
"""Target that does not count: cross_entropy's default `ignore_index`."""


def build(config: TrainConfig) -> CrossEntropy:
    """Build the task of `task=classification`."""
    return CrossEntropy(config.train.label_smoothing)


def build_language_model(config: TrainConfig) -> LanguageModel:
    """Build the task of `task=language_model`."""
    return LanguageModel(config.train.label_smoothing)


class CrossEntropy(PairTask):
    """Cross entropy of logits [batch, ..., classes] and class ids [batch, ...] in int64; -100 (padding) does not count.

    In training, targets may be shares of classes of mixed samples instead, [batch, classes] in a float format: rows
    add up to 1, and a row of zeros does not count.

    Evaluations report `eval_loss` (nats, without label smoothing) and `eval_accuracy` (share of correct predictions,
    0 to 1).
    """

    counts_targets: ClassVar[bool] = True
    needs_classes: ClassVar[bool] = True
    num_sums: ClassVar[int] = 3

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = label_smoothing

    def loss_of(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy over the targets that count, in nats."""
        outputs = in_fp32(outputs)
        if targets.is_floating_point():
            return _of_shares(outputs, targets, self.label_smoothing)
        if outputs.ndim > 2:  # tested, because flattening a flat tensor takes 14 µs
            outputs, targets = outputs.flatten(0, -2), targets.flatten()
        return functional.cross_entropy(outputs, targets, label_smoothing=self.label_smoothing)

    def num_targets(self, batch: Any) -> int:
        """Return the number of targets that count: not -100, or rows of shares that are not 0."""
        targets: torch.Tensor = batch[1]
        return int((_have_shares(targets) if targets.is_floating_point() else targets != IGNORED).sum())

    def sums_of(self, outputs: torch.Tensor, targets: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the sums of cross entropies, of correct predictions and of targets that count."""
        logits, targets = in_fp32(outputs).flatten(0, -2), targets.flatten()
        loss = functional.cross_entropy(logits, targets, reduction="sum")
        right, counted = logits.argmax(-1) == targets, targets != IGNORED
        return loss, right.sum(), counted.sum()

    def predictions_of(self, outputs: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return the likeliest `class` and all `probabilities`; for sequences `class` and `probability` per token."""
        probabilities = outputs.float().softmax(-1)
        if outputs.ndim == 2:
            return {"class": outputs.argmax(-1), "probabilities": probabilities}
        highest, chosen = probabilities.max(-1)
        return {"class": chosen, "probability": highest}

    def figures(self, totals: Sequence[float]) -> dict[str, float]:
        """Return `eval_loss` and `eval_accuracy`."""
        loss, num_right, count = totals
        count = checked_count(count, str(IGNORED))
        return {"eval_loss": loss / count, "eval_accuracy": num_right / count}


class LanguageModel(CrossEntropy):
    """Cross entropy that also reports `eval_perplexity`: e to the power of `eval_loss`."""

    def figures(self, totals: Sequence[float]) -> dict[str, float]:
        """Return the metrics with `eval_perplexity`; inf if that is too large for a float."""
        metrics = super().figures(totals)
        try:
            return {**metrics, "eval_perplexity": math.exp(metrics["eval_loss"])}
        except OverflowError:
            return {**metrics, "eval_perplexity": math.inf}


def in_fp32(logits: torch.Tensor) -> torch.Tensor:
    """Return logits of 16 bits as fp32, and others as they are.

    Autocast on CUDA leaves `cross_entropy` in the format of the logits: log probabilities near 11 are then rounded to
    1/16 in bf16, which changes the loss and each gradient. On the CPU autocast computes it in fp32.
    """
    return logits.float() if logits.itemsize == 2 else logits


def _of_shares(logits: torch.Tensor, shares: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    """Return the mean cross entropy of targets that are shares of classes.

    For two classes with shares w and 1 - w this is w times the loss of one and 1 - w times the loss of the other.
    """
    losses = functional.cross_entropy(logits, shares, reduction="none", label_smoothing=label_smoothing)
    counted = _have_shares(shares)
    return torch.where(counted, losses, 0.0).sum() / counted.sum()


def _have_shares(shares: torch.Tensor) -> torch.Tensor:
    """Return which rows count, bool [batch]."""
    return shares.sum(-1) > 0.5
