"""The user's optimizer: tried on sharded weights first, then built, and undone if a GPU finds a step bad."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from hpc_trainer.config.schema.optim import CustomOptimConfig
from hpc_trainer.features.custom_optim.made import recipe_of
from hpc_trainer.features.custom_optim.put_back import PutBack, is_put_back
from hpc_trainer.features.custom_optim.trial import try_on_parts, try_without_ranks
from hpc_trainer.runtime.rank_memory import RankMemory
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.context import RunContext
from hpc_trainer.training.optim.build import LR_FACTOR, Recipe
from hpc_trainer.training.parallel.mesh import Mesh
from hpc_trainer.training.state import TrainState
from hpc_trainer.training.step import Stepper


class CustomOptimAbility(Ability):
    @property
    def _optim(self) -> CustomOptimConfig:
        assert isinstance(self.config.optim, CustomOptimConfig)
        return self.config.optim

    def begin(self, mesh: Mesh, run: RunContext | None) -> None:
        if run is None:
            try_without_ranks(self.config)
        else:
            try_on_parts(self.config, mesh)

    def optimizer(self, recipe: Recipe, model: nn.Module, building: Building) -> Recipe:
        return recipe_of(self._optim, recipe, self.config.trust)

    def stepper(self, make: Callable[..., Stepper], state: TrainState, building: Building) -> Callable[..., Stepper]:
        may_skip = self.config.train.max_skipped_steps is not None and building.device.type == "cuda"
        if not may_skip or not is_put_back(state.optimizer):
            return make
        put_back = PutBack(state.optimizer)
        return partial(make, step_unless=lambda optimizer, bad: put_back.step_unless(bad))

    def on_state(self, state: TrainState, module: nn.Module, building: Building) -> None:
        """Keep only the configured keys of a group: other keys of such a class may be state of its own."""
        chosen = {"weight_decay", LR_FACTOR, *self._optim.kwargs}
        state.settings = [{key: group[key] for key in group.keys() & chosen} for group in state.settings]

    def memory(self, held: RankMemory, building: Building) -> None:
        may_skip = self.config.train.max_skipped_steps is not None and self.config.hardware.device_type == "cuda"
        held.is_put_back = may_skip and is_put_back(held.optimizer)


ABILITY = CustomOptimAbility
