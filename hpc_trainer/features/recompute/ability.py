"""Recomputation of blocks, around whatever they have become by then."""

from __future__ import annotations

from torch import nn

from hpc_trainer.features.recompute.checkpointed_blocks import recompute_blocks
from hpc_trainer.models.blocks import check_has_blocks
from hpc_trainer.training.ability import Ability, Building


class RecomputeAbility(Ability):
    def see_whole(self, model: nn.Module, building: Building) -> None:
        """A stage of it may have no blocks."""
        mode = self.config.train.recompute.value
        check_has_blocks(model, f"train.recompute={mode} computes blocks again", "train.recompute=none")

    def on_loss(self, loss: nn.Module, building: Building) -> None:
        recompute_blocks(loss.get_submodule("model"), self.config.train.recompute)


ABILITY = RecomputeAbility
