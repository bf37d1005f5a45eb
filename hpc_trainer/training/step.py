"""One optimizer step in its number formats: micro-batches forward and backward, then unscale, clip, update."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpc_trainer.config.schema.parallel import Dtype, PrecisionConfig
from hpc_trainer.runtime.devices import kind_of
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.runtime.tensors import is_sharded
from hpc_trainer.tasks.cross_entropy import CrossEntropy
from hpc_trainer.training.data.batches import map_tensors
from hpc_trainer.training.data.loader import Batch
from hpc_trainer.training.data.target_shares import Groups, target_shares
from hpc_trainer.training.optim import build as skip
from hpc_trainer.training.optim.build import are_alike, clip_alike, drop_gradients, set_learning_rate
from hpc_trainer.training.parallel.fully_sharded import is_fully_sharded, share_buffers
from hpc_trainer.training.parallel.share import StopVote, for_evaluation
from hpc_trainer.training.state import TrainState

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def set_precision(precision: PrecisionConfig) -> None:
    """Set TF32 on or off for the whole process; without this, convolutions on GPUs use TF32 for fp32."""
    is_tf32 = precision.compute_dtype is Dtype.tf32
    torch.backends.cuda.matmul.allow_tf32 = is_tf32
    torch.backends.cudnn.allow_tf32 = is_tf32


def autocast(precision: PrecisionConfig, device_type: str) -> contextlib.AbstractContextManager[None]:
    """Return the context of a forward pass on `device_type` (cpu or cuda); it does nothing for fp32 and tf32."""
    wanted = precision.format.autocast
    return contextlib.nullcontext() if wanted is None else torch.autocast(device_type, dtype=_AUTOCAST[wanted])


def build_scaler(precision: PrecisionConfig, device_type: str) -> torch.amp.GradScaler:
    """Build the loss scaler; it is enabled for fp16 only, because fp16 gradients below 6e-8 are zero.

    bf16 has the exponents of fp32 and needs no scaler. Works on the CPU and on CUDA.
    """
    return torch.amp.GradScaler(
        device_type,
        init_scale=precision.init_scale,
        growth_interval=precision.growth_interval,
        enabled=precision.compute_dtype is Dtype.fp16,
    )


@dataclass(slots=True, kw_only=True)
class StepResult:
    """Result of one step. Tensors stay on the device: reading them would wait for it.

    `loss`: mean over this rank's samples (all ranks', if `is_shared`), nats, a scalar. `grad_norm`: L2 norm over all
    weights before clipping, a scalar; None if nothing needs it. `should_stop`: all ranks agree.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor | None
    should_stop: bool
    is_shared: bool = False

    def mean_loss(self, group: RankGroup) -> float:
        """Return the mean loss over all ranks; waits for the device. Collective."""
        if self.is_shared:
            return self.loss.item()
        return group.sum(self.loss.clone()).item() / group.world_size


