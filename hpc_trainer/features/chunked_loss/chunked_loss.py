"""Cross entropy over a large vocabulary, a few rows at a time: no pass ever holds all logits.

A model takes part if its output layer can be run apart from the rest:

    model(inputs, with_head=False)    input of the output layer, [batch, dim] or [batch, seq, dim]
    model.apply_head(hidden)          its logits, [rows, dim] to [rows, num_classes]

For n rows and V classes the plain loss holds n x V logits (fp32, and in bf16 once more) and as many gradients. Here the
logits of each chunk are computed in the forward and again in the backward pass (Chen et al. 2016), and freed
afterwards. torch's own nn.functional.linear_cross_entropy (2.13) computes gradients in the forward pass, before a loss
scale for fp16 could help them. It does not support label smoothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hpc_trainer.errors import ConfigError
from hpc_trainer.tasks.cross_entropy import IGNORED, CrossEntropy, in_fp32
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.data.order import BatchSizes
from hpc_trainer.training.parallel.share import VotingLoss
from hpc_trainer.training.rng import random_state_kept


class ChunkedLossAbility(Ability):
    def see_whole(self, model: nn.Module, building: Building) -> None:
        check_has_head(model)

    def on_loss(self, loss: nn.Module, building: Building) -> None:
        assert self.config.train.loss_chunk_size is not None
        assert isinstance(loss, VotingLoss)
        use_chunks(loss, self.config.train.loss_chunk_size)

    @random_state_kept()
    def sizes(self, sizes: BatchSizes, loss: nn.Module, building: Building) -> BatchSizes:
        """Limit evaluation batches, which have no chunks, to the rows of one chunk, but at least one sample."""
        most, dataset = self.config.train.loss_chunk_size, building.eval_set
        if most is None or dataset is None or not len(dataset):
            return sizes
        num_samples = max(1, most // dataset.__getitems__(range(1))[1].numel())
        return dataclasses.replace(sizes, eval_batch_size=min(sizes.eval_batch_size, num_samples))


ABILITY = ChunkedLossAbility


def use_chunks(loss: VotingLoss, chunk_size: int) -> None:
    """Make `loss` hold the logits of `chunk_size` rows at a time."""
    assert isinstance(loss.task, CrossEntropy)
    loss.mean_loss = partial(_by_chunks, chunk_size, loss.task.label_smoothing)


def _by_chunks(chunk_size: int, label_smoothing: float, model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    hidden: torch.Tensor = model(inputs, with_head=False).flatten(0, -2)
    head: Callable[[torch.Tensor], torch.Tensor] = model.apply_head  # type: ignore[assignment]
    return chunked_cross_entropy(
        head, hidden, targets.flatten(), chunk_size=chunk_size, label_smoothing=label_smoothing
    )


def check_has_head(model: nn.Module) -> None:
    """Raise ConfigError unless the output layer of `model` can be run apart."""
    takes = inspect.signature(model.forward).parameters
    if not callable(getattr(model, "apply_head", None)) or "with_head" not in takes:
        raise ConfigError(
            f"train.loss_chunk_size runs the output layer separately, which {type(model).__name__} does not support: "
            "give it forward(inputs, *, with_head=True) and apply_head(hidden) (hpc_trainer/features/chunked_loss), "
            "or leave train.loss_chunk_size=null."
        )


def chunked_cross_entropy(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    targets: torch.Tensor,
    *,
    chunk_size: int,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Return the mean cross entropy in nats, a scalar equal to `functional.cross_entropy(head(hidden), targets)`.

    Args:
        head: maps hidden states to logits, row by row.
        hidden: [rows, dim].
        targets: int64 class ids, [rows]; -100 does not count.
        chunk_size: rows whose logits are held at a time, ≥ 1.
        label_smoothing: share of the probability that is spread evenly over all classes, in [0, 1).
    """
    total: torch.Tensor | None = None
    for rows, wanted in zip(torch.split(hidden, chunk_size), torch.split(targets, chunk_size), strict=True):
        part: torch.Tensor = checkpoint(_sum, head, rows, wanted, label_smoothing, use_reentrant=False)
        total = part if total is None else total + part
    assert total is not None
    return total / (targets != IGNORED).sum()


def _sum(
    head: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor, targets: torch.Tensor, label_smoothing: float
) -> torch.Tensor:
    with _own_casts(rows.device.type):
        logits = in_fp32(head(rows))
        return functional.cross_entropy(logits, targets, reduction="sum", label_smoothing=label_smoothing)


def _own_casts(device_type: str) -> contextlib.AbstractContextManager[None]:
    """Keep autocast as it is, but let each chunk cast the weight again.

    Autocast's cached cast would be shared by all chunks, and their gradients would be added up in 8 bits of mantissa.
    With a cast for each chunk, each gradient becomes fp32 first.
    """
    if not torch.is_autocast_enabled(device_type):
        return contextlib.nullcontext()
    return torch.autocast(device_type, dtype=torch.get_autocast_dtype(device_type), cache_enabled=False)
