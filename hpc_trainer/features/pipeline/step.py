"""Pipeline parallelism: each rank runs one stage of the model, and micro-batches pass through all stages.

torch.distributed.pipelining moves them. `gpipe` (Huang et al. 2019, arXiv:1811.06965) runs the forward passes of all
micro-batches of a step, then the backward passes. `1f1b` (Narayanan et al. 2019, PipeDream-flush) begins backward
passes as soon as it can. So it keeps the activations of at most as many micro-batches as there are stages. Both add
gradients up in the order of micro-batches, so a step has the bits of one rank that accumulates. Weights that two stages
share are an exception: their gradients are added per stage first.

Ranks of one stage are its data-parallel ranks, under DDP or FSDP2. With tensor parallelism each of them is a group of
neighbours that share its layers. Activations are whole on all of them, so each communicates with the rank at its own
place in the next stage. What all ranks must know of a step is summed in one small all-reduce after it: the loss, the
stop vote, an overflow in fp16, and the norm of each weight's gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from hpc_trainer.config.schema.parallel import PrecisionConfig
from hpc_trainer.errors import LoopError
from hpc_trainer.features.pipeline.cut import Between, Stage
from hpc_trainer.runtime.tensors import is_sharded, local_tensor
from hpc_trainer.tasks.pairs import PairTask
from hpc_trainer.training.data.loader import Batch
from hpc_trainer.training.data.target_shares import by_share
from hpc_trainer.training.optim.build import place_gradients, scale_down
from hpc_trainer.training.parallel.fully_sharded import is_fully_sharded, share_buffers
from hpc_trainer.training.state import TrainState
from hpc_trainer.training.step import Stepper, autocast

_LOSS, _VOTE, _OVERFLOW, _NORMS = range(4)
"""Indices in the vector that ranks add up: three numbers, then a norm for each weight of the whole model."""


@dataclass(slots=True, kw_only=True)
class Place:
    """Place of a rank: its stage, and the ranks that it communicates with."""

    stage: Stage
    num_data: int
    """Data-parallel ranks of each stage, ≥ 1."""
    tells_loss: bool
    """True on one of the last stage's tensor-parallel neighbours, all of which have the loss."""
    pipe_group: Any
    """The ranks at the same place in all stages, by stage."""
    data_group: Any
    """The data-parallel ranks of this stage with the same shards of its layers; None if that is this rank alone."""


