"""Dropout inside a layer that tensor-parallel ranks share: other numbers on each rank, and nothing more to save."""

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
    """For a `tensor_parallel_plan`: what the layer draws is this rank's own, while training with `layer.dropout` > 0.

    Ranks of one tensor-parallel group draw the same numbers, as they hold the same activations. Inside of attention
    they hold other heads, and one dropout mask for heads of two ranks would be wrong. So the layer takes a number from
    the common stream, the same on all of them, and seeds its own stream from it and the rank; after it the common one
    goes on. Recomputation restores that and so draws the same again. Megatron keeps a second state instead.
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
    """`kind` with a stream of its own; a class and no hooks: torch.compile takes layers for alike by their class, and
    hooks have numbers.
    """

    def forward(self: Any, *args: Any) -> Any:
        if self.training and self.dropout:
            return in_own_stream(self, kind.forward, args)
        return kind.forward(self, *args)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def in_own_stream(layer: Any, forward: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """`forward` of `layer`, which draws from a stream of this rank; the common one goes on after it.

    It reads a number, so torch.compile must leave it out (features/compile/graphs.py), though not `forward`.
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
