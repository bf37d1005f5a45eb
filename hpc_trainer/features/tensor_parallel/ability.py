"""Layers sharded among neighbours once the model is on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from hpc_trainer.features.tensor_parallel.layers import find_plan, share_layers
from hpc_trainer.features.tensor_parallel.memory import divide
from hpc_trainer.features.tensor_parallel.step import MeshStepper
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.state import TrainState
from hpc_trainer.training.step import Stepper

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


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
