"""Division of a batch among ranks, or among logical ranks, in micro-batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from hpc_trainer.config.mesh import num_data_ranks

if TYPE_CHECKING:  # features that declare keys of these sections use this file
    from hpc_trainer.config.schema.hardware import HardwareConfig
    from hpc_trainer.config.schema.parallel import ParallelConfig
    from hpc_trainer.config.schema.train import LoopConfig


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
