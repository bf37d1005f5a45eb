"""Averaged weights of a run: kept beside the model's, updated after each step, swapped in for evaluations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from hpc_trainer.features.averaged_weights.average import AveragedWeights
from hpc_trainer.runtime.rank_memory import RankMemory
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.state import TrainState


class AveragedWeightsAbility(Ability):
    _average: AveragedWeights

    def on_state(self, state: TrainState, module: nn.Module, building: Building) -> None:
        """Make the average once the weights are rank 0's."""
        assert self.config.train.ema_decay is not None
        self._average = AveragedWeights(state.model, self.config.train.ema_decay, module)
        state.more["ema"] = self._average

    def after_update(self) -> None:
        """Update the average, after a skipped step too: only the GPU knows yet whether the step was skipped."""
        self._average.update()

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        return self._average.swapped_in()

    def held(self) -> Mapping[str, Iterable[torch.Tensor]]:
        return {"average": [*self._average.parameters(), *self._average.buffers()]}

    def stand_ins(self) -> Mapping[str, torch.Tensor]:
        return dict(self._average.module.named_parameters())

    def memory(self, held: RankMemory, building: Building) -> None:
        held.average = held.weights // held.num_parts + held.buffers
        held.checkpoint += held.saved + held.buffers


ABILITY = AveragedWeightsAbility
