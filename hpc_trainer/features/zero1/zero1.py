"""ZeRO-1: each rank holds and updates a shard of the moments, and hands its weights to the others after each step."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from hpc_trainer.runtime.rank_memory import RankMemory
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.optim.build import Recipe


class Zero1Ability(Ability):
    def around_optimizer(self, recipe: Recipe, model: nn.Module, building: Building) -> Recipe:
        """Share the optimizer's state among ranks. Collective when it is made, and in each step.

        An estimate divides the state of one rank alone.
        """
        if building.run is None:
            return recipe
        from torch.distributed.optim import ZeroRedundancyOptimizer  # late: it takes half a second

        kind: Any = recipe.make
        return Recipe(recipe.groups, partial(ZeroRedundancyOptimizer, optimizer_class=kind))

    def memory(self, held: RankMemory, building: Building) -> None:
        held.moment_parts, held.is_put_back = building.mesh.shape.world_size, False


ABILITY = Zero1Ability
