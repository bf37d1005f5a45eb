"""Storage of gradients at the beginning of a backward pass, according to the configuration."""

from __future__ import annotations

from hpc_trainer.config.schema.parallel import Strategy
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.choice import holds


def averages_gradients(config: TrainConfig) -> bool:
    """Return False if ranks step alone from the first step on: DDP's buckets would only waste memory."""
    return not holds(config, "parallel.sync") or holds(config, "parallel.sync_warmup_steps")


def has_buckets(config: TrainConfig) -> bool:
    """Return True if gradients lie in DDP's buckets, which exist from the first step to the last."""
    is_ddp = config.parallel.strategy is Strategy.ddp and config.hardware.world_size > 1
    return is_ddp and averages_gradients(config)


def holds_gradients(config: TrainConfig, grad_accum_steps: int | None) -> bool:
    """Return True if gradients exist before a micro-batch's backward pass makes them.

    They lie in DDP's buckets, or earlier micro-batches added them up.
    """
    return has_buckets(config) or grad_accum_steps != 1 or bool(config.train.logical_ranks)
