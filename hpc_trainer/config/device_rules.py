"""Rules of `hardware.device`: what a kind of device cannot do is said before anything waits in a queue."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_trainer.config.schema.hardware import Device
from hpc_trainer.config.schema.precision import Dtype
from hpc_trainer.config.schema.train import TrainConfig

_SINGLE = (Device.mps, Device.xla)
"""One rank each: torch has no collectives for MPS, and those of XLA are begun by a launcher of its own."""
_WIDE = (Dtype.fp32, Dtype.bf16)


def device_problems(config: TrainConfig) -> Iterator[str]:
    """What it breaks, a line each."""
    hardware, train = config.hardware, config.train
    device = hardware.device
    if device not in _SINGLE:
        return
    where = f"hardware.device={device.value}"
    if hardware.gpus_per_node:
        yield f"{where} is no CUDA device, and hardware.gpus_per_node={hardware.gpus_per_node} asks for those. Use 0."
    if hardware.world_size > 1:
        yield (
            f"{where} is for one rank, and hardware={hardware.name} has {hardware.world_size}. Use "
            "hardware.num_nodes=1 hardware.tasks_per_node=1, or GPUs (hardware.device=auto)."
        )
    if config.precision.compute_dtype not in _WIDE:
        yield f"{where} knows fp32 and bf16, not precision={config.precision.compute_dtype.value}. Use precision=bf16."
    if train.is_batch_auto:
        yield (
            f"{where} counts no memory, so train.micro_batch_size=auto cannot see what fits. Use a number, as "
            f"train.micro_batch_size={train.global_batch_size}."
        )
    if config.optim.offload:
        yield f"{where}: optim.offload=true keeps the optimizer's state beside a CUDA device alone. Use false."