@dataclass(slots=True, kw_only=True)
class Stepper:
    """Everything that one step needs besides the state and the data."""

    module: nn.Module
    vote: StopVote
    precision: PrecisionConfig
    device: torch.device
    grad_accum_steps: int
    max_grad_norm: float | None
    prepare: Sequence[Callable[[torch.Tensor], torch.Tensor]] = ()
    """Functions that change the inputs, if batches are (inputs, targets)."""
    before_clip: Sequence[Callable[[], None]] = ()
    after_update: Sequence[Callable[[], None]] = ()
    target_groups: Groups | None = None
    """Groups of ranks that count the targets of a step together (`target_shares`); None if no count is needed."""
    num_targets: Callable[[Batch], int] = CrossEntropy().num_targets
    """Number of targets of a batch that count; runs on the host."""
    step_unless: Callable[[torch.optim.Optimizer, torch.Tensor], None] = skip.step_unless
    """Step of the optimizer that changes nothing if the tensor, a bool scalar on the device, is true."""
    shares_loss: ClassVar[bool] = False
    # Determined once: a walk through a model's modules takes longer than clipping a small one, 12 µs of a step, and
    # autocast checks the abilities of the device, 25 µs.
    _weights: list[nn.Parameter] = field(init=False)
    _are_alike: bool = field(init=False)
    _is_fully_sharded: bool = field(init=False)
    _autocast: contextlib.AbstractContextManager[None] = field(init=False)

    def __post_init__(self) -> None:
        self._weights = list(self.module.parameters())
        self._are_alike = are_alike(self._weights)
        self._is_fully_sharded = is_fully_sharded(self.module)
        self._autocast = autocast(self.precision, self.device.type)

    @property
    def needs_data(self) -> bool:
        """False on a rank that needs no samples: a stage in the middle of a pipeline."""
        return True

    @property
    def num_shares(self) -> int | None:
        """Shares of each batch if they do not depend on the ranks, so that any number of ranks gives the same bits."""
        return None

    def for_evaluation(self, model: nn.Module) -> nn.Module:
        """Return the module for evaluations: `model`, the trained one, or its replacement (`training/evaluate.py`)."""
        return for_evaluation(self.module, model)

    def step(self, state: TrainState, batches: Iterator[Batch], *, lr: float, wish_to_stop: bool) -> StepResult:
        """Take `grad_accum_steps` micro-batches and update the weights once. Collective."""
        set_learning_rate(state.optimizer, lr)
        total = self._backward(state, batches, wish_to_stop)
        should_stop = self.vote.count()
        for before_clip in self.before_clip:
            before_clip()
        grad_norm = self._clip(state)
        is_bad = False if grad_norm is None else state.guard.see(grad_norm, state.step)
        self._update(state, is_bad)
        for after_update in self.after_update:
            after_update()
        drop_gradients(state.optimizer)
        kind_of(self.device).launch()
        return StepResult(loss=total, grad_norm=grad_norm, should_stop=should_stop, is_shared=self.shares_loss)

    def _backward(self, state: TrainState, batches: Iterator[Batch], wish_to_stop: bool) -> torch.Tensor:
        """Compute each weight's gradient, the mean over all ranks; return the detached loss. Collective."""
        if self._is_fully_sharded:
            self._share_buffers()
        flag = self.vote.cast(wish_to_stop)
        losses = []
        for index, share in enumerate(self._shares(batches, self.grad_accum_steps)):
            with self._sync_gradients(last=index + 1 == self.grad_accum_steps):
                losses.append(self._micro_batch(state, batches, flag, share))
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _clip(self, state: TrainState) -> torch.Tensor | None:
        """Clip the gradients and return their norm before that; None if nothing needs the norm."""
        if self.max_grad_norm is None and not state.guard.is_on:
            return None
        state.scaler.unscale_(state.optimizer)
        # The vote is among the weights, but its gradient was dropped already.
        if self._are_alike:
            return clip_alike(self._weights, self.max_grad_norm)
        if self.max_grad_norm is None:
            norm = nn.utils.get_total_norm([weight.grad for weight in self._weights if weight.grad is not None])
        else:
            norm = nn.utils.clip_grad_norm_(self._weights, self.max_grad_norm)
        # With FSDP the norm is a DTensor, the same on all ranks.
        return norm.full_tensor() if is_sharded(norm) else norm  # type: ignore[attr-defined]

    def _update(self, state: TrainState, is_bad: bool | torch.Tensor) -> None:
        """Step the optimizer, unless the gradient is bad."""
        if state.scaler.is_enabled():
            if state.guard.skips_finite:  # the guard saw the unscaled gradients: overflows are bad to it too
                self._step(state.optimizer, is_bad)
            else:
                state.scaler.step(state.optimizer)  # skipped by the scaler if a gradient overflowed in fp16
            state.scaler.update()
        else:
            self._step(state.optimizer, is_bad)

    def _step(self, optimizer: torch.optim.Optimizer, is_bad: bool | torch.Tensor) -> None:
        if isinstance(is_bad, torch.Tensor):
            self.step_unless(optimizer, is_bad)
        elif not is_bad:
            optimizer.step()

    def _shares(self, batches: Iterator[Batch], count: int) -> Sequence[Any]:
        return target_shares(batches, count, self.device, self.target_groups, self.num_targets)  # type: ignore[arg-type]

    def _micro_batch(
        self, state: TrainState, batches: Iterator[Batch], flag: torch.Tensor | None, share: torch.Tensor | None
    ) -> torch.Tensor:
        """Run forward and backward of the next micro-batch; return its share of the mean loss, detached."""
        # On a GPU the batch is there already (`device_batches`). For other devices, a copy without waiting could read
        # memory that the loader has reused by then.
        batch = map_tensors(next(batches), self._bring)
        for prepare in self.prepare:
            batch = prepare(batch[0]), batch[1]
        with self._autocast:
            loss = self.module(batch, flag, share)
        if self.grad_accum_steps > 1:
            loss = loss / self.grad_accum_steps
        state.scaler.scale(loss).backward()
        part: torch.Tensor = loss.detach()
        return part

    def _bring(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device)

    def _share_buffers(self) -> None:
        share_buffers(self.module)

    def _sync_gradients(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        if self._is_fully_sharded:
            self.module.set_requires_gradient_sync(last)  # type: ignore[operator]
            return contextlib.nullcontext()
        # no_sync covers the forward too: DDP decides there what the backward will reduce. One all-reduce a step.
        if last or not isinstance(self.module, DistributedDataParallel):
            return contextlib.nullcontext()
        return self.module.no_sync()
