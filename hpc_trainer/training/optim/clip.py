"""Gradient clipping for plain weights of one kind; for sharded weights, the ones that count on a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hpc_trainer.runtime.tensors import is_sharded
from hpc_trainer.training.parallel.mesh import Mesh


def are_alike(weights: Sequence[nn.Parameter]) -> bool:
    """Return True for plain tensors of one number format on one device, the only ones that `clip_alike` takes."""
    return len({(weight.device, weight.dtype) for weight in weights}) == 1 and not any(map(is_sharded, weights))


@torch.no_grad()
def clip_alike(weights: Sequence[nn.Parameter], max_norm: float | None) -> torch.Tensor:
    """Clip gradients as torch's clip_grad_norm_, to the bit, for weights that `are_alike`; return their norm.

    Nothing is sorted in each step: sorting takes torch 2.13 a third of the time of clipping eight small layers, 100 µs
    of 320.

    Args:
        weights: of any shapes.
        max_norm: L2 norm to scale the gradients down to; None: they are not changed.

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
    """Return True on one of the ranks that hold the same part of `weight`: its square counts in the sum over ranks."""
    if not is_sharded(weight):
        return mesh.is_first_of_stage
    sharded: Any = weight
    places = zip(sharded.device_mesh.get_coordinate(), sharded.placements, strict=True)
    return not any(index for index, placement in places if placement.is_replicate())


def place_gradients(weights: Sequence[nn.Parameter]) -> None:
    """Redistribute gradients that are placed on the mesh differently from their weight. Collective among neighbours.

    torch 2.13 gives an embedding that is divided by rows the whole gradient on each rank; FSDP2 corrects that itself.
    """
    for weight in weights:
        gradient: Any = weight.grad
        if gradient is not None and is_sharded(gradient) and gradient.placements != weight.placements:  # type: ignore[attr-defined]
            weight.grad = gradient.redistribute(placements=weight.placements)  # type: ignore[attr-defined]


def scale_down(gradients: list[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale plain gradients down to `max_norm` as torch does, without reading `norm`.

    Args:
        gradients: of any shapes.
        norm: their L2 norm, a scalar that all ranks know.
        max_norm: the largest norm allowed.
    """
    torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
