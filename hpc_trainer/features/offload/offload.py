"""Optimizer moments in host memory except during a step.

This rests on optimizers that update each weight by itself (`step_some`). A rank moves the moments that it holds: whole
ones, its shards of them (FSDP2, tensor parallel), those of its stage, or those from ZeRO-1.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import nn

from hpc_trainer.runtime.rank_memory import RankMemory
from hpc_trainer.runtime.tensors import in_pieces, local_tensor, with_local
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.checkpoint.objects import keep_in_host
from hpc_trainer.training.optim.build import Recipe, step_some

# Bytes of weights on this rank whose moments are on the device at a time; one weight at least.
PIECE = 64 << 20


class OffloadAbility(Ability):
    def around_optimizer(self, recipe: Recipe, model: nn.Module, building: Building) -> Recipe:
        """Add offloading to a run's optimizer, before ZeRO-1: its step calls that of a rank's own part.

        For an estimate, `memory` counts it instead.
        """
        return recipe if building.run is None else recipe.then(offload)

    def memory(self, held: RankMemory, building: Building) -> None:
        """Count the moments of one piece of weights on the device at a time, and the host memory that they take."""
        sizes, host = held.sizes_here(), Fraction(1)
        if self.config.hardware.device_type == "cuda":
            # torch pins each tensor in a block of a power of two: CachingHostAllocator, pytorch PR 171662.
            host = Fraction(sum(1 << (size - 1).bit_length() for size in sizes if size), max(1, sum(sizes)))
        held.most_moments = int(max(PIECE, *sizes) * (held.moments / max(1, held.trained)))
        held.host_share = host


def offload(optimizer: torch.optim.Optimizer) -> None:
    """Keep moments in host memory (pinned, if the weights are on a GPU) except during a step.

    A step takes the weights in pieces: it brings the moments of a piece to the device, updates, and takes them back. So
    the optimizer's own kernels compute, with the same bits. On the CPU the copies are made too, without any use.
    """
    step = optimizer.step
    keep_in_host(optimizer)
    optimizer.step = partial(_step_in_pieces, optimizer, step)  # type: ignore[assignment, method-assign]
    optimizer.register_state_dict_pre_hook(_wait_for_host)
    for weight, state in optimizer.state.items():
        _take_back(weight, state, {})


def _step_in_pieces(optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> None:
    for number, group in enumerate(optimizer.param_groups):
        for piece in in_pieces([weight for weight in group["params"] if weight.grad is not None], PIECE):
            # Not state[..]: that would make a state where there is none yet.
            in_host = [_bring(weight, optimizer.state.get(weight, {})) for weight in piece]
            step_some(optimizer, step, number, piece)
            for weight, host in zip(piece, in_host, strict=True):
                _take_back(weight, optimizer.state.get(weight, {}), host)


def _bring(weight: torch.Tensor, state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Copy a weight's moments to its device, and return those in host memory that they replace. Does not wait."""
    in_host = {key: value for key, value in state.items() if isinstance(value, torch.Tensor) and value.ndim}
    for key, value in in_host.items():
        host = local_tensor(value)
        here = host.to(weight.device, non_blocking=True, copy=True)
        state[key] = with_local(value, here)
    return in_host


def _take_back(weight: torch.Tensor, state: dict[str, Any], in_host: dict[str, torch.Tensor]) -> None:
    """Undo `_bring`; allocate host memory for moments that have none yet. Does not wait on pinned memory."""
    for key, value in state.items():
        if not isinstance(value, torch.Tensor) or not value.ndim:
            continue
        here = local_tensor(value)
        host = local_tensor(in_host[key]) if key in in_host else None
        if host is None or (weight.is_cuda and not host.is_pinned()):
            host = torch.empty_like(here, device="cpu", pin_memory=weight.is_cuda)
        host.copy_(here, non_blocking=True)
        state[key] = with_local(value, host)


def _wait_for_host(optimizer: torch.optim.Optimizer) -> None:
    """Wait until copies to host memory are complete, before the state is read."""
    # With ZeRO-1 a group of this rank may be empty.
    device = next((weight.device for group in optimizer.param_groups for weight in group["params"]), None)
    if device is not None and device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


ABILITY = OffloadAbility
