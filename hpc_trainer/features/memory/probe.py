"""Memory of a rank's device: the limit, the bytes held, and the peak of a pass."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Protocol

import psutil
import torch

from hpc_trainer.config.schema.cluster import HardwareConfig
from hpc_trainer.runtime.devices import profile_bytes


class MemoryProbe(Protocol):
    """Readings of the memory of a rank's device, in bytes. No method is collective."""

    counts: bool
    """True if the device counts a pass itself."""

    def limit(self) -> int:
        """Return the most bytes that this rank may hold."""

    def held(self) -> int:
        """Return the bytes that this rank holds now."""

    def measure(self, run: Callable[[], None], kept: Callable[[], int]) -> int:
        """Return the peak of `run` in bytes, above what is held now.

        Args:
            run: a forward and a backward pass.
            kept: estimates the same peak without memory, for devices that do not count themselves.

        Raises:
            Exception: whatever `run` raises.
        """

    def clear(self) -> None:
        """Release memory that nothing holds any more."""


class CudaMemory:
    """Counts of torch's caching allocator: the segments that it has reserved, fragments included."""

    counts = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def limit(self) -> int:
        """Return the free bytes and those of this rank; other processes and the CUDA context are left out."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return free + self.held()

    def held(self) -> int:
        """Return the bytes that the allocator has reserved."""
        return torch.cuda.memory_reserved(self._device)

    def measure(self, run: Callable[[], None], kept: Callable[[], int]) -> int:
        """Return the rise of the allocator's own peak; waits for the device."""
        del kept
        before = self.held()
        torch.cuda.reset_peak_memory_stats(self._device)
        run()
        torch.cuda.synchronize(self._device)
        return max(0, torch.cuda.max_memory_reserved(self._device) - before)

    def clear(self) -> None:
        """Release unused memory and reset the peak; waits for the device."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)


class HostMemory:
    """Memory of a rank on the CPU: no device counts a pass, so fake tensors do; the limit is the profile's.

    Args:
        hardware: profile whose memory for one rank is the limit. Without it, the machine's free memory is shared among
            its ranks.
    """

    counts = False

    def __init__(self, hardware: HardwareConfig) -> None:
        self._hardware = hardware

    def limit(self) -> int:
        """Return the profile's memory for a rank; without one, the bytes held and a rank's share of the free memory."""
        given = profile_bytes(self._hardware)
        if given is not None:
            return given
        return self.held() + psutil.virtual_memory().available // self._hardware.ranks_per_node

    def held(self) -> int:
        """Return the resident set of this process, torch's libraries included."""
        return int(psutil.Process().memory_info().rss)

    def measure(self, run: Callable[[], None], kept: Callable[[], int]) -> int:
        """Count the bytes before `run` runs: the kernel would end a process that took more than there is."""
        size = kept()
        if self.held() + size <= self.limit():
            run()
        return size

    def clear(self) -> None:
        """Collect reference cycles."""
        gc.collect()


def probe_of(device: torch.device, hardware: HardwareConfig) -> MemoryProbe:
    """Return the probe of a rank's device."""
    return CudaMemory(device) if device.type == "cuda" else HostMemory(hardware)
