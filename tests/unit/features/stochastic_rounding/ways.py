"""Ways to share weights or moments out that test_ranks.py plays."""

from __future__ import annotations

from hpc_trainer.config.schema.parallel import ParallelConfig, Strategy

# Name -> (ranks, how they share the work).
KINDS: dict[str, tuple[int, ParallelConfig]] = {
    "single": (1, ParallelConfig(strategy=Strategy.none)),
    "ddp2": (2, ParallelConfig()),
    "zero2": (2, ParallelConfig(zero1=True)),
    "fsdp2": (2, ParallelConfig(strategy=Strategy.fsdp)),
    "hsdp4": (4, ParallelConfig(strategy=Strategy.fsdp, data_parallel_replicate=2)),
}
