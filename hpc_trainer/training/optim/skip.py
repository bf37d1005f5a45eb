"""Optimizer step that changes nothing if the device finds the gradient bad."""

from __future__ import annotations

import torch

from hpc_trainer.runtime.devices import kind_of
from hpc_trainer.training.optim.build import inner_of


def step_unless(optimizer: torch.optim.Optimizer, bad: torch.Tensor) -> None:
    """Step the optimizer unless `bad` (a bool scalar on the device) is true.

    torch's fused optimizers and our own read `found_inf` on the device, as for GradScaler. For other optimizers the
    host waits, unless a feature provides another way (`Stepper.step_unless`).
    """
    inner = inner_of(optimizer)
    if getattr(inner, "_step_supports_amp_scaling", False):
        inner.grad_scale, inner.found_inf = None, bad.float()
        try:
            optimizer.step()
        finally:
            del inner.grad_scale, inner.found_inf
        return
    kind_of(bad.device).launch()
    if not bad:
        optimizer.step()
