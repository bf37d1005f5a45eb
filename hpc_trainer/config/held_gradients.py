"""Where gradients lie when a backward pass begins, by the configuration."""

from __future__ import annotations

from hpc_trainer.config.schema.parallel import Strategy, Sync
from hpc_trainer.config.schema.train import TrainConfig


def averages_gradients(config: TrainConfig) -> bool:
    """False of ranks that step alone from the first step on: DDP's buckets would be memory for nothing."""
    return config.parallel.sync is Sync.every_step or config.parallel.sync_warmup_steps > 0


def has_buckets(config: TrainConfig) -> bool:
    """True if gradients lie in DDP's buckets, which are there from the first step to the last."""
    is_ddp = config.parallel.strategy is Strategy.ddp and config.hardware.world_size > 1
    return is_ddp and averages_gradients(config)


def holds_gradients(config: TrainConfig, grad_accum_steps: int | None) -> bool:
    """True if gradients are there before a micro-batch's backward pass makes them: in buckets, or added up by earlier
    micro-batches.
    """
    return has_buckets(config) or grad_accum_steps != 1 or bool(config.train.logical_ranks)
