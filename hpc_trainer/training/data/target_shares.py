"""What a micro-batch weighs in a step's loss: its share of the targets of the whole global batch, whoever has the rest.

A step's loss is the mean over all targets that count, those of all micro-batches of all data-parallel ranks. Where
samples have unlike numbers of them (padding is -100) a mean of micro-batches' means is another number, which hangs on
how the batch is cut. Targets are counted on the host, before the step; between ranks goes one number a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hpc_trainer.datasets.protocol import MapDataset
from hpc_trainer.tasks.protocol import Task
from hpc_trainer.training.data.loader import BatchIterator
from hpc_trainer.training.parallel.mesh import Mesh

Groups = Sequence[Any]
"""Of `Mesh.data_groups`: what is added up in one after the other is added up over all data-parallel ranks."""


def groups_to_count(task: Task, dataset: MapDataset, mesh: Mesh, *, num_micro_batches: int) -> Groups | None:
    """The ranks that count their targets together; None where nobody need count: all samples have as many targets, or a
    step is one micro-batch of one rank.

    Args:
        num_micro_batches: of this rank in a step.
    """
    if not task.counts_targets or getattr(dataset, "all_targets_count", False):
        return None
    groups = mesh.data_groups()
    return groups if groups or num_micro_batches > 1 else None


def target_shares(
    batches: BatchIterator, count: int, device: torch.device, groups: Groups | None, num_targets: Callable[[Any], int]
) -> Sequence[Any]:
    """For each of the next `count` micro-batches what `VotingLoss` is told of its targets; None if they all count.

    Whole numbers on `device`, [2]: the targets that count in this micro-batch, times all micro-batches; those that
    count in all micro-batches. Waits for no device. Collective, unless `groups` is None.
    """
    if groups is None:
        return [None] * count
    mine = torch.tensor(batches.targets_ahead(count, num_targets))
    if device.type == "cuda":
        mine = mine.pin_memory()  # from pageable memory the host would wait for the device
    mine = mine.to(device, non_blocking=True)
    total, num_ranks = mine.sum(), 1
    for group in groups:
        dist.all_reduce(total, group=group)
        num_ranks *= dist.get_world_size(group)
    return torch.stack((mine * (count * num_ranks), total.expand(count)), dim=1).unbind()


def by_share(loss: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """A micro-batch's mean loss, weighed so that the mean over micro-batches is that over all targets.

    The same bits where each has as many. 0 of a micro-batch without targets, NaN if no other has any.
    """
    here, everywhere = share.unbind()
    return torch.where(here > 0, loss, 0.0) * (here / everywhere)
