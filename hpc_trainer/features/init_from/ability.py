"""Existing weights, loaded into the model while it is whole, so that ranks may share it in any way afterwards.

They are loaded only if the run has saved nothing yet: a resumed run has everything in its own checkpoint, and reads no
source. With `train.lora` its checkpoint has the adapters alone, and each start takes the rest from the source.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.errors import StorageError
from hpc_trainer.features.init_from.load import load
from hpc_trainer.runs.checkpoint_folders import committed
from hpc_trainer.runs.first_weights import write_first_weights
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.context import RunContext


class InitFromAbility(Ability):
    loads_always: ClassVar[bool] = False
    _run: RunContext | None = None
    _has_saved = False

    def __new__(cls, config: TrainConfig) -> InitFromAbility:
        """Return a `BaseAbility` for a run with adapters."""
        return super().__new__(BaseAbility if config.train.lora.rank > 0 else cls)

    def see_whole(self, model: nn.Module, building: Building) -> None:
        """Load the weights into the whole model. Collective in a run; an estimate loads none."""
        run = self._run = building.run
        if run is None:
            return
        self._has_saved = run.group.broadcast(run.is_rank_zero and bool(committed(run.store.folder)))
        if self._has_saved and not self.loads_always:
            return
        found = load(model, self.config.init_from, run.group, run.beat)
        if run.is_rank_zero:
            write_first_weights(run.paths, found)
            print(found.line())

    def restored(self) -> None:
        """Raise StorageError if no checkpoint of the run could be read: init_from was not loaded either."""
        is_left_out = self._has_saved and not self.loads_always
        if is_left_out and self._run is not None and self._run.saved_step is None:
            raise StorageError(
                "no checkpoint of this run can be read, and it counted on one: it has not loaded init_from. The next "
                "start begins at step 0 where damaged ones were put away."
            )


class BaseAbility(InitFromAbility):
    """Loading of the base weights that no checkpoint of the run has: adapters stand beside them."""

    loads_always: ClassVar[bool] = True

    def fit_weights(self, model: nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Load the source again, as each start does. Raises ConfigError if the source has changed, or is gone."""
        load(model, self.config.init_from, RankGroup())
        return weights


ABILITY = InitFromAbility
