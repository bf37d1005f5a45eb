"""A stage in place of the model, and a step whose micro-batches pass through all stages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from hpc_trainer.config.schema.parallel import Strategy
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.features.pipeline import PipelineSchedule
from hpc_trainer.features.pipeline.cut import Stage
from hpc_trainer.features.pipeline.stage import Stages, cut_out
from hpc_trainer.features.pipeline.step import PipelineStepper
from hpc_trainer.runtime.rank_memory import RankMemory
from hpc_trainer.tasks.pairs import PairTask
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.parallel.fully_sharded import bytes_added_up, bytes_gathered
from hpc_trainer.training.parallel.share import VotingLoss
from hpc_trainer.training.state import TrainState
from hpc_trainer.training.step import Stepper


def trial_of(loss: VotingLoss, batch: Any, stage: Stage) -> tuple[nn.Module, Any]:
    """Return (module whose output is the scalar that backward starts from, its batch); `batch` is the whole model's."""
    inputs, targets = batch
    if not stage.is_first:
        inputs = torch.empty(stage.inputs.shape, dtype=stage.inputs.dtype, requires_grad=True)
    assert isinstance(loss.task, PairTask)
    return _StageLoss(loss.model, loss.task), (inputs, targets if stage.is_last else None)


def add_stage(held: RankMemory, config: TrainConfig, stage: Stage) -> None:
    """Add a pipeline's memory to `held`, which is that of the stage as a model of its own, for one micro-batch."""
    parallel, num_micro = config.parallel, config.train.grad_accum_steps or 1
    held.peak += held.kept * (_num_in_flight(config, stage) - 1)
    held.batch = num_micro * (held.batch + (0 if stage.is_last else stage.outputs.nbytes))
    # With FSDP too: a pipeline accumulates gradients unsharded, and its stage stays whole meanwhile.
    held.gradients, held.has_gradients = bytes_added_up(held.trained, config), True
    held.gathered = bytes_gathered(held.weights, config) * (parallel.strategy is Strategy.fsdp)
    held.checkpoint += held.buffers  # what ranks share names those of all stages, beside each rank's own
    note = f"stage {stage.index} of 0 to {stage.num_stages - 1} needs most"
    held.note = f"{note}; {held.note}" if held.note else note


def _num_in_flight(config: TrainConfig, stage: Stage) -> int:
    accum = config.train.grad_accum_steps or 1
    if config.parallel.pipeline_schedule is PipelineSchedule["gpipe"]:
        return accum
    return min(accum, stage.num_stages - stage.index)


class _StageLoss(nn.Module):
    """Scalar from which backward starts: the loss on the last stage, the sum of the outputs on others."""

    def __init__(self, model: nn.Module, task: PairTask) -> None:
        super().__init__()
        self.model, self.task = model, task

    def forward(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        value: torch.Tensor = self.model(inputs)
        if targets is None:
            return value.sum()
        return self.task.loss_of(value, targets)


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
