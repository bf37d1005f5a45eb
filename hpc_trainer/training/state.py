"""State that the shared loop changes: everything that a resumed run needs to continue with the same bits.

The guard counts steps whose gradient is not finite: all ranks skip them together, and too many in a row end the run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from hpc_trainer.errors import DivergedError
from hpc_trainer.training.context import Restored


class StepGuard:
    """Counter of skipped steps, from the norm of each step's gradient.

    The norm is the same on all ranks, because averaged gradients are. Checking it waits for no device: on a GPU the
    counters are tensors on the device, which are read only when their values are needed.

    Args:
        max_in_a_row: steps that may be skipped one after the other, ≥ 0; None: steps are not checked.
    """

    skips_finite: ClassVar[bool] = False
    """True if the guard skips finite steps too; the loss scaler then does not decide alone."""
    offset: int = 0
    """Batches that were left out: step n takes batch n + offset."""

    def __init__(self, max_in_a_row: int | None = None) -> None:
        self.max_in_a_row = max_in_a_row
        self._in_a_row: int | torch.Tensor = 0
        self._worst: int | torch.Tensor = 0  # the longest such row since the last check
        self._total: int | torch.Tensor = 0

    @property
    def is_on(self) -> bool:
        """True if the guard needs the norm of each gradient."""
        return self.max_in_a_row is not None

    def see(self, grad_norm: torch.Tensor, step: int = 0) -> bool | torch.Tensor:
        """Return True if the step must change nothing; False if the guard is off.

        Args:
            grad_norm: a scalar.
            step: steps done before this one.

        Returns:
            A bool, or a bool tensor on the device if `grad_norm` is on a GPU.
        """
        del step
        if not self.is_on:
            return False
        if grad_norm.device.type == "cpu":
            if math.isfinite(grad_norm.item()):
                self._in_a_row = 0
                return False
            self._in_a_row = int(self._in_a_row) + 1
            self._worst = max(int(self._worst), self._in_a_row)
            self._total = int(self._total) + 1
            return True
        bad = ~torch.isfinite(grad_norm)
        self._in_a_row = (self._in_a_row + 1) * bad.long()
        # After a check `_worst` is an int. As a tensor it would be copied to the device: the host would wait.
        self._worst = self._in_a_row.clamp(min=self._worst)
        self._total = self._total + bad.long()
        return bad

    @property
    def total(self) -> int:
        """Number of steps skipped so far; waits for the device."""
        return int(self._total)

    def figures(self) -> dict[str, float]:
        """Return the metrics to log beside the loss, {} if no step was skipped; waits for the device."""
        return {"skipped_steps": self.total} if self.total else {}

    def check(self, step: int, scaler: torch.amp.GradScaler) -> None:
        """Raise an error if too many steps were skipped in a row since the last check. Waits for the device.

        With a loss scaler, only a scale of 1 or less ends the run: a larger one may be the reason, and halves with each
        overflow until there is none.

        Raises:
            DivergedError: more than `max_in_a_row` steps in a row were skipped.
        """
        if self.max_in_a_row is None:
            return
        in_a_row, worst = int(self._in_a_row), int(self._worst)
        self._worst = in_a_row
        row = worst
        if scaler.is_enabled():
            row = in_a_row if scaler.get_scale() <= 1.0 else 0
        if row <= self.max_in_a_row:
            return
        raise DivergedError(
            f"the gradient was not finite (NaN or inf) in {row} steps in a row up to step {step}, and "
            f"train.max_skipped_steps={self.max_in_a_row}: the training has diverged. None of them changed a weight. "
            "Try a smaller optim.lr, schedule.warmup_steps, train.max_grad_norm=1.0 or precision=fp32, and look for "
            "NaN in the data."
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the counters as ints; waits for the device."""
        return {"in_a_row": int(self._in_a_row), "worst": int(self._worst), "total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the counters to those of `state_dict`."""
        self._in_a_row, self._worst, self._total = state["in_a_row"], state["worst"], state["total"]


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
