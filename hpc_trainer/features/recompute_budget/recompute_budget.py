"""Memory that a budget saves, for the estimate; the compiler gets the budget in features/compile."""

from __future__ import annotations

from hpc_trainer.runtime.rank_memory import RankMemory
from hpc_trainer.training.ability import Ability, Building


class RecomputeBudgetAbility(Ability):
    def memory(self, held: RankMemory, building: Building) -> None:
        """Reduce the memory that a pass keeps to the budget, which is the share that the compiler keeps."""
        again = int(held.kept * (1 - self.config.train.recompute_budget))
        held.kept, held.peak, held.growing = held.kept - again, held.peak - again, held.growing - again


ABILITY = RecomputeBudgetAbility
