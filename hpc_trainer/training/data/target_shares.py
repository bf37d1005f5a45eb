"""Weight of a micro-batch in a step's loss: its share of the targets of the whole global batch, on all ranks.

A step's loss is the mean over all targets that count, those of all micro-batches of all data-parallel ranks. If samples
have different numbers of targets (padding is -100), the mean of the micro-batches' means is another number, which
depends on how the batch is cut. Targets are counted on the host, before the step; ranks exchange one number per step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hpc_trainer.tasks.protocol import Task
from hpc_trainer.training.data.loader import BatchIterator
from hpc_trainer.training.data.protocol import MapDataset
from hpc_trainer.training.parallel.mesh import Mesh

Groups = Sequence[Any]
"""Groups of `Mesh.data_groups`: a sum in one after the other is a sum over all data-parallel ranks."""


def groups_to_count(task: Task, dataset: MapDataset, mesh: Mesh, *, num_micro_batches: int) -> Groups | None:
    """Return the groups of ranks that count their targets together; None if no count is needed.

    No count is needed if all samples have equally many targets, or if a step is one micro-batch of one rank.

    Args:
        num_micro_batches: micro-batches of this rank in a step.
    """
    if not task.counts_targets or getattr(dataset, "all_targets_count", False):
        return None
    groups = mesh.data_groups()
    return groups if groups or num_micro_batches > 1 else None


def target_shares(
    batches: BatchIterator, count: int, device: torch.device, groups: Groups | None, num_targets: Callable[[Any], int]
) -> Sequence[Any]:
    """Return the `share` for `VotingLoss` of each of the next `count` micro-batches; None for each without `groups`.

    A share is int64 [2] on `device`: the targets that count in this micro-batch times the number of all micro-batches;
    the targets that count in all micro-batches. Waits for no device. Collective, unless `groups` is None.
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
    """Weight a micro-batch's mean loss so that the mean over micro-batches is the mean over all targets.

    The loss keeps its bits if all micro-batches have equally many targets. It is 0 for a micro-batch without targets,
    or NaN if no other micro-batch has any.
    """
    here, everywhere = share.unbind()
    return torch.where(here > 0, loss, 0.0) * (here / everywhere)
