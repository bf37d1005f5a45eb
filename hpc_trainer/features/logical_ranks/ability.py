"""The step whose bits do not depend on the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import nn

from hpc_trainer.features.logical_ranks.stepper import LogicalStepper
from hpc_trainer.runtime.rank_memory import RankMemory
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.data.target_shares import groups_to_count
from hpc_trainer.training.parallel.share import VotingLoss
from hpc_trainer.training.state import TrainState
from hpc_trainer.training.step import Stepper


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
        """Count the gradients that are added along a tree: a sum for each level."""
        count = self.config.train.logical_ranks
        assert count is not None
        held.gradients *= 3 + int(math.log2(max(1, count // building.mesh.shape.world_size)))
        held.num_evaluated_parts = count


ABILITY = LogicalRanksAbility
