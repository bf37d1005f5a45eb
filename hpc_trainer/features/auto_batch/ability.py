"""The sizes that were found, in place of those that were given."""

from __future__ import annotations

from hpc_trainer.features.auto_batch.search import find_sizes
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.data.batch_sizes import BatchSizes
from hpc_trainer.training.parallel.share import VotingLoss


class AutoBatchAbility(Ability):
    def sizes(self, sizes: BatchSizes, loss: VotingLoss, building: Building) -> BatchSizes:
        """Collective."""
        return find_sizes(loss, building)


ABILITY = AutoBatchAbility
