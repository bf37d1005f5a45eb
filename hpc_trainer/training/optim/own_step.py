"""What the steps of our own optimizers have in common."""

from __future__ import annotations

from collections.abc import Callable

import torch


class OwnStep(torch.optim.Optimizer):
    """An optimizer that says in `update` what its step does; also before a class of torch's, whose step that replaces.

    `found_inf` and `grad_scale` are attributes that GradScaler and `step_unless` set for one step, as for torch's fused
    optimizers: nobody waits for the device.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of this rank's weights; of none where `found_inf` is not 0. Collective where `update` is."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update(getattr(self, "found_inf", None), getattr(self, "grad_scale", None))
        return loss

    def update(self, bad: torch.Tensor | None, scale: torch.Tensor | None) -> None:
        """Steps all weights that have a gradient.

        Args:
            bad: a float scalar on the device; other than 0: nothing is to change. None: the step is good.
            scale: what gradients are multiplied by, a float scalar on the device; None: they are as they are.
        """
        raise NotImplementedError
