"""Ranks that step alone and meet every so often: post-local SGD, and DiLoCo with its outer optimizer.

    post_local_sgd   at a meeting weights become their mean over all ranks            Lin et al. 2018, arXiv:1808.07217
    diloco           the mean of the ranks' changes since the last meeting is the     Douillard et al. 2023,
                     gradient of an outer Nesterov SGD, whose weights all ranks take  arXiv:2311.08105

Moments of the ranks' own optimizers stay apart. In between each rank has weights, buffers, moments, a loss scale and a
count of skipped steps of its own: all of it is in the checkpoint, by rank (`differs_by_rank`). Evaluations, and the end
of the run, are at meetings, where all ranks have the same weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpc_trainer.errors import DivergedError
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.runtime.tensors import LateFlag, in_pieces
from hpc_trainer.training.data.loader import Batch
from hpc_trainer.training.guard import StepGuard
from hpc_trainer.training.parallel.fully_sharded import broadcast
from hpc_trainer.training.parallel.share import StopVote
from hpc_trainer.training.state import TrainState
from hpc_trainer.training.step import Stepper

# Bytes of weights that are averaged in one message.
_MESSAGE = 25 << 20


@dataclass(slots=True, kw_only=True)
class RoundStepper(Stepper):
    """A step of DDP for the first `warmup_steps`; of each rank alone from then on, with a meeting every `every_steps`.

    The last of `num_steps` steps ends with a meeting, however long that round was.
    """

    group: RankGroup
    num_steps: int
    every_steps: int
    warmup_steps: int
    outer: OuterOptimizer | None

    def __post_init__(self) -> None:
        """Weights and buffers become rank 0's, as with DDP. Collective."""
        Stepper.__post_init__(self)
        if not isinstance(self.module, DistributedDataParallel):
            broadcast([tensor.detach() for tensor in (*self.module.parameters(), *self.module.buffers())])

    def _backward(self, state: TrainState, batches: Iterator[Batch], wish_to_stop: bool) -> torch.Tensor:
        if state.step >= self.warmup_steps and not isinstance(self.vote, LateVote):
            if isinstance(self.module, DistributedDataParallel):
                self.module = self.module.module  # gradients stay here from now on, and DDP's buckets go
            self.vote = LateVote(self.group)
            if self.target_groups is not None:
                self.target_groups = []  # each rank's loss is the mean over its own targets
            if self.outer is not None:
                self.outer.begin(state.model)
        return Stepper._backward(self, state, batches, wish_to_stop)

    def _update(self, state: TrainState, is_bad: bool | torch.Tensor) -> None:
        Stepper._update(self, state, is_bad)
        done = state.step + 1
        if done > self.warmup_steps and ((done - self.warmup_steps) % self.every_steps == 0 or done == self.num_steps):
            self._meet(state.model)

    @torch.no_grad()
    def _meet(self, model: nn.Module) -> None:
        """All ranks have the same weights and buffers afterwards. Collective."""
        buffers = [each for each in model.buffers() if each.is_floating_point()]  # counts are alike already
        average([*(each.detach() for each in _trained(model).values()), *buffers], self.group)
        if self.outer is not None:
            self.outer.step(model)


