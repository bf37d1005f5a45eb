"""Base class of hpc_trainer's own optimizers."""

from __future__ import annotations

from collections.abc import Callable

import torch


class OwnStep(torch.optim.Optimizer):
    """Optimizer whose step is defined by `update`. As the first base it replaces the step of a torch class.

    GradScaler and `step_unless` set the attributes `found_inf` and `grad_scale` for one step, as for torch's fused
    optimizers: so nothing waits for the device.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update this rank's weights, or none if `found_inf` is not 0. Collective if `update` is."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update(getattr(self, "found_inf", None), getattr(self, "grad_scale", None))
        return loss

    def update(self, bad: torch.Tensor | None, scale: torch.Tensor | None) -> None:
        """Step all weights that have a gradient.

        Args:
            bad: a float scalar on the device; if it is not 0, nothing may change. None: the step is good.
            scale: factor that the gradients contain, a float scalar on the device; None: they are not scaled.
        """
        raise NotImplementedError
