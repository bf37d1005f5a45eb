"""Linear layers of blocks in 8 bits, before ranks share the model and the compiler sees it."""

from __future__ import annotations

from torch import nn

from hpc_trainer.features.float8.linear import use_float8
from hpc_trainer.training.ability import Ability, Building


class Float8Ability(Ability):
    def on_device(self, model: nn.Module, building: Building) -> None:
        if building.run is not None:  # an estimate knows no such kernels, and counts bf16's
            use_float8(model)


ABILITY = Float8Ability
