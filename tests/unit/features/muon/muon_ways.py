"""Ways to share weights or moments out that test_sharded_ranks.py plays."""

from __future__ import annotations

from hpc_trainer.config.schema.optim import MuonConfig
from hpc_trainer.config.schema.parallel import ParallelConfig, Strategy
from tests.unit.training.parallel import mesh_builders

FSDP = ParallelConfig(strategy=Strategy.fsdp)
# Name -> (ranks, how they share the work).
KINDS: dict[str, tuple[int, ParallelConfig]] = {
    **mesh_builders.KINDS,
    "zero2": (2, ParallelConfig(zero1=True)),
    "zero4": (4, ParallelConfig(zero1=True)),
    "fsdp2": (2, FSDP),
    "fsdp4": (4, FSDP),
}
MUON = MuonConfig(lr=0.01, adamw_lr=0.004, weight_decay=0.1)
