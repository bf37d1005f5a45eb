"""Recomputation of blocks, around whatever they have become by then."""

from __future__ import annotations

from torch import nn

from hpc_trainer.config.schema.train import Recompute
from hpc_trainer.features.recompute.again import recompute_blocks
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.memory import RankMemory
from hpc_trainer.training.parallel.fully_sharded import check_has_blocks


class RecomputeAbility(Ability):
    def see_whole(self, model: nn.Module, building: Building) -> None:
        """A stage of it may have no blocks."""
        mode = self.config.train.recompute.value
        check_has_blocks(model, f"train.recompute={mode} computes again", "train.recompute=none")

    def on_loss(self, loss: nn.Module, building: Building) -> None:
        recompute_blocks(loss.get_submodule("model"), self.config.train.recompute)

    def memory(self, held: RankMemory, building: Building) -> None:
        """Of blocks the pass itself tells; which parts the compiler leaves out is not known, but how much."""
        if self.config.train.recompute is Recompute.budget:
            again = int(held.kept * (1 - self.config.train.recompute_budget))
            held.kept, held.peak, held.growing = held.kept - again, held.peak - again, held.growing - again


ABILITY = RecomputeAbility
