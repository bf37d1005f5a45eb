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

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # features that declare keys of these sections use this file
    from hpc_trainer.config.schema.cluster import HardwareConfig
    from hpc_trainer.config.schema.parallel import ParallelConfig
    from hpc_trainer.config.schema.train import LoopConfig, TrainConfig

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

    If the sizes do not divide each other (a problem that `mesh_problems` reports), the grid leaves out the remainder.
    """
    pp, tp = max(1, parallel.pipeline_parallel), max(1, parallel.tensor_parallel)
    num_data_ranks = max(1, world_size // (pp * tp))
    is_fsdp = parallel.strategy.value == "fsdp"
    replicate = max(1, parallel.data_parallel_replicate) if is_fsdp else num_data_ranks
    return MeshShape(pp=pp, dp_replicate=replicate, dp_shard=max(1, num_data_ranks // replicate), tp=tp)


def num_data_ranks(parallel: ParallelConfig, hardware: HardwareConfig) -> int:
    """Return the number of data-parallel ranks: world_size / (tensor_parallel × pipeline_parallel), rounded down."""
    return hardware.world_size // (max(1, parallel.tensor_parallel) * max(1, parallel.pipeline_parallel))


def num_parts(train: LoopConfig, hardware: HardwareConfig, parallel: ParallelConfig) -> int:
    """Return the number of parallel parts of a batch: logical ranks, else data-parallel ranks; 0 if there are none."""
    return train.logical_ranks or num_data_ranks(parallel, hardware)


def whole_batch(train: LoopConfig, hardware: HardwareConfig, parallel: ParallelConfig) -> int:
    """Return the samples of one step over all ranks."""
    return train.global_batch_size * (num_parts(train, hardware, parallel) if train.batch_per_rank else 1)


def accum_steps(train: LoopConfig, hardware: HardwareConfig, parallel: ParallelConfig) -> int:
    """Return the micro-batches of a step: `grad_accum_steps` if set, else as many as the micro-batch size needs.

    The result is 1 if neither is set, or if the micro-batch size or the number of parts is below 1. The result says
    nothing about a micro-batch of `auto`, whose size only the run can find.
    """
    if train.grad_accum_steps is not None:
        return train.grad_accum_steps
    parts, micro = num_parts(train, hardware, parallel), train.given_micro_batch_size
    if micro is None or min(parts, micro) < 1:
        return 1
    return whole_batch(train, hardware, parallel) // (micro * parts)


def with_batch(train: LoopConfig, hardware: HardwareConfig, parallel: ParallelConfig) -> LoopConfig:
    """Return `train` with `micro_batch_size` and `grad_accum_steps` filled in.

    Their product with the number of parts is the global batch. `batch_per_rank` is applied and cleared: a run is the
    same run, however its batch was specified. A micro-batch of `auto` stays `auto`: only the run can find its size.
    """
    total = whole_batch(train, hardware, parallel)
    if train.is_batch_auto:
        return dataclasses.replace(train, global_batch_size=total, batch_per_rank=False)
    accum = accum_steps(train, hardware, parallel)
    micro = total // (accum * num_parts(train, hardware, parallel))
    return dataclasses.replace(
        train, global_batch_size=total, batch_per_rank=False, micro_batch_size=micro, grad_accum_steps=accum
    )


def divisors(count: int) -> list[int]:
    """Return every size that divides `count` samples (≥ 1) into equal parts, in ascending order."""
    small = [size for size in range(1, int(count**0.5) + 1) if count % size == 0]
    return sorted({*small, *(count // size for size in small)})


def nearest_divisor(total: int, wanted: int, fits: Callable[[int], bool] = lambda count: True) -> int:
    """Return the divisor of `total` (≥ 1) nearest to `wanted` that `fits` accepts.

    Of two equally near divisors it is the smaller one; it is 1 if none fits.
    """
    return min(filter(fits, divisors(total)), key=lambda count: (abs(count - wanted), count), default=1)


def averages_gradients(config: TrainConfig) -> bool:
    """Return False if ranks step alone from the first step on: DDP's buckets would only waste memory."""
    from hpc_trainer.config.table.choice import holds  # late: it needs all sections

    return not holds(config, "parallel.sync") or holds(config, "parallel.sync_warmup_steps")


def has_buckets(config: TrainConfig) -> bool:
    """Return True if gradients are in DDP's buckets, which exist from the first step to the last."""
    is_ddp = config.parallel.strategy.value == "ddp" and config.hardware.world_size > 1
    return is_ddp and averages_gradients(config)


def holds_gradients(config: TrainConfig, grad_accum_steps: int | None) -> bool:
    """Return True if gradients exist before a micro-batch's backward pass makes them.

    They are in DDP's buckets, or earlier micro-batches added them up.
    """
    return has_buckets(config) or grad_accum_steps != 1 or bool(config.train.logical_ranks)
