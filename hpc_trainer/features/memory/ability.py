"""Batch sizes that the search found, in place of the configured ones."""

from __future__ import annotations

import dataclasses

from hpc_trainer.features.memory.search import find_sizes
from hpc_trainer.runtime.rank_memory import RankMemory
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.data.order import BatchSizes
from hpc_trainer.training.parallel.share import VotingLoss

_NOTE = "the figures are of two samples, and the run takes as many as fit"


class AutoBatchAbility(Ability):
    def sizes(self, sizes: BatchSizes, loss: VotingLoss, building: Building) -> BatchSizes:
        """Return the batch sizes that the search found. Collective.

        An estimate has no memory to try: its evaluation batch is as large as the micro-batch.
        """
        if building.run is None:
            return dataclasses.replace(sizes, eval_batch_size=sizes.micro_batch_size)
        return find_sizes(loss, building)

    def memory(self, held: RankMemory, building: Building) -> None:
        held.note = held.note or f"train.micro_batch_size=auto: {_NOTE}"


ABILITY = AutoBatchAbility
