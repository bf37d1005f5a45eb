"""Activation checkpointing: a block keeps less for the backward pass, which computes the rest again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hpc_trainer.config.schema.train import Recompute
from hpc_trainer.models.parts import blocks, check_has_blocks
from hpc_trainer.training.ability import Ability, Building

_ATEN = torch.ops.aten
KEPT = frozenset((
    _ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default, _ATEN.baddbmm.default, _ATEN.convolution.default,
    _ATEN._scaled_mm.default,  # fp8
    _ATEN._scaled_dot_product_flash_attention.default, _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default, _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
))  # fmt: skip
"""Operations whose results `selective` keeps: expensive to compute, and small to keep."""


def recompute_blocks(model: nn.Module, mode: Recompute) -> None:
    """Make the blocks of `model` (layers of a transformer, of a ResNet) keep less until the backward pass.

    A block keeps its inputs alone, or with `selective` also the results of matrix products. Names of weights stay. Call
    this after compilation and before DDP and FSDP. The recomputation draws the same random numbers, and batch norm
    counts a batch once.
    """
    for block in blocks(model) if mode in (Recompute.full, Recompute.selective) else ():
        context_fn = partial(_contexts, block, mode is Recompute.selective)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=context_fn)


def _contexts(block: nn.Module, is_selective: bool) -> tuple[Any, Any]:
    """Return the contexts of (the forward pass, its recomputation)."""
    if not is_selective:
        return contextlib.nullcontext(), _statistics_kept(block)
    first, second = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    return first, _both(_statistics_kept(block), second)  # outer: its copies are no operations to count


@contextlib.contextmanager
def _both(first: Any, second: Any) -> Iterator[None]:
    with first, second:
        yield


@contextlib.contextmanager
def _statistics_kept(block: nn.Module) -> Iterator[None]:
    """Let recomputation update copies of batch norm's running statistics, which each pass updates."""
    norms = [module for module in block.modules() if isinstance(module, _NormBase) and module.training]
    before = [dict(norm._buffers) for norm in norms]
    for norm in norms:
        norm._buffers.update({name: buffer.clone() for name, buffer in norm._buffers.items() if buffer is not None})
    try:
        yield
    finally:
        for norm, buffers in zip(norms, before, strict=True):
            norm._buffers.update(buffers)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


class RecomputeAbility(Ability):
    def see_whole(self, model: nn.Module, building: Building) -> None:
        """Check the whole model for blocks, since a stage may have none."""
        mode = self.config.train.recompute.value
        check_has_blocks(model, f"train.recompute={mode} computes blocks again", "train.recompute=none")

    def on_loss(self, loss: nn.Module, building: Building) -> None:
        recompute_blocks(loss.get_submodule("model"), self.config.train.recompute)


ABILITY = RecomputeAbility
