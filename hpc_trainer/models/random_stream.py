"""Dropout inside a layer that tensor-parallel ranks share: other numbers on each rank, and nothing more to save."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpc_trainer.runtime.devices import DeviceKind, kinds_in_use

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle


def own_random_stream() -> ParallelStyle:
    """For a `tensor_parallel_plan`: what the layer draws is this rank's own, while training with `layer.dropout` > 0.

    Ranks of one tensor-parallel group draw the same numbers, as they hold the same activations. Inside of attention
    they hold other heads, and one dropout mask for heads of two ranks would be wrong. So the layer takes a number from
    the common stream, the same on all of them, and seeds its own stream from it and the rank; after it the common one
    goes on. Recomputation restores that and so draws the same again. Megatron keeps a second state instead.
    """
    from torch.distributed.tensor.parallel import ParallelStyle

    class OwnRandomStream(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            before = _Before(device_mesh.get_local_rank())
            module.register_forward_pre_hook(before.fork)
            module.register_forward_hook(before.join, always_call=True)  # recomputation may leave a layer early
            return module

    return OwnRandomStream()


class _Before:
    """The common stream's state while a layer runs."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._kept: list[tuple[torch.Tensor, list[tuple[DeviceKind, torch.Tensor]]]] = []

    def fork(self, module: nn.Module, args: Any) -> None:
        if not (module.training and module.dropout):
            return
        drawn = int(torch.randint(2**62, ())) + self._rank
        devices = [(kind, kind.rng_state()) for kind in kinds_in_use()]
        self._kept.append((torch.get_rng_state(), devices))
        torch.default_generator.manual_seed(drawn)
        for kind, _ in devices:
            kind.seed(drawn)

    def join(self, module: nn.Module, args: Any, outputs: Any) -> None:
        if self._kept:
            cpu, devices = self._kept.pop()
            torch.set_rng_state(cpu)
            for kind, state in devices:
                kind.set_rng_state(state)
