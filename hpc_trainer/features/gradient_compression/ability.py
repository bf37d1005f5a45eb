"""DDP's hook, and its state in the checkpoint."""

from __future__ import annotations

from torch import nn

from hpc_trainer.features.gradient_compression.hooks import add_comm_hook
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.state import TrainState


class GradientCompressionAbility(Ability):
    def on_state(self, state: TrainState, module: nn.Module, building: Building) -> None:
        state.more |= add_comm_hook(module, self.config.parallel, seed=self.config.seed)


ABILITY = GradientCompressionAbility