class OuterOptimizer:
    """DiLoCo's: weights of the last meeting, and the momenta of a Nesterov SGD over them; alike on all ranks.

    Twice the memory of the trained weights. `lr` > 0, `momentum` in [0, 1).
    """

    def __init__(self, *, lr: float, momentum: float) -> None:
        self._lr, self._momentum = lr, momentum
        self._weights: dict[str, torch.Tensor] = {}
        self._momenta: dict[str, torch.Tensor] = {}

    def begin(self, model: nn.Module) -> None:
        """The first round begins with these weights; what a resumed one has of a checkpoint comes to their device."""
        for name, weight in _trained(model).items():
            known = self._weights.get(name)
            self._weights[name] = weight.detach().clone() if known is None else known.to(weight.device)
            if name in self._momenta:
                self._momenta[name] = self._momenta[name].to(weight.device)

    def step(self, model: nn.Module) -> None:
        """Takes the mean of all ranks' weights from `model`, and leaves the next round's there."""
        weights = {name: weight.detach() for name, weight in _trained(model).items()}
        for name, weight in weights.items():
            # What SGD calls a gradient: from the mean back to where the round began. In the memory of the weight.
            self._weights[name].grad = weight.neg_().add_(self._weights[name])
        self._sgd().step()
        for name, weight in weights.items():
            self._weights[name].grad = None
            weight.copy_(self._weights[name])

    def _sgd(self) -> torch.optim.Optimizer:
        options: dict[str, Any] = {"momentum": self._momentum, "nesterov": self._momentum > 0, "foreach": False}
        sgd = torch.optim.SGD(list(self._weights.values()), lr=self._lr, **options)
        for name, weight in self._weights.items():
            if self._momentum > 0:
                # Zero makes the first step what it is without any: the momentum is the gradient then.
                sgd.state[weight]["momentum_buffer"] = self._momenta.setdefault(name, torch.zeros_like(weight))
        return sgd

    def state_dict(self) -> dict[str, Any]:
        """Both by the name of the weight; empty before the first round."""
        return {"weights": dict(self._weights), "momenta": dict(self._momenta)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undoes `state_dict`."""
        self._weights, self._momenta = dict(state["weights"]), dict(state["momenta"])


class LateVote(StopVote):
    """Of ranks that share no gradients: a flag goes round beside the step, and is read in the step after.

    Nobody waits for it but the first time, and where a rank is more than a step behind. On a GPU one step later still:
    the answer has to come to the host. All ranks read the same one at the same step.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._mine = False
        self._on_its_way: tuple[torch.Tensor, Any] | None = None
        self._late = LateFlag()

    def cast(self, wish: bool) -> torch.Tensor | None:
        """Nothing for the loss."""
        self._mine = wish
        return None

    def count(self) -> bool:
        """True if any rank wished to stop, in the step before; in this one, if it is the first. Collective."""
        flag = torch.full((), float(self._mine), device=self._group.device)
        sent = flag, dist.all_reduce(flag, async_op=True)
        (sum_of_flags, work), self._on_its_way = self._on_its_way or sent, sent
        work.wait()  # NCCL's: its stream waits, not the host
        return self._late.read(sum_of_flags)


class GuardOfEach(StepGuard):
    """Each rank skips its own bad steps, and counts them; if one has diverged, all say so."""

    differs_by_rank: ClassVar[bool] = True

    def __init__(self, group: RankGroup, max_in_a_row: int | None) -> None:
        super().__init__(max_in_a_row)
        self._group = group

    def check(self, step: int, scaler: torch.amp.GradScaler) -> None:
        """As StepGuard's. Collective: raises on all ranks what it raises on one."""
        mine = None
        try:
            super().check(step, scaler)
        except DivergedError as error:
            mine = str(error)
        for rank, text in enumerate(self._group.gather(mine)):
            if text is not None:
                raise DivergedError(f"rank {rank}: {text}")


def average(tensors: Iterable[torch.Tensor], group: RankGroup) -> None:
    """The mean over all ranks of tensors of any shapes, in place, in messages of some MiB; the same bits on each rank.
    Collective.

    torch's own (model_averaging.utils) copies all weights at once, and puts new ones in the parameters' place.
    """
    messages: list[tuple[list[torch.Tensor], torch.Tensor, Any]] = []
    for part in _parts(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in part])
        messages.append((part, flat, dist.all_reduce(flat, async_op=True)))
        if len(messages) > 1:
            _take(messages.pop(0), group.world_size)
    for message in messages:
        _take(message, group.world_size)


def _take(message: tuple[list[torch.Tensor], torch.Tensor, Any], world_size: int) -> None:
    part, flat, work = message
    work.wait()
    flat.div_(world_size)
    for tensor, mean in zip(part, torch.split(flat, [tensor.numel() for tensor in part]), strict=True):
        tensor.copy_(mean.view(tensor.shape))


def _parts(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Of one number format each, and no larger than a message, but for single tensors that are."""
    by_format: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_format.setdefault(tensor.dtype, []).append(tensor)
    for listed in by_format.values():
        yield from in_pieces(listed, _MESSAGE)


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
