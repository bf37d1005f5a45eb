"""A stage in place of the model, and a step whose micro-batches pass through all stages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from hpc_trainer.features.pipeline.memory import add_stage, trial_of
from hpc_trainer.features.pipeline.stage import Stages, cut_out
from hpc_trainer.features.pipeline.step import PipelineStepper
from hpc_trainer.runtime.rank_memory import RankMemory
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.parallel.share import VotingLoss
from hpc_trainer.training.state import TrainState
from hpc_trainer.training.step import Stepper


class PipelineAbility(Ability):
    _stages: Stages
    _needed: dict[str, Any]

    def cut(self, model: nn.Module, building: Building) -> None:
        self._stages = cut_out(model, building)

    def share(self, loss: VotingLoss, building: Building) -> nn.Module | None:
        """Return the shared stage in place of the loss, which the step computes on the last stage."""
        module, self._needed = self._stages.share(self.config, building.mesh, loss)
        return module

    def stepper(self, make: Callable[..., Stepper], state: TrainState, building: Building) -> Callable[..., Stepper]:
        return partial(PipelineStepper, **self._needed)

    def trial(self, loss: nn.Module, batch: Any, building: Building) -> tuple[nn.Module, Any]:
        assert isinstance(loss, VotingLoss)
        return trial_of(loss, batch, self._stages.stage)

    def memory(self, held: RankMemory, building: Building) -> None:
        add_stage(held, self.config, self._stages.stage)


ABILITY = PipelineAbility
