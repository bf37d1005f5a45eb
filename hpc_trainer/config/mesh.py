"""Ranks as a grid: pipeline stages, data-parallel groups, tensor-parallel neighbours. Arithmetic only, no torch.

Dimensions have the names that torchtitan's users know, the slowest first:

    pp             pipeline stages                       parallel.pipeline_parallel
    dp_replicate   copies of the model                   data-parallel ranks with ddp; data_parallel_replicate with fsdp
    dp_shard       ranks that share one sharded copy    the rest of the data-parallel ranks with fsdp; else 1
    tp             ranks that share each layer           parallel.tensor_parallel

    rank = ((pp × dp_replicate + r) × dp_shard + s) × tp + t

So tensor-parallel ranks are neighbours, and share a node if tp divides the ranks of a node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # features that declare keys of these sections use this file
    from hpc_trainer.config.schema.hardware import HardwareConfig
    from hpc_trainer.config.schema.parallel import ParallelConfig

DIMS = ("pp", "dp_replicate", "dp_shard", "tp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Place of a rank: its stage, its index among data-parallel ranks, its index in its tensor-parallel group."""

    pp: int = 0
    data: int = 0
    tp: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """Number of ranks along each dimension, ≥ 1."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1

    @property
    def num_data_ranks(self) -> int:
        """Number of ranks that read different samples: the parts of a batch."""
        return self.dp_replicate * self.dp_shard

    @property
    def model_size(self) -> int:
        """Number of ranks that share one copy of the model and read the same samples: tensor × pipeline parallel."""
        return self.pp * self.tp

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return self.num_data_ranks * self.model_size

    def place(self, rank: int) -> Place:
        """Return the place of a rank, 0 to world_size - 1."""
        rest, tp = divmod(rank, self.tp)
        pp, data = divmod(rest, self.num_data_ranks)
        return Place(pp=pp, data=data, tp=tp)

    def stream(self, rank: int) -> int | str:
        """Return the key that a rank's random numbers add to `seed` (training/rng.py): the only seed rule.

        Tensor-parallel neighbours draw the same numbers, as they hold the same activations; other data-parallel ranks
        and other stages draw their own.
        """
        place = self.place(rank)
        return place.data if not place.pp else f"{place.data} stage {place.pp}"


def mesh_shape(parallel: ParallelConfig, world_size: int) -> MeshShape:
    """Return the grid that `parallel` makes of `world_size` ranks.

    If the sizes do not divide each other (a problem that `mesh_rules` reports), the grid leaves out the remainder.
    """
    pp, tp = max(1, parallel.pipeline_parallel), max(1, parallel.tensor_parallel)
    num_data_ranks = max(1, world_size // (pp * tp))
    is_fsdp = parallel.strategy.value == "fsdp"
    replicate = max(1, parallel.data_parallel_replicate) if is_fsdp else num_data_ranks
    return MeshShape(pp=pp, dp_replicate=replicate, dp_shard=max(1, num_data_ranks // replicate), tp=tp)


def num_data_ranks(parallel: ParallelConfig, hardware: HardwareConfig) -> int:
    """Return the number of data-parallel ranks: world_size / (tensor_parallel × pipeline_parallel), rounded down."""
    return hardware.world_size // (max(1, parallel.tensor_parallel) * max(1, parallel.pipeline_parallel))
