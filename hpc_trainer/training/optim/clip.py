"""Clipping where all weights are alike; and where they lie on a mesh, which of them count on a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hpc_trainer.runtime.tensors import is_sharded
from hpc_trainer.training.parallel.mesh import Mesh


def are_alike(weights: Sequence[nn.Parameter]) -> bool:
    """True of plain tensors of one number format on one device: `clip_alike` takes no others."""
    return len({(weight.device, weight.dtype) for weight in weights}) == 1 and not any(map(is_sharded, weights))


@torch.no_grad()
def clip_alike(weights: Sequence[nn.Parameter], max_norm: float | None) -> torch.Tensor:
    """What torch's clip_grad_norm_ does, to the bit, for weights that `are_alike`: nothing is sorted in each step.

    Sorting takes torch 2.13 a third of the time of clipping eight small layers, 100 µs of 320.

    Args:
        weights: of any shapes.
        max_norm: L2 norm to scale the gradients down to; None: they are left.

    Returns:
        The norm before, a scalar.
    """
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    if not gradients:
        return torch.zeros((), device=weights[0].device)
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2.0)), 2.0)
    if max_norm is not None:
        scale_down(gradients, norm, max_norm)
    return norm


def counts_here(weight: nn.Parameter, mesh: Mesh) -> bool:
    """True on one rank of those that hold the same part of `weight`: whose square goes into the sum over all ranks."""
    if not is_sharded(weight):
        return mesh.is_first_of_stage
    sharded: Any = weight
    places = zip(sharded.device_mesh.get_coordinate(), sharded.placements, strict=True)
    return not any(index for index, placement in places if placement.is_replicate())


def place_gradients(weights: Sequence[nn.Parameter]) -> None:
    """A gradient that lies on the mesh otherwise than its weight is laid out as that. Collective among neighbours.

    torch 2.13 gives an embedding that is divided by rows the whole gradient on each rank; FSDP2 mends that itself.
    """
    for weight in weights:
        gradient: Any = weight.grad
        if gradient is not None and is_sharded(gradient) and gradient.placements != weight.placements:  # type: ignore[attr-defined]
            weight.grad = gradient.redistribute(placements=weight.placements)  # type: ignore[attr-defined]


def scale_down(gradients: list[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Plain tensors of any shapes, whose `norm` (a scalar) all ranks know: as torch does, without looking at it."""
    torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
