"""How a batch is divided: among ranks, or among logical ranks; and the rules of the keys that go with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from hpc_trainer.config.mesh import num_data_ranks
from hpc_trainer.config.schema.hardware import HardwareConfig
from hpc_trainer.config.schema.parallel import ParallelConfig, Strategy
from hpc_trainer.config.schema.train import LoopConfig, TrainConfig

_LARGEST = 2**20


def num_parts(train: LoopConfig, hardware: HardwareConfig, parallel: ParallelConfig) -> int:
    """Parts of a batch that are computed side by side: logical ranks, else data-parallel ranks; 0 if there are none."""
    return train.logical_ranks or num_data_ranks(parallel, hardware)


def whole_batch(train: LoopConfig, hardware: HardwareConfig, parallel: ParallelConfig) -> int:
    """Samples of a step over all ranks."""
    return train.global_batch_size * (num_parts(train, hardware, parallel) if train.batch_per_rank else 1)


def accum_steps(train: LoopConfig, hardware: HardwareConfig, parallel: ParallelConfig) -> int:
    """Micro-batches of a step: as said, or as many as the micro-batch needs; 1 if neither is said, or is below 1.

    Not of a micro-batch of `auto`: only the run can tell.
    """
    if train.grad_accum_steps is not None:
        return train.grad_accum_steps
    parts, micro = num_parts(train, hardware, parallel), train.given_micro_batch_size
    if micro is None or min(parts, micro) < 1:
        return 1
    return whole_batch(train, hardware, parallel) // (micro * parts)


def with_batch(train: LoopConfig, hardware: HardwareConfig, parallel: ParallelConfig) -> LoopConfig:
    """With micro_batch_size and grad_accum_steps: their product with the number of parts is the global batch.

    `batch_per_rank` has had its effect then: a run is the same run, whichever way its batch was said. A micro-batch of
    `auto` stays as it is: only the run can tell.
    """
    total = whole_batch(train, hardware, parallel)
    if train.is_batch_auto:
        return dataclasses.replace(train, global_batch_size=total, batch_per_rank=False)
    accum = accum_steps(train, hardware, parallel)
    micro = total // (accum * num_parts(train, hardware, parallel))
    return dataclasses.replace(
        train, global_batch_size=total, batch_per_rank=False, micro_batch_size=micro, grad_accum_steps=accum
    )


def rank_problems(config: TrainConfig) -> Iterator[str]:
    """What `train.logical_ranks` and `train.early_stop` break, a line each."""
    train = config.train
    if train.early_stop.patience is not None and not 1 <= train.early_stop.patience <= _LARGEST:
        yield f"train.early_stop.patience={train.early_stop.patience} must be 1 to {_LARGEST}. Use 3."
    if train.early_stop.patience is not None and train.eval_every_steps == 0:
        yield (
            f"train.early_stop.patience={train.early_stop.patience} counts evaluations, and train.eval_every_steps=0 "
            f"evaluates at the end only. Use train.eval_every_steps={max(1, train.num_steps // 10)}."
        )
    if train.batch_per_rank and (train.logical_ranks is not None or config.parallel.elastic):
        key = "parallel.elastic=true" if train.logical_ranks is None else f"train.logical_ranks={train.logical_ranks}"
        yield (
            f"train.batch_per_rank=true makes the batch follow the ranks, and {key} keeps the training the same on any "
            f"number of them. Use train.batch_per_rank=false, or {key.partition('=')[0]}="
            f"{'false' if train.logical_ranks is None else 'null'}."
        )
    if train.logical_ranks is not None:
        yield from _logical_problems(config, train.logical_ranks)


def _logical_problems(config: TrainConfig, count: int) -> Iterator[str]:
    world_size = config.hardware.world_size
    if not (1 <= count <= _LARGEST and _is_power_of_two(count)):
        yield f"train.logical_ranks={count} must be a power of two, at most {_LARGEST}. Use {_power_near(count)}."
        return
    if world_size < 1:
        return
    if not _is_power_of_two(world_size):
        yield (
            f"hardware={config.hardware.name} has {world_size} ranks, and train.logical_ranks={count} is divided among "
            f"1, 2, 4, .. ranks. Use hardware with {_power_near(world_size)}."
        )
    elif world_size > count:
        yield (
            f"train.logical_ranks={count} must be at least world_size={world_size} (hardware={config.hardware.name}). "
            f"Use {world_size}."
        )
    if config.parallel.strategy is Strategy.fsdp or config.parallel.zero1:
        yield (
            f"train.logical_ranks={count} needs the whole model and optimizer on each rank. Use parallel=ddp "
            "parallel.zero1=false."
        )
    if not config.train.deterministic:
        yield "train.logical_ranks needs train.deterministic=true: other kernels give other bits each time."
    if config.train.main is not None:
        yield (
            f"train.logical_ranks={count} is a way of the shared loop, and train.main={config.train.main} is your own. "
            "Use train.logical_ranks=null; parallel.elastic=true lets the number of ranks change."
        )


def _is_power_of_two(value: int) -> bool:
    return value >= 1 and value & (value - 1) == 0


def _power_near(value: int) -> int:
    return min(_LARGEST, 1 << (max(1, value).bit_length() - 1))
