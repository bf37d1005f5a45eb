"""Memory of one rank: the size by the hardware profile, and the recognition of out-of-memory errors."""

from __future__ import annotations

import torch

from hpc_trainer.config.schema.hardware import HardwareConfig
from hpc_trainer.errors import TooLargeError
from hpc_trainer.runtime.devices import kind_of

_GIB = 2**30  # what Slurm calls G
# Messages of libraries whose own allocations fail, with no error type of their own. The first is the CPU allocator's.
_WORDS = ("can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if `error`, or an error that it was raised from, says that memory was not enough."""
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError, TooLargeError)):
            return True
        if isinstance(error, RuntimeError) and any(message in str(error) for message in _WORDS):
            return True
        error = error.__cause__
    return False


def profile_bytes(hardware: HardwareConfig) -> int | None:
    """Return the bytes of host memory that the hardware profile gives one rank; None if the profile names none."""
    if hardware.mem_gb_per_node is not None:
        return int(hardware.mem_gb_per_node * _GIB) // hardware.ranks_per_node
    if hardware.mem_gb_per_cpu is not None:
        return int(hardware.mem_gb_per_cpu * hardware.cpus_per_rank * _GIB)
    return None if hardware.mem_gb_per_gpu is None else int(hardware.mem_gb_per_gpu * _GIB)


def device_name(device: torch.device) -> str:
    """Return the name of a device: `NVIDIA A100-SXM4-40GB`, or `cpu`."""
    return device.type if device.type == "cpu" else kind_of(device).name(device)
