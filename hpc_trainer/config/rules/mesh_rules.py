"""Rules of the device mesh: how tensor, pipeline and data parallelism divide the ranks."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_trainer.config.batch import nearest_divisor
from hpc_trainer.config.schema.train import TrainConfig

_LARGEST = 2**20
"""Limit that the keys declare."""


def mesh_problems(config: TrainConfig) -> Iterator[str]:
    """Yield each problem with `tensor_parallel`, `pipeline_parallel` and `data_parallel_replicate`."""
    parallel, hardware = config.parallel, config.hardware
    tp, pp = parallel.tensor_parallel, parallel.pipeline_parallel
    if min(tp, pp) < 1 or max(tp, pp) > _LARGEST or hardware.world_size < 1:
        return
    if hardware.world_size % (tp * pp):
        product = f"parallel.tensor_parallel={tp}" + (f" × parallel.pipeline_parallel={pp}" if pp > 1 else "")
        if tp == 1:
            product = f"parallel.pipeline_parallel={pp}"
        key, other = ("tensor_parallel", pp) if tp > 1 else ("pipeline_parallel", 1)
        room = hardware.world_size // other if hardware.world_size % other == 0 else 1
        yield (
            f"{product} must divide world_size={hardware.world_size} (hardware={hardware.name}). "
            f"Use parallel.{key}={nearest_divisor(room, getattr(parallel, key))}, or hardware with "
            f"{-(-hardware.world_size // (tp * pp)) * tp * pp} ranks."
        )
