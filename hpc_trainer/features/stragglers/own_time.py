"""Time of one rank's own work in a step: all but the time in which it waits for other ranks.

In synchronous training all ranks' steps are equally long: a quick rank waits in the reduction. So a rank's clock runs
from the beginning of its step to the call of the model, which is the wait for data. It stands still in what DDP does
there (buffers come from rank 0). It runs again from inside until the last gradient is there, before DDP waits for the
reduction. With FSDP2, which gathers every block's weights, forward and backward passes wait too: there the clock runs
only inside each block's forward pass.

Stamps are the device's (`DeviceKind.stamp`): on a GPU a wait for data that is hidden behind kernels takes nothing. If
ranks count a step's targets together (training/data/target_shares.py), they wait for each other before the model is
called. There the wait for data is what the loader reports, by the host's clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hpc_trainer.models.blocks import blocks
from hpc_trainer.runtime.devices import DeviceKind
from hpc_trainer.training.parallel.fully_sharded import is_fully_sharded
from hpc_trainer.training.parallel.share import VotingLoss

MOST_STEPS = 16
"""Steps before each logged line that are measured, so that what is read then is bounded."""
_Part = tuple[bool, float | tuple[Any, Any]]
"""(True for a wait for data, its seconds or its first and last stamp)."""


class OwnTime:
    """Clocks of one rank, in hooks of its modules. They change no value, and nothing waits for the device.

    Args:
        module: what ranks share the loss by.
        loss: the same, or inside of it.
        kind: kind of the device; it has stamps.
        waited_s: seconds that this rank has waited for data so far; None: stamps measure it.
    """

    def __init__(
        self, module: nn.Module, loss: VotingLoss, kind: DeviceKind, waited_s: Callable[[], float] | None = None
    ) -> None:
        self._kind, self._waited_s, self._is_on = kind, waited_s, False
        self._last: Any = None
        self._from: Any = None
        self._is_inside = False
        self._parts: list[_Part] = []
        self._steps = deque[list[_Part]](maxlen=MOST_STEPS)
        module.register_forward_pre_hook(self._arrive, prepend=True)
        inner = list(blocks(loss.model)) or [loss] if is_fully_sharded(module) else []
        for each in inner:
            each.register_forward_pre_hook(self._enter)  # behind FSDP's own, which waits for the weights
            each.register_forward_hook(self._leave, prepend=True)
        self._is_whole = not inner
        if self._is_whole:
            loss.register_forward_pre_hook(self._enter)
        loss.register_forward_hook(self._forward_is_done, prepend=True)

    def begin(self, *, is_measured: bool) -> None:
        """Begin a step."""
        self._end()
        self._is_on = is_measured
        if is_measured:
            self._wait_begins()

    def take(self) -> tuple[float, float] | None:
        """Return (seconds of a rank's own work in a step, seconds of it spent waiting for data).

        They are those of the step at the lower quarter of the steps measured since the last call: other load on a
        machine only ever adds time, and a slow rank is slow in each step. None if no step was measured. The device must
        have done all steps.
        """
        self._end()
        if not self._steps:
            return None
        steps = [[(is_wait, self._seconds(part)) for is_wait, part in parts] for parts in self._steps]
        self._steps.clear()
        sums = sorted((sum(s for _, s in parts), sum(s for is_wait, s in parts if is_wait)) for parts in steps)
        return sums[len(sums) // 4]

    def _seconds(self, part: float | tuple[Any, Any]) -> float:
        return part if isinstance(part, float) else self._kind.seconds_between(*part)

    def _wait_begins(self) -> None:
        self._last = self._kind.stamp() if self._waited_s is None else self._waited_s()

    def _end(self) -> None:
        if self._parts:
            self._steps.append(self._parts)
        self._parts, self._is_on, self._is_inside = [], False, False

    def _arrive(self, *_: object) -> None:
        if self._is_on and self._last is not None:
            now = self._kind.stamp() if self._waited_s is None else self._waited_s()
            self._parts.append((True, (self._last, now) if self._waited_s is None else now - self._last))
            self._last = None

    def _enter(self, *_: object) -> None:
        if self._is_on:
            self._arrive()  # past DDP, which local_sgd leaves out from some step on
            self._from, self._is_inside = self._kind.stamp(), True

    def _leave(self, *_: object) -> None:
        if self._is_inside:
            self._parts.append((False, (self._from, self._kind.stamp())))
            self._is_inside = False

    def _forward_is_done(self, module: nn.Module, inputs: Any, loss: Any) -> None:
        if self._is_on and isinstance(loss, torch.Tensor) and loss.requires_grad:
            loss.register_hook(self._backward_begins)  # type: ignore[no-untyped-call]

    def _backward_begins(self, _: torch.Tensor) -> None:
        # Callbacks run in order, when all gradients are there: the last gradient queues that of DDP, which waits.
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_is_done)

    def _backward_is_done(self) -> None:
        if self._is_whole:
            self._leave()
        self._wait_begins()
