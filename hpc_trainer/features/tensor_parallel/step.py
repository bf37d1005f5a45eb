"""Step of a run on a device mesh: as on one rank, except for norm and overflow, which no rank knows alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hpc_trainer.features.tensor_parallel.clip import agree_on_overflow, clip_grad_norm
from hpc_trainer.training.optim.clip import counts_here, place_gradients
from hpc_trainer.training.parallel.fully_sharded import share_buffers
from hpc_trainer.training.parallel.mesh import Mesh
from hpc_trainer.training.state import TrainState
from hpc_trainer.training.step import Stepper


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
