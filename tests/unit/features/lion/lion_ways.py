"""Ways to share weights or moments out that test_sharded_ranks.py plays."""

from __future__ import annotations

from hpc_trainer.config.schema.parallel import ParallelConfig, Strategy
from tests.unit.training.parallel import mesh_builders

# Name -> (ranks, how they share the work).
KINDS: dict[str, tuple[int, ParallelConfig]] = {
    **mesh_builders.KINDS,
    "zero2": (2, ParallelConfig(zero1=True)),
    "fsdp2": (2, ParallelConfig(strategy=Strategy.fsdp)),
}
