"""Evaluation: loss and accuracy over the held-out samples, shared among the ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from hpc_trainer.config.schema.precision import PrecisionConfig
from hpc_trainer.datasets.protocol import MapDataset
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.loader import eval_indices
from hpc_trainer.training.precision import autocast


@torch.no_grad()
def evaluate(
    model: nn.Module, dataset: MapDataset, *, group: RankGroup, batch_size: int, precision: PrecisionConfig,
    beat: Callable[[], None] = lambda: None,
) -> dict[str, float]:  # fmt: skip
    """`eval_loss` (mean cross entropy, nats) and `eval_accuracy` (share of right predictions, 0 to 1).

    Collective: every rank evaluates its share, sums are added up in float64. Draws no random number: dropout is off.

    Args:
        beat: called after each batch.
    """
    modes = [(module, module.training) for module in model.modules()]  # a frozen part stays as its owner set it
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=group.device)
    indices = eval_indices(len(dataset), group.rank, group.world_size)
    for start in range(0, len(indices), batch_size):
        inputs, targets = dataset.__getitems__(indices[start : start + batch_size])
        inputs, targets = inputs.to(group.device), targets.to(group.device).flatten()
        with autocast(precision, group.device.type):
            logits = model(inputs).flatten(0, -2)
            loss = functional.cross_entropy(logits, targets, reduction="sum")
        sums += torch.stack((loss.double(), (logits.argmax(-1) == targets).sum().double(), _count(targets)))
        beat()
    for module, mode in modes:
        module.training = mode
    loss_sum, num_right, count = group.sum(sums).tolist()
    return {"eval_loss": loss_sum / count, "eval_accuracy": num_right / count}


def _count(targets: torch.Tensor) -> torch.Tensor:
    return torch.tensor(float(targets.numel()), dtype=torch.float64, device=targets.device)
