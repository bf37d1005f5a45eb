"""What a rank's device says of its memory: how much there is, how much is held, what a pass takes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Protocol

import psutil
import torch

from hpc_trainer.config.schema.hardware import HardwareConfig
from hpc_trainer.runtime.device_memory import profile_bytes


class MemoryProbe(Protocol):
    """What a rank's device says of its memory, in bytes. Nothing here is collective."""

    counts: bool
    """True if the device counts a pass itself."""

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

    counts = True

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

    counts = False

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


def probe_of(device: torch.device, hardware: HardwareConfig) -> MemoryProbe:
    """The probe of a rank's device."""
    return CudaMemory(device) if device.type == "cuda" else HostMemory(hardware)
