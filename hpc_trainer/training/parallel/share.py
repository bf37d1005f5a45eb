"""Sharing of a step among ranks: the loss as one module that contains the stop vote, under DDP or FSDP2."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpc_trainer.config.schema.parallel import ParallelConfig, Strategy
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.runtime.tensors import LateFlag, local_tensor
from hpc_trainer.tasks.protocol import Task
from hpc_trainer.training.data.target_shares import by_share
from hpc_trainer.training.parallel.fully_sharded import is_fully_sharded, share_among_data_ranks
from hpc_trainer.training.parallel.mesh import Mesh

_HAS_FORWARD_SYNC = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
SYNC_BUFFERS = "forward_sync_buffers" if _HAS_FORWARD_SYNC else "broadcast_buffers"
"""Name of DDP's argument: torch 2.13 renamed it, and warns about the old name in the log of every rank."""


class VotingLoss(nn.Module):
    """Model and loss as one module, with one more weight: the stop vote.

    The vote is always 0, so the loss is unchanged; its gradient is each rank's stop flag, and the averaging of
    gradients that a step does anyway adds the flags up. So the vote needs no collective of its own, and all ranks
    stop at the same step (docs/decisions/0003).

    Under FSDP the vote has one element for each rank of dp_shard: gradients are summed there in parts, one part per
    rank, and so every rank gets a sum of all flags. If it is reduced in 16 bits, the sum is inexact, or infinite with a
    loss scale. Only its sign is used: it is 0 or positive in each part.
    """

    mean_loss: Callable[[nn.Module, Any], torch.Tensor]
    """Function of (model, batch) that returns the task's mean loss; features may replace it."""

    def __init__(self, model: nn.Module, task: Task, *, device: torch.device | None = None) -> None:
        super().__init__()
        self.task = task
        self.mean_loss = task.loss
        self.model = model
        self.vote = nn.Parameter(torch.zeros((), device=device))

    def forward(
        self,
        batch: Any,
        flag: torch.Tensor | None = None,
        share: torch.Tensor | None = None,
        asked: Callable[[nn.Module, Any], torch.Tensor | None] | None = None,
    ) -> torch.Tensor | None:
        """Return the mean loss of the task, a scalar, or the result of `asked`.

        Args:
            batch: as the task takes it: inputs [batch, ...] and targets, or another form.
            flag: 0 or 1, a scalar on the device: this rank's vote to stop; None on a single rank, which needs no vote.
            share: from `target_shares`, integers, because FSDP casts floats to 16 bits. None: the unweighted mean.
            asked: called with model and batch instead of the loss: FSDP needs every forward pass to go through here.
        """
        if asked is not None:
            return asked(self.model, batch)
        loss = self.mean_loss(self.model, batch)
        if share is not None:
            loss = by_share(loss, share)
        if flag is None:
            return loss
        # FSDP may cast both to 16 bits: there a loss scale above 65504 is infinite, and NaN times a flag of 0.
        return loss + self.vote.float().sum() * flag.float()


class StopVote:
    """Stop vote of a step: casts this rank's flag, and counts all flags in the gradient of `VotingLoss.vote`."""

    def __init__(self, loss: VotingLoss, group: RankGroup, mesh: Mesh | None = None) -> None:
        self._weight = loss.vote
        self._model_group = None if mesh is None else mesh.model_group
        self._alone = group.world_size == 1
        self._flags = (torch.zeros((), device=group.device), torch.ones((), device=group.device))
        self._wish = False
        self._late = LateFlag()

    def cast(self, wish: bool) -> torch.Tensor | None:
        """Return the flag (a scalar) to pass to the loss in this step; None on a single rank.

        Collective among ranks that hold one model together: gradients are averaged between such groups, not inside.
        """
        self._wish = wish
        if self._alone:
            return None
        if self._model_group is None:
            return self._flags[wish]
        flag = self._flags[wish].clone()
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._model_group)
        return flag

    def put(self, gradient: torch.Tensor) -> None:
        """Set the sum of all flags, in the shape of the weight, if it was not computed as the weight's gradient."""
        self._weight.grad = gradient

    def count(self) -> bool:
        """Return True if any rank voted to stop; the same on all ranks.

        Call after backward and before gradients are cleared. On a GPU this is the result of the previous step: reading
        that of this step would wait for the device.
        """
        if self._alone:
            return self._wish
        gradient = self._weight.grad
        self._weight.grad = None
        assert gradient is not None
        return self._late.read(local_tensor(gradient))


def share(
    loss: VotingLoss,
    group: RankGroup,
    mesh: Mesh,
    parallel: ParallelConfig,
    *,
    deterministic: bool,
) -> nn.Module:
    """Return `loss` under DDP or FSDP2, or unchanged for a single data-parallel rank. Collective.

    All ranks get the weights of rank 0. Build optimizers after this call: FSDP replaces the weights.

    With `deterministic`, gradients are in the same buckets in every step. Otherwise DDP rearranges them after the
    first step of each attempt. With four ranks or more this changes the order of summation, so a resumed run would
    differ in the last bits. The search for unused parameters keeps the arrangement fixed.

    Never use static_graph: with it and no_sync, torch silently stops reducing after the first step (pytorch PR 187732).
    """
    if group.world_size == 1 or parallel.strategy is Strategy.none:
        return loss
    if mesh.devices is not None:
        if mesh.num_data_ranks > 1:
            # FSDP needs weights of one number format.
            dtype = next((weight.dtype for weight in loss.model.parameters() if weight.requires_grad), None)
            loss.vote = nn.Parameter(torch.zeros(mesh.shape.dp_shard, device=group.device, dtype=dtype))
        return share_among_data_ranks(loss, mesh, parallel)
    if deterministic:
        warnings.filterwarnings("ignore", message=".*find_unused_parameters=True was specified.*")
    on_gpu = group.device.type == "cuda"
    sync_buffers: dict[str, Any] = {SYNC_BUFFERS: any(True for _ in loss.buffers())}
    return DistributedDataParallel(
        loss,
        device_ids=[group.device] if on_gpu else None,
        find_unused_parameters=deterministic,
        gradient_as_bucket_view=True,
        bucket_cap_mb=parallel.bucket_cap_mb,
        **sync_buffers,
    )


def for_evaluation(module: nn.Module, model: nn.Module) -> nn.Module:
    """Return the module to pass to `ask`: the bare model, or FSDP's module, whose forward pass is collective."""
    return module if is_fully_sharded(module) else model


def ask(module: nn.Module, task: Callable[[nn.Module, Any], torch.Tensor | None], batch: Any) -> torch.Tensor | None:
    """Return the result of `task` for the model and `batch`.

    Args:
        module: result of `for_evaluation`.
        task: function of (model, batch).
        batch: as `task` takes it.
    """
    if is_fully_sharded(module) and isinstance(module, VotingLoss):
        result: torch.Tensor | None = module(batch, asked=task)
        return result
    return task(module, batch)
