"""Dropout in a layer that tensor-parallel ranks share: each rank draws other numbers, with no more state to save."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpc_trainer.runtime.devices import kinds_in_use

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle


def own_random_stream() -> ParallelStyle:
    """Return a style for a `tensor_parallel_plan`: in training the layer draws from this rank's own random stream.

    This needs `layer.dropout` > 0. Ranks of one tensor-parallel group draw the same numbers, because they hold the same
    activations. In attention they hold different heads, and the same dropout mask for heads of two ranks would be
    wrong. So the layer draws a number from the common stream, the same on all ranks, and seeds its own stream from it
    and the rank; afterwards the common stream continues. Recomputation restores the common stream, so it draws the same
    numbers again. Megatron keeps a second state instead.
    """
    from torch.distributed.tensor.parallel import ParallelStyle

    class OwnRandomStream(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            forked: Any = module
            forked.own_stream_rank = device_mesh.get_local_rank()
            forked.__class__ = _forked(type(module))  # type: ignore[arg-type]  # classes can be hashed; mypy 2 says no
            return module

    return OwnRandomStream()


@functools.cache
def _forked(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `kind` that draws from its own random stream.

    A class, not hooks: torch.compile recognises equal layers by their class, and hooks have numbers.
    """

    def forward(self: Any, *args: Any) -> Any:
        if self.training and self.dropout:
            return in_own_stream(self, kind.forward, args)
        return kind.forward(self, *args)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def in_own_stream(layer: Any, forward: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run `forward` of `layer` with this rank's own random stream; afterwards the common stream continues.

    This function reads a number from a tensor, so torch.compile must skip it (features/compile/graphs.py), but not
    `forward`.
    """
    drawn = int(torch.randint(2**62, ())) + layer.own_stream_rank
    before, devices = torch.get_rng_state(), [(kind, kind.rng_state()) for kind in kinds_in_use()]
    torch.default_generator.manual_seed(drawn)
    for kind, _ in devices:
        kind.seed(drawn)
    try:
        return forward(layer, *args)
    finally:  # recomputation may leave a layer early
        torch.set_rng_state(before)
        for kind, state in devices:
            kind.set_rng_state(state)
