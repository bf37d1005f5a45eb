"""State that the shared loop changes: everything that a resumed run needs to continue with the same bits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hpc_trainer.training.context import Restored
from hpc_trainer.training.guard import StepGuard


@dataclass(slots=True, kw_only=True)
class TrainState:
    """State of a training run, apart from the random state, which the RunContext holds.

    The learning rate and the order of samples are functions of `step`.
    `model` is the bare module, without DDP around it. `guard` counts skipped steps. `step` counts optimizer steps done,
    `samples_seen` the samples of all ranks in them.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    step: int = 0
    samples_seen: int = 0
    best_metric: float | None = None
    guard: StepGuard = field(default_factory=StepGuard)
    settings: list[dict[str, Any]] = field(default_factory=list)
    """Settings of each group of the optimizer in the present configuration (`chosen_settings`)."""
    more: dict[str, Any] = field(default_factory=dict)
    """State of features, by name."""

    def objects(self) -> dict[str, Any]:
        """Return the objects for `RunContext.restore` and `RunContext.save`."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scaler": self.scaler,
            "samples_seen": self.samples_seen,
            "best_metric": self.best_metric,
            "guard": self.guard,
            **self.more,
        }

    def resume(self, restored: Restored) -> None:
        """Take over the restored numbers, and set the optimizer's settings to those of the present configuration.

        The objects were filled in place; that left the optimizer with the settings of the save.
        """
        for group, values in zip(self.optimizer.param_groups, self.settings, strict=False):
            group.update(values)
        self.step, self.samples_seen, self.best_metric = (
            restored.step, restored["samples_seen"], restored["best_metric"],
        )  # fmt: skip
