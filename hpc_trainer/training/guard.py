"""Steps whose gradient is not finite: skipped by all ranks together, counted, and the end of a run that diverged."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch

from hpc_trainer.errors import DivergedError


class StepGuard:
    """Sees the norm of each step's gradient, which is the same on all ranks, as the averaged gradients are.

    Looking waits for no device: on a GPU the counters are tensors there, and are read when they are asked for.

    Args:
        max_in_a_row: steps that may be skipped one after the other, ≥ 0; None: nobody looks.
    """

    skips_finite: ClassVar[bool] = False
    """True of one that skips finite steps too; the loss scaler then does not decide alone."""
    offset: int = 0
    """Batches that were passed over: step n takes the batch n + offset."""

    def __init__(self, max_in_a_row: int | None = None) -> None:
        self.max_in_a_row = max_in_a_row
        self._in_a_row: int | torch.Tensor = 0
        self._worst: int | torch.Tensor = 0  # the longest such row since the last check
        self._total: int | torch.Tensor = 0

    @property
    def is_on(self) -> bool:
        """True if the norm of each gradient is wanted."""
        return self.max_in_a_row is not None

    def see(self, grad_norm: torch.Tensor, step: int = 0) -> bool | torch.Tensor:
        """True if the step must change nothing; a bool, or on a GPU a tensor of one. False if nobody looks.

        `grad_norm`: a scalar. `step`: those done before.
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
        # After a check it is a number, and as a tensor it would be copied to the device, for which the host waits.
        self._worst = self._in_a_row.clamp(min=self._worst)
        self._total = self._total + bad.long()
        return bad

    @property
    def total(self) -> int:
        """Steps that were skipped so far; waits for the device."""
        return int(self._total)

    def figures(self) -> dict[str, float]:
        """What is logged beside the loss, where it is not 0; waits for the device."""
        return {"skipped_steps": self.total} if self.total else {}

    def check(self, step: int, scaler: torch.amp.GradScaler) -> None:
        """Raises DivergedError if too many steps were skipped in a row since the last check. Waits for the device.

        With a loss scale above 1 the scale may be to blame: it halves with each overflow until none is left.
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
        """The counters, as numbers."""
        return {"in_a_row": int(self._in_a_row), "worst": int(self._worst), "total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undoes `state_dict`."""
        self._in_a_row, self._worst, self._total = state["in_a_row"], state["worst"], state["total"]
