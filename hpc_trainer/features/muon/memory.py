"""Bytes that Muon's step allocates, besides the gradients."""

from __future__ import annotations

import torch

from hpc_trainer.config.mesh import MeshShape
from hpc_trainer.config.schema.precision import Dtype
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.features.muon.muon import MuonWithAdamw
from hpc_trainer.features.muon.whole_matrices import num_flops, share_work
from hpc_trainer.runtime.rank_memory import RankMemory


def bytes_of_step(held: RankMemory, config: TrainConfig, shape: MeshShape) -> int:
    """Return the bytes of a step: weights as they were, for a skipped step; messages; the largest Newton-Schulz."""
    assert isinstance(held.optimizer, MuonWithAdamw)
    hidden: list[torch.Tensor] = [weight for group in held.optimizer.muon.param_groups for weight in group["params"]]
    here = held.shares.num_bytes(hidden) // (shape.world_size if config.parallel.zero1 else shape.dp_shard)
    num_ranks = shape.dp_shard * shape.tp
    may_skip = config.train.max_skipped_steps is not None or config.precision.compute_dtype is Dtype.fp16
    narrow = torch.bfloat16.itemsize
    # Two of these exist at a time: shards that are sent, matrices received, results that are sent back.
    dealt = [0] * num_ranks
    for rank, weight in zip(share_work([num_flops(weight.shape) for weight in hidden], num_ranks), hidden, strict=True):
        dealt[rank] += weight.numel()
    most = max(dealt)
    messages = narrow * (most + max(here // torch.float32.itemsize, most)) if num_ranks > 1 else 0
    # The matrix, the iterate and the next one; two products of rows by rows.
    products: int = max((3 * weight.numel() + 2 * min(weight.shape) ** 2 for weight in hidden), default=0)
    return here * may_skip + messages + narrow * products