@dataclass(slots=True, kw_only=True)
class PipelineStepper(Stepper):
    """Stepper whose micro-batches pass through the stages; `module` is this rank's stage, inside DDP or FSDP."""

    shares_loss: ClassVar[bool] = True

    place: Place
    schedule_name: str
    task: PairTask
    norm_slots: dict[int, int]
    """Weights whose norm this rank reports: id -> index among the whole model's weights."""
    num_slots: int
    tied: list[tuple[nn.Parameter, Any]]
    """Weights that another stage has too, and the group of both."""
    _schedule: Any = field(init=False, default=None)
    _may_omit_outputs: bool = field(init=False, default=False)
    _batch_shares: Sequence[Any] = field(init=False, default=())
    _losses: list[torch.Tensor] = field(init=False, default_factory=list)
    _scaler: torch.amp.GradScaler | None = field(init=False, default=None)
    _norm: torch.Tensor | None = field(init=False, default=None)
    _is_cut: bool = field(init=False, default=False)
    _slots: tuple[tuple[int, ...], torch.Tensor] = field(init=False, default_factory=lambda: ((), torch.zeros(0)))

    def __post_init__(self) -> None:
        Stepper.__post_init__(self)  # super() refers to the class before it had slots
        self._is_cut = any(is_sharded(weight) for weight in self._weights)
        self._schedule = build_schedule(
            self.module, self.place, self.schedule_name, self.grad_accum_steps, self._loss, self.device,
        )  # fmt: skip
        # The oldest torch that we support lacks this parameter.
        self._may_omit_outputs = "return_outputs" in inspect.signature(self._schedule.step).parameters

    @property
    def needs_data(self) -> bool:
        """True on the first and the last stage."""
        return self.place.stage.is_first or self.place.stage.is_last

    def for_evaluation(self, model: nn.Module) -> nn.Module:
        """Return the module that maps inputs to logits on the last stage, and to None elsewhere; `model` is a stage."""
        rows = self.place.stage.inputs.shape[0]
        return Relay(model, self.place, rows=rows, device=self.device)

    def _backward(self, state: TrainState, batches: Iterator[Batch], wish_to_stop: bool) -> torch.Tensor:
        if self.place.num_data > 1:
            share_buffers(state.model, [self.place.data_group])
        self._scaler = state.scaler
        self._losses.clear()
        self._pass_through(batches)
        if self._is_cut:
            place_gradients(self._weights)
        for weight, group in self.tied:
            _add_up(weight, group)
        wants_norm = self.max_grad_norm is not None or state.guard.is_on
        if state.scaler.is_enabled() and not self._losses:
            state.scaler.scale(
                torch.zeros((), device=self.device)
            )  # makes its scale, as the loss does on the last stage
        if wants_norm or state.scaler.is_enabled():
            state.scaler.unscale_(state.optimizer)
        return self._agree(state, wish_to_stop, wants_norm=wants_norm)

    def _pass_through(self, batches: Iterator[Batch]) -> None:
        """Run forward and backward of all micro-batches of the step, as far as they concern this stage."""
        stage = self.place.stage
        args: tuple[torch.Tensor, ...] = ()
        options: dict[str, Any] = {}
        if self._may_omit_outputs:
            options["return_outputs"] = False  # the last stage needs no logits of the whole batch
        if stage.is_last:
            self._batch_shares = self._shares(batches, self.grad_accum_steps)
        if stage.is_first or stage.is_last:
            micro = [next(batches) for _ in range(self.grad_accum_steps)]
            # torch cuts it into the same pieces again; one copy to the device instead of many.
            if stage.is_first:
                args = (torch.cat([inputs for inputs, _ in micro]).to(self.device, non_blocking=True),)
            if stage.is_last:
                options["target"] = torch.cat([targets for _, targets in micro]).to(self.device, non_blocking=True)
        try:
            self._schedule.step(*args, **options)
        except RuntimeError as error:
            cause = error.__cause__
            if isinstance(cause, Exception) and "failed to run forward" in str(error):
                raise cause from None  # the error before torch wrapped it: its type says who is to blame
            raise

    def _loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of one micro-batch: its share of the step's mean, in fp16 times the loss scale."""
        assert self._scaler is not None
        with autocast(self.precision, self.device.type):
            loss = self.task.loss_of(logits, targets)
        share = self._batch_shares[len(self._losses)]  # micro-batches come in their order
        if share is not None:
            loss = by_share(loss, share)
        if self.grad_accum_steps > 1:
            loss = loss / self.grad_accum_steps
        self._losses.append(loss.detach())
        scaled: torch.Tensor = self._scaler.scale(loss)
        return scaled

    def _agree(self, state: TrainState, wish_to_stop: bool, *, wants_norm: bool) -> torch.Tensor:
        """Share the loss, the vote, the overflow and the norm with all ranks; return the loss. Waits for no device."""
        totals = torch.zeros(_NORMS + (self.num_slots if wants_norm else 0), device=self.device)
        if self._losses and self.place.tells_loss:
            losses = self._losses[0] if len(self._losses) == 1 else torch.stack(self._losses).sum()
            totals[_LOSS] = losses / self.place.num_data
        if wish_to_stop:
            totals[_VOTE] = 1.0
        overflows = state.scaler._found_inf_per_device(state.optimizer) if state.scaler.is_enabled() else {}
        for overflow in overflows.values():
            totals[_OVERFLOW] += local_tensor(overflow)
        if wants_norm:
            self._tell_norms(totals)
        dist.all_reduce(totals)
        for overflow in overflows.values():
            overflow.copy_(totals[_OVERFLOW] > 0)  # exactly 1: fused optimizers look for that number
        self.vote.put(totals[_VOTE])
        self._norm = None
        if wants_norm:
            norms = totals[_NORMS:]
            self._norm = norms.sum().sqrt() if self._is_cut else torch.linalg.vector_norm(norms)
        return totals[_LOSS]

    def _tell_norms(self, totals: torch.Tensor) -> None:
        """Write into `totals` the gradient norms that this rank reports: of weights, or of shards the squares."""
        entries = [
            (self.norm_slots[id(weight)], weight.grad)
            for weight in self._weights
            if weight.grad is not None and id(weight) in self.norm_slots
        ]
        if not entries:
            return
        slots = tuple(_NORMS + slot for slot, _ in entries)
        if slots != self._slots[0]:  # the first step: a list would be copied to the device in each, and waited for
            self._slots = slots, torch.tensor(slots, device=self.device)
        gradients = [local_tensor(gradient) for _, gradient in entries]
        # As torch's clip_grad_norm_ takes them, for the same bits.
        norms = torch.stack([norm.float() for norm in torch._foreach_norm(gradients, 2.0)])
        totals[self._slots[1]] = norms.square() if self._is_cut else norms

    def _clip(self, state: TrainState) -> torch.Tensor | None:
        norm = self._norm
        if norm is None or self.max_grad_norm is None:
            return norm
        weights = [weight for weight in self._weights if weight.grad is not None]
        if self._is_cut:
            scale_down([local_tensor(weight.grad) for weight in weights], norm, self.max_grad_norm)
        else:
            nn.utils.clip_grads_with_norm_(weights, self.max_grad_norm, norm)
        return norm


