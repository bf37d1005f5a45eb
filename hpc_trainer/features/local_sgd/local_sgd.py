"""Ranks that step alone and synchronise at intervals (post-local SGD, DiLoCo), and the state of each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpc_trainer.config.mesh import averages_gradients
from hpc_trainer.errors import DivergedError
from hpc_trainer.features.local_sgd import Sync
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.runtime.rank_memory import RankMemory
from hpc_trainer.runtime.tensors import LateFlag, in_pieces
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.checkpoint.objects import differ_by_rank
from hpc_trainer.training.data.loader import Batch
from hpc_trainer.training.parallel.fully_sharded import broadcast
from hpc_trainer.training.parallel.share import StopVote, VotingLoss
from hpc_trainer.training.state import StepGuard, TrainState
from hpc_trainer.training.step import Stepper

# Bytes of weights that are averaged in one message.
_MESSAGE = 25 << 20


@dataclass(slots=True, kw_only=True)
class RoundStepper(Stepper):
    """Stepper of DDP for the first `warmup_steps`, then of each rank alone, with a synchronisation every `every_steps`.

    The last of `num_steps` steps ends with a synchronisation, however long that round was.
    """

    group: RankGroup
    num_steps: int
    every_steps: int
    warmup_steps: int
    outer: OuterOptimizer | None

    def __post_init__(self) -> None:
        """Broadcast rank 0's weights and buffers, unless DDP does. Collective."""
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
        """Give all ranks the same weights and buffers. Collective."""
        buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]  # counts are alike already
        average([*(weight.detach() for weight in _trained(model).values()), *buffers], self.group)
        if self.outer is not None:
            self.outer.step(model)


class OuterOptimizer:
    """DiLoCo's outer optimizer: weights of the last synchronisation, and momenta of a Nesterov SGD; alike on all ranks.

    It takes twice the memory of the trained weights. `lr` > 0, `momentum` in [0, 1).
    """

    def __init__(self, *, lr: float, momentum: float) -> None:
        self._lr, self._momentum = lr, momentum
        self._weights: dict[str, torch.Tensor] = {}
        self._momenta: dict[str, torch.Tensor] = {}

    def begin(self, model: nn.Module) -> None:
        """Begin the first round with copies of the weights, or with the restored tensors, moved to the device."""
        for name, weight in _trained(model).items():
            restored = self._weights.get(name)
            self._weights[name] = weight.detach().clone() if restored is None else restored.to(weight.device)
            if name in self._momenta:
                self._momenta[name] = self._momenta[name].to(weight.device)

    def step(self, model: nn.Module) -> None:
        """Read the mean of all ranks' weights from `model`, and replace it by the next round's weights."""
        weights = {name: weight.detach() for name, weight in _trained(model).items()}
        for name, weight in weights.items():
            # SGD's gradient points from the mean back to where the round began. It is in the memory of the weight.
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
                # With momenta of zero the first step is that without any: the momentum is the gradient then.
                sgd.state[weight]["momentum_buffer"] = self._momenta.setdefault(name, torch.zeros_like(weight))
        return sgd

    def state_dict(self) -> dict[str, Any]:
        """Return weights and momenta, both by the name of the weight; empty before the first round."""
        return {"weights": dict(self._weights), "momenta": dict(self._momenta)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self._weights, self._momenta = dict(state["weights"]), dict(state["momenta"])


class LateVote(StopVote):
    """Stop vote of ranks that share no gradients: a flag is summed beside the step, and read in the step after.

    A rank waits for the flag only the first time, or if a rank is more than a step behind. On a GPU the flag is read
    one step later still, as it has to come to the host. All ranks read the same flag at the same step.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._mine = False
        self._on_its_way: tuple[torch.Tensor, Any] | None = None
        self._late = LateFlag()

    def cast(self, wish: bool) -> torch.Tensor | None:
        """Store the vote for `count`; return None, as the loss carries no vote."""
        self._mine = wish
        return None

    def count(self) -> bool:
        """Return True if any rank voted to stop in the previous step, or in this first step. Collective."""
        flag = torch.full((), float(self._mine), device=self._group.device)
        sent = flag, dist.all_reduce(flag, async_op=True)
        (sum_of_flags, work), self._on_its_way = self._on_its_way or sent, sent
        work.wait()  # NCCL's: its stream waits, not the host
        return self._late.read(sum_of_flags)


class GuardOfEach(StepGuard):
    """Guard of ranks that skip and count their own bad steps; if one has diverged, all raise."""

    differs_by_rank: ClassVar[bool] = True

    def __init__(self, group: RankGroup, max_in_a_row: int | None) -> None:
        super().__init__(max_in_a_row)
        self._group = group

    def check(self, step: int, scaler: torch.amp.GradScaler) -> None:
        """Check as StepGuard does. Collective: raises on all ranks what it raises on one."""
        mine = None
        try:
            super().check(step, scaler)
        except DivergedError as error:
            mine = str(error)
        for rank, text in enumerate(self._group.gather(mine)):
            if text is not None:
                raise DivergedError(f"rank {rank}: {text}")


def average(tensors: Iterable[torch.Tensor], group: RankGroup) -> None:
    """Average tensors of any shapes over all ranks, in place, in messages of some MiB. Collective.

    All ranks get the same bits. torch's own function (model_averaging.utils) copies all weights at once, and replaces
    the parameters by new ones.
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
    """Yield lists of tensors of one number format, no larger than a message unless a single tensor is."""
    by_format: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_format.setdefault(tensor.dtype, []).append(tensor)
    for listed in by_format.values():
        yield from in_pieces(listed, _MESSAGE)


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


class LocalSgdAbility(Ability):
    def share(self, loss: VotingLoss, building: Building) -> nn.Module | None:
        return None if averages_gradients(self.config) else loss

    def stepper(self, make: Callable[..., Stepper], state: TrainState, building: Building) -> Callable[..., Stepper]:
        parallel = self.config.parallel
        assert building.run is not None
        group = building.run.group
        outer = None
        if parallel.sync is Sync.diloco:
            outer = state.more["outer"] = OuterOptimizer(lr=parallel.outer_lr, momentum=parallel.outer_momentum)
        state.guard = GuardOfEach(group, state.guard.max_in_a_row)
        differ_by_rank(state.model, state.optimizer, state.scaler)
        return partial(
            RoundStepper, group=group, num_steps=self.config.train.num_steps, every_steps=parallel.sync_every_steps,
            warmup_steps=parallel.sync_warmup_steps, outer=outer,
        )  # fmt: skip

    def memory(self, held: RankMemory, building: Building) -> None:
        """Add the weights and moments of each rank to the size of a checkpoint, which has rank 0's weights already."""
        parallel, world_size = self.config.parallel, building.mesh.shape.world_size
        held.checkpoint += held.all_moments * (world_size - 1) + held.saved * world_size
        if parallel.sync is Sync.diloco:
            outer = held.trained * (2 if parallel.outer_momentum > 0 else 1)
            held.communication += outer
            held.checkpoint += outer


ABILITY = LocalSgdAbility
