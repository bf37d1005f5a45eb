"""`parallel/`: how ranks share the work."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Strategy(str, enum.Enum):
    none = "none"
    ddp = "ddp"
    fsdp = "fsdp"


@dataclass(kw_only=True, slots=True)
class ParallelConfig:
    strategy: Strategy = Strategy.ddp
    """ddp: every rank holds the model, gradients are averaged. none: one rank only. fsdp: FSDP2, each rank holds a part
    of weights, gradients and optimizer state; two ranks or more."""
    zero1: bool = False
    """ddp only: each rank holds and updates a part of the optimizer state (ZeRO stage 1); two ranks or more."""
    tensor_parallel: int = 1
    """Ranks that share each layer, ≥ 1; neighbours, so keep them on one node. It must divide world_size, and of gpt
    model.num_heads, model.embed_dim and the vocabulary. Models with a `tensor_parallel_plan` only."""
    pipeline_parallel: int = 1
    """Stages that the model's layers are divided among, ≥ 1; tensor_parallel × pipeline_parallel must divide
    world_size, and the quotient is the number of data-parallel ranks."""
    data_parallel_replicate: int = 1
    """fsdp only (HSDP): groups of ranks that each hold the whole model in parts, ≥ 1; as many as nodes keeps the
    gathering of weights inside a node. It must divide the data-parallel ranks, and leave two or more a group."""
    elastic: bool = False
    """The run may go on with another number of ranks: nodes, GPUs and cores are then no part of its identity. The last
    bits differ from the undisturbed run's, unless train.logical_ranks is set, which implies it."""
    timeout_s: int = 600
    """Seconds that a collective may take before the run fails, ≥ 1."""
