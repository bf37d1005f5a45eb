"""Layers sharded among neighbours once the model is on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpc_trainer.features.tensor_parallel.clip import agree_on_overflow, clip_grad_norm
from hpc_trainer.features.tensor_parallel.layers import find_plan, matching, share_layers
from hpc_trainer.runtime.rank_memory import Shares
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.optim.build import counts_here, place_gradients
from hpc_trainer.training.parallel.fully_sharded import share_buffers
from hpc_trainer.training.parallel.mesh import Mesh
from hpc_trainer.training.state import TrainState
from hpc_trainer.training.step import Stepper

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


def divide(model: nn.Module, plan: Mapping[str, ParallelStyle], shares: Shares, count: int) -> None:
    """Tell `shares` which weights are in `count` shards, and by hooks what runs between divided layers."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    divided = set[int]()
    for pattern, style in plan.items():
        for module in matching(model, pattern):
            if isinstance(style, ColwiseParallel):
                divided |= {id(weight) for weight in module.parameters(recurse=False)}
                module.register_forward_hook(partial(_entered, shares))
            elif isinstance(style, RowwiseParallel):
                divided |= {id(weight) for weight in module.parameters(recurse=False) if weight.ndim > 1}
                module.register_forward_hook(partial(_left, shares))
    shares.count, shares.divided = count, frozenset(divided)


def _entered(shares: Shares, module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Divide what follows, until the backward pass comes back to the input."""
    shares.is_inside = True
    if inputs and isinstance(inputs[0], torch.Tensor) and inputs[0].requires_grad:
        inputs[0].register_hook(lambda _: setattr(shares, "is_inside", False))  # type: ignore[no-untyped-call]


def _left(shares: Shares, module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Count what follows as whole, until the backward pass comes back to the output."""
    shares.is_inside = False
    if output.requires_grad:
        output.register_hook(lambda _: setattr(shares, "is_inside", True))  # type: ignore[no-untyped-call]


@dataclass(slots=True, kw_only=True)
class MeshStepper(Stepper):
    """Stepper whose weights are sharded among the ranks of `mesh`."""

    mesh: Mesh
    _counted: list[bool] = field(init=False)

    def __post_init__(self) -> None:
        Stepper.__post_init__(self)
        self._counted = [counts_here(weight, self.mesh) for weight in self._weights]

    def _clip(self, state: TrainState) -> torch.Tensor | None:
        place_gradients(self._weights)
        if state.scaler.is_enabled():
            state.scaler.unscale_(state.optimizer)
            agree_on_overflow(state.scaler, state.optimizer)
        if self.max_grad_norm is None and not state.guard.is_on:
            return None
        return clip_grad_norm(self._weights, self._counted, self.max_grad_norm)

    def _share_buffers(self) -> None:
        share_buffers(self.module, self.mesh.data_groups())


class TensorParallelAbility(Ability):
    _plan: Mapping[str, ParallelStyle]

    def see_whole(self, model: nn.Module, building: Building) -> None:
        self._plan = find_plan(model, building.mesh)

    def on_device(self, model: nn.Module, building: Building) -> None:
        if building.run is None:
            divide(model, self._plan, building.shares, building.mesh.shape.tp)
        else:
            share_layers(model, building.mesh, self._plan)

    def stepper(self, make: Callable[..., Stepper], state: TrainState, building: Building) -> Callable[..., Stepper]:
        """Return the stepper of a mesh; a pipeline's own stepper handles shards itself."""
        return partial(MeshStepper, mesh=building.mesh) if make is Stepper else make


ABILITY = TensorParallelAbility