class Relay(nn.Module):
    """Forward pass through all stages, micro-batch by micro-batch; the last stage returns the logits. Collective.

    Args:
        model: this rank's stage.
        rows: samples of a micro-batch.
    """

    def __init__(self, model: nn.Module, place: Place, *, rows: int, device: torch.device) -> None:
        super().__init__()
        self.model = model
        self._place, self._rows, self._device = place, rows, device

    def forward(self, inputs: torch.Tensor) -> torch.Tensor | None:
        """Return the logits of inputs [batch, ...]; None before the last stage.

        Later stages use only the number of inputs.
        """
        stage, group = self._place.stage, self._place.pipe_group
        parts: list[torch.Tensor] = list(torch.split(inputs, self._rows))
        outputs: list[torch.Tensor] = []
        sent: list[tuple[Any, torch.Tensor]] = []
        for index in range(self._count(len(parts))):
            is_real = index < len(parts)
            part = parts[index] if is_real else inputs[:1]
            if stage.is_first:
                value = part
            else:
                value = _empty(stage.inputs, len(part), self._device)
                dist.recv(value, group=group, group_src=stage.index - 1)
            value = self.model(value)
            if not stage.is_last:
                sent.append((dist.isend(value, group=group, group_dst=stage.index + 1), value))
            elif is_real:
                outputs.append(value)
        for work, _ in sent:
            work.wait()
        return torch.cat(outputs) if stage.is_last else None

    def _count(self, mine: int) -> int:
        """Return the number of forward passes: under FSDP they are collective, so the most of any rank of the stage."""
        if not is_fully_sharded(self.model):
            return mine
        most = torch.tensor(mine, device=self._device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._place.data_group)
        return int(most)


def run_parts(model: nn.Module, stage: Stage, precision: PrecisionConfig, *, channels_last: bool) -> None:
    """Make `model(value)` run the parts of `stage`, in place. Copies of the model run their own."""
    model.forward = partial(_run, model, stage, precision, channels_last)


def _run(
    model: nn.Module, stage: Stage, precision: PrecisionConfig, channels_last: bool, value: torch.Tensor
) -> torch.Tensor:
    if channels_last and value.ndim == 4:
        value = value.contiguous(memory_format=torch.channels_last)
    with autocast(precision, value.device.type):
        for part in stage.parts:
            value = part.of(model)(value)
    if value.dtype is not stage.outputs.dtype or value.shape[1:] != stage.outputs.shape[1:]:
        raise LoopError(
            f"stage {stage.index} gives {value.dtype} {list(value.shape[1:])} to the next stage, which expects "
            f"{stage.outputs.dtype} {list(stage.outputs.shape[1:])}: the inputs have another shape than the data set's "
            "first sample, or the shape of a part's result depends on values."
        )
    return value.contiguous()  # gloo sends nothing else


def build_schedule(
    module: nn.Module, place: Place, name: str, num_micro_batches: int, loss: Callable[..., torch.Tensor],
    device: torch.device,
) -> Any:  # fmt: skip
    """Return torch's schedule of that name. Shapes are given, so ranks need not exchange them (torch pickles them)."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe  # late: two seconds

    stage = place.stage
    ends = [_empty(form, form.shape[0], torch.device("meta")) for form in (stage.inputs, stage.outputs)]
    for index, end in enumerate(ends):
        end.requires_grad_(not (stage.is_first and index == 0))
    inputs, outputs = ends
    torchs = PipelineStage(
        module, stage.index, stage.num_stages, device, input_args=inputs, output_args=outputs, group=place.pipe_group
    )
    kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[name]
    return kind(torchs, num_micro_batches, loss_fn=loss, scale_grads=False)


def _empty(between: Between, rows: int, device: torch.device) -> torch.Tensor:
    return torch.empty((rows, *between.shape[1:]), dtype=between.dtype, device=device)


def _add_up(weight: nn.Parameter, group: Any) -> None:
    """Sum the gradient of a weight over the stages that hold it. Collective in their group."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    dist.all_reduce(local_tensor(weight.grad), group=group)
