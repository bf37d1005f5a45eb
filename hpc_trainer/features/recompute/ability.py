"""Recomputation of blocks, around whatever other features have made of them."""

from __future__ import annotations

from torch import nn

from hpc_trainer.features.recompute.checkpointed_blocks import recompute_blocks
from hpc_trainer.models.blocks import check_has_blocks
from hpc_trainer.training.ability import Ability, Building


class RecomputeAbility(Ability):
    def see_whole(self, model: nn.Module, building: Building) -> None:
        """Check the whole model for blocks, since a stage may have none."""
        mode = self.config.train.recompute.value
        check_has_blocks(model, f"train.recompute={mode} computes blocks again", "train.recompute=none")

    def on_loss(self, loss: nn.Module, building: Building) -> None:
        recompute_blocks(loss.get_submodule("model"), self.config.train.recompute)


ABILITY = RecomputeAbility
