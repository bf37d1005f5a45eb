"""DDP's hook, and its state in the checkpoint."""

from __future__ import annotations

from torch import nn

from hpc_trainer.config.schema.parallel import CommHook
from hpc_trainer.features.gradient_compression.hooks import add_comm_hook
from hpc_trainer.runtime.rank_memory import RankMemory
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.state import TrainState


class GradientCompressionAbility(Ability):
    def on_state(self, state: TrainState, module: nn.Module, building: Building) -> None:
        state.more |= add_comm_hook(module, self.config.parallel, seed=self.config.seed)

    def memory(self, held: RankMemory, building: Building) -> None:
        parallel = self.config.parallel
        if parallel.comm_hook is not CommHook.powersgd:
            held.communication += held.trained // 2  # all buckets may be in flight at once
        elif parallel.powersgd_error_feedback:
            held.communication += held.trained  # not counted: the two thin matrices
            held.checkpoint += held.trained * building.mesh.shape.world_size


ABILITY = GradientCompressionAbility
