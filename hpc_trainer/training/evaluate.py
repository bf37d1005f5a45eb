"""Evaluation: loss and accuracy over the held-out samples, shared among the ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from hpc_trainer.config.schema.precision import PrecisionConfig
from hpc_trainer.datasets.protocol import MapDataset
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.fully_sharded import is_fully_sharded
from hpc_trainer.training.loader import eval_indices
from hpc_trainer.training.precision import autocast


@torch.no_grad()
def evaluate(
    model: nn.Module, dataset: MapDataset, *, group: RankGroup, batch_size: int, precision: PrecisionConfig,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:  # fmt: skip
    """`eval_loss` (mean cross entropy, nats) and `eval_accuracy` (share of right predictions, 0 to 1); None if stopped.

    Collective: every rank evaluates its share, sums are added up in float64. Draws no random number: dropout is off.

    Args:
        should_stop: asked after each batch, equally often on all ranks; True on all of them ends the evaluation.
    """
    modes = [(module, module.training) for module in model.modules()]  # a frozen part stays as its owner set it
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=group.device)
    indices = eval_indices(len(dataset), group.rank, group.world_size)
    is_stopped = False
    for start in range(0, len(eval_indices(len(dataset), 0, group.world_size)), batch_size):  # rank 0 has the most
        part = indices[start : start + batch_size]
        if part or is_fully_sharded(model):  # whose forward pass needs all ranks: those without samples repeat one
            inputs, targets = dataset.__getitems__(part or range(1))
            inputs, targets = inputs.to(group.device), targets.to(group.device).flatten()
            with autocast(precision, group.device.type):
                logits = model(inputs).flatten(0, -2)
                loss = functional.cross_entropy(logits, targets, reduction="sum")
            if part:
                sums += torch.stack((loss.double(), (logits.argmax(-1) == targets).sum().double(), _count(targets)))
        is_stopped = should_stop()
        if is_stopped:
            break
    for module, mode in modes:
        module.training = mode
    if is_stopped:
        return None
    loss_sum, num_right, count = group.sum(sums).tolist()
    return {"eval_loss": loss_sum / count, "eval_accuracy": num_right / count}


def _count(targets: torch.Tensor) -> torch.Tensor:
    return torch.tensor(float(targets.numel()), dtype=torch.float64, device=targets.device)
