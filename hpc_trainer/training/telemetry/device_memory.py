"""The memory of one rank: how much there is, how much is held, what a pass takes, and how its end is told."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable
from typing import Protocol

import psutil
import torch

from hpc_trainer.config.schema.hardware import HardwareConfig
from hpc_trainer.errors import TooLargeError
from hpc_trainer.runtime.devices import kind_of

_GIB = 2**30  # what Slurm calls G
# What libraries say whose own allocations fail: not errors of a type of their own. The first is the CPU allocator's.
_WORDS = ("can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException | None) -> bool:
    """True if `error`, or what it was raised from, says that memory was not enough."""
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError, TooLargeError)):
            return True
        if isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS):
            return True
        error = error.__cause__
    return False


class MemoryProbe(Protocol):
    """What a rank's device says of its memory, in bytes. Nothing here is collective."""

    def limit(self) -> int:
        """What this rank may hold at most."""

    def held(self) -> int:
        """What it holds now."""

    def measure(self, run: Callable[[], None], kept: Callable[[], int]) -> int:
        """What `run` takes at its peak, besides what is held now.

        Args:
            run: a forward and a backward pass.
            kept: counts the same without memory, for devices that do not count themselves.

        Raises: what `run` raises.
        """

    def clear(self) -> None:
        """Gives back what nothing holds any more."""


class CudaMemory:
    """As torch's caching allocator counts: in the segments that it has reserved, fragments included."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def limit(self) -> int:
        """What is free, and what we have: other processes and the CUDA context are not ours to use."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return free + self.held()

    def held(self) -> int:
        """Reserved by the allocator."""
        return torch.cuda.memory_reserved(self._device)

    def measure(self, run: Callable[[], None], kept: Callable[[], int]) -> int:
        """By the allocator's own peak; waits for the device."""
        del kept
        before = self.held()
        torch.cuda.reset_peak_memory_stats(self._device)
        run()
        torch.cuda.synchronize(self._device)
        return max(0, torch.cuda.max_memory_reserved(self._device) - before)

    def clear(self) -> None:
        """Waits for the device. The peak is that of what comes."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)


class HostMemory:
    """A rank on the CPU: nobody counts a pass there, so it is counted on fake tensors; the limit is the profile's.

    Args:
        hardware: its memory for one rank, or else what the machine has free now, shared among its ranks.
    """

    def __init__(self, hardware: HardwareConfig) -> None:
        self._hardware = hardware

    def limit(self) -> int:
        """Of a profile without memory: what this machine has free, a share for each of its ranks."""
        given = profile_bytes(self._hardware)
        if given is not None:
            return given
        return self.held() + psutil.virtual_memory().available // self._hardware.ranks_per_node

    def held(self) -> int:
        """The resident set of this process, torch's libraries included."""
        return int(psutil.Process().memory_info().rss)

    def measure(self, run: Callable[[], None], kept: Callable[[], int]) -> int:
        """Counted before it runs: the kernel would end a process that took more than there is."""
        size = kept()
        if self.held() + size <= self.limit():
            run()
        return size

    def clear(self) -> None:
        """Collects cycles."""
        gc.collect()


def profile_bytes(hardware: HardwareConfig) -> int | None:
    """The host memory that the hardware profile gives one rank; None if it names none."""
    if hardware.mem_gb_per_node is not None:
        return int(hardware.mem_gb_per_node * _GIB) // hardware.ranks_per_node
    if hardware.mem_gb_per_cpu is not None:
        return int(hardware.mem_gb_per_cpu * hardware.cpus_per_rank * _GIB)
    return None if hardware.mem_gb_per_gpu is None else int(hardware.mem_gb_per_gpu * _GIB)


def probe_of(device: torch.device, hardware: HardwareConfig) -> MemoryProbe:
    """The probe of a rank's device."""
    return CudaMemory(device) if device.type == "cuda" else HostMemory(hardware)


def device_name(device: torch.device) -> str:
    """`NVIDIA A100-SXM4-40GB`, or `cpu`."""
    return device.type if device.type == "cpu" else kind_of(device).name(device)


def peak_rss() -> int:
    """The most host memory that this process has held, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
