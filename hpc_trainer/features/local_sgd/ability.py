"""Step of ranks that step alone, and the state that is each rank's own then."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from hpc_trainer.config.held_gradients import averages_gradients
from hpc_trainer.config.schema.parallel import Sync
from hpc_trainer.features.local_sgd.rounds import GuardOfEach, OuterOptimizer, RoundStepper
from hpc_trainer.runtime.rank_memory import RankMemory
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.checkpoint.objects import differ_by_rank
from hpc_trainer.training.parallel.share import VotingLoss
from hpc_trainer.training.state import TrainState
from hpc_trainer.training.step import Stepper


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
        """Count in a checkpoint the weights and moments of each rank, besides rank 0's weights for all."""
        parallel, world_size = self.config.parallel, building.mesh.shape.world_size
        held.checkpoint += held.all_moments * (world_size - 1) + held.saved * world_size
        if parallel.sync is Sync.diloco:
            outer = held.trained * (2 if parallel.outer_momentum > 0 else 1)
            held.communication += outer
            held.checkpoint += outer


ABILITY = LocalSgdAbility
