"""Logical ranks: a step whose bits do not depend on the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.runtime.rank_memory import RankMemory
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.data.loader import Batch, shares_of
from hpc_trainer.training.data.target_shares import groups_to_count
from hpc_trainer.training.parallel.fully_sharded import broadcast
from hpc_trainer.training.parallel.share import VotingLoss
from hpc_trainer.training.rng import seed_step
from hpc_trainer.training.state import TrainState
from hpc_trainer.training.step import Stepper


@dataclass(slots=True, kw_only=True)
class LogicalStepper(Stepper):
    """Stepper over `num_logical` parts; `group.world_size` divides that number, and both are powers of two."""

    shares_loss: ClassVar[bool] = True

    group: RankGroup
    num_logical: int
    seed: int

    def __post_init__(self) -> None:
        """Broadcast rank 0's weights and buffers, as DDP does. Collective."""
        Stepper.__post_init__(self)
        _from_rank_zero([*self.module.parameters(), *self.module.buffers()], self.group)

    @property
    def num_shares(self) -> int:
        """Number of parts, whichever ranks compute them."""
        return self.num_logical

    def _backward(self, state: TrainState, batches: Iterator[Batch], wish_to_stop: bool) -> torch.Tensor:
        weights = [weight for weight in state.model.parameters() if weight.requires_grad]
        flag = self.vote.cast(wish_to_stop)
        before = _copies(state.model)
        after = before
        tree, no_vote = PairSum(), torch.zeros((), device=self.device)
        parts, accum = shares_of(self.group.rank, self.group.world_size, self.num_logical), self.grad_accum_steps
        shares = iter(self._shares(batches, len(parts) * accum))
        for part in parts:
            _put(state.model, before)
            seed_step(self.seed, part, state.step)
            losses = [self._micro_batch(state, batches, None, next(shares)) for _ in range(accum)]
            if part == 0:
                after = _copies(state.model)
            # A weight that no sample used has the gradient 0, so it does not matter which ranks used the weight.
            leaves = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]
            tree.add(_flat([*leaves, torch.stack(losses).sum().float(), no_vote]))
            for weight in weights:
                weight.grad = None
        _put(state.model, after)
        _from_rank_zero(state.model.buffers(), self.group)
        total = tree.total()
        if flag is not None:
            _unflat(total, [*weights, no_vote, no_vote])[-1].copy_(flag)
        total = between_ranks(total, self.group)
        for whole in total:
            whole.mul_(1 / self.num_logical)  # exact: a power of two
        *gradients, loss, vote = _unflat(total, [*weights, no_vote, no_vote])
        for weight, gradient in zip(weights, gradients, strict=True):
            # In the weight's order of memory (channels_last): fused kernels go through both side by side.
            weight.grad = gradient if weight.is_contiguous() else torch.empty_like(weight).copy_(gradient)
        if flag is not None:
            self.vote.put(vote)
        return loss


class PairSum:
    """Sum of 2^n tuples of tensors along a binary tree, added as they come; it holds at most n + 1 of them."""

    def __init__(self) -> None:
        self._stack: list[tuple[int, list[torch.Tensor]]] = []

    def add(self, tensors: list[torch.Tensor]) -> None:
        """Add the next leaf: tensors of the shapes of the first leaf's. They may be overwritten."""
        size = 1
        while self._stack and self._stack[-1][0] == size:
            _, left = self._stack.pop()
            for ours, theirs in zip(left, tensors, strict=True):
                ours.add_(theirs)
            tensors, size = left, 2 * size
        self._stack.append((size, tensors))

    def total(self) -> list[torch.Tensor]:
        """Return the sum of all leaves. Raises ValueError if their number is not a power of two."""
        if len(self._stack) != 1:
            raise ValueError(f"{sum(size for size, _ in self._stack)} leaves make no binary tree.")
        return self._stack.pop()[1]


def between_ranks(tensors: Sequence[torch.Tensor], group: RankGroup) -> list[torch.Tensor]:
    """Return the sums over all ranks, with the same bits on each. Collective.

    Recursive doubling adds neighbours first.
    """
    sums = list(tensors)
    distance = 1
    while distance < group.world_size:
        partner = group.rank ^ distance
        for index, mine in enumerate(sums):
            theirs = torch.empty_like(mine)
            # batch_isend_irecv: NCCL needs both directions in one group, or it waits for ever.
            operations = [dist.P2POp(dist.isend, mine, partner), dist.P2POp(dist.irecv, theirs, partner)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            # In the order of ranks on both sides: which of two NaNs comes out depends on it.
            sums[index] = mine + theirs if group.rank < partner else theirs + mine
        distance *= 2
    return sums


def _flat(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return one vector for each number format, in the order in which the formats first come."""
    formats = dict.fromkeys(tensor.dtype for tensor in tensors)
    return [
        torch.cat([tensor.detach().reshape(-1) for tensor in tensors if tensor.dtype == dtype]) for dtype in formats
    ]


def _unflat(flat: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors of `_flat(like)`, as views of `flat`."""
    formats = list(dict.fromkeys(tensor.dtype for tensor in like))
    sizes = [[tensor.numel() for tensor in like if tensor.dtype == dtype] for dtype in formats]
    parts = {dtype: iter(torch.split(whole, size)) for dtype, whole, size in zip(formats, flat, sizes, strict=True)}
    return [next(parts[tensor.dtype]).view(tensor.shape) for tensor in like]


def _from_rank_zero(tensors: Iterable[torch.Tensor], group: RankGroup) -> None:
    """Copy rank 0's values to all ranks, in place. Collective."""
    if group.world_size > 1:
        broadcast([tensor.detach() for tensor in tensors])


def _copies(model: nn.Module) -> list[torch.Tensor]:
    return [buffer.clone() for buffer in model.buffers()]


def _put(model: nn.Module, values: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), values, strict=True):
            buffer.copy_(value)


class LogicalRanksAbility(Ability):
    def share(self, loss: VotingLoss, building: Building) -> nn.Module | None:
        """Return the bare loss: gradients are added up along the tree, and not by DDP."""
        return loss

    def stepper(self, make: Callable[..., Stepper], state: TrainState, building: Building) -> Callable[..., Stepper]:
        count, mesh, run = self.config.train.logical_ranks, building.mesh, building.run
        assert count is not None
        assert mesh is not None
        assert run is not None

        def make_logical(*, grad_accum_steps: int, **fields: Any) -> Stepper:
            groups = groups_to_count(building.task, building.dataset, mesh, num_micro_batches=grad_accum_steps * count)
            fields |= {"grad_accum_steps": grad_accum_steps, "target_groups": groups}
            return LogicalStepper(**fields, group=run.group, num_logical=count, seed=self.config.seed)

        return make_logical

    def memory(self, held: RankMemory, building: Building) -> None:
        """Add the memory of the partial sums of gradients: the sums form a tree, with one sum for each level."""
        count = self.config.train.logical_ranks
        assert count is not None
        held.gradients *= 3 + int(math.log2(max(1, count // building.mesh.shape.world_size)))
        held.num_evaluated_parts = count


ABILITY = LogicalRanksAbility
