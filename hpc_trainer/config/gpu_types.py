"""Facts of GPUs by the names that sites give them in Slurm's gres: memory and compute capability.

Sources: NVIDIA's datasheets of each product, and the table "CUDA GPUs" of developer.nvidia.com.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuType:
    """`memory_gb`: of the products of that name, smallest first, in GB (10^9 bytes). `capability`, `minor`: version."""

    memory_gb: tuple[int, ...]
    capability: int
    minor: int = 0

    @property
    def has_fp8(self) -> bool:
        """True from Ada (8.9) and Hopper on."""
        return (self.capability, self.minor) >= (8, 9)


_TYPES: dict[str, GpuType] = {
    "b200": GpuType((180,), 10),
    "gh200": GpuType((96, 144), 9),
    "h200": GpuType((141,), 9),
    "h100": GpuType((80, 94), 9),
    "a100": GpuType((40, 80), 8),
    "a40": GpuType((48,), 8),
    "a30": GpuType((24,), 8),
    "a10": GpuType((24,), 8),
    "a16": GpuType((16,), 8),
    "a2": GpuType((16,), 8),
    "a6000": GpuType((48,), 8),
    "a5000": GpuType((24,), 8),
    "a4000": GpuType((16,), 8),
    "l40s": GpuType((48,), 8, 9),
    "l40": GpuType((48,), 8, 9),
    "l4": GpuType((24,), 8, 9),
    "rtx_4090": GpuType((24,), 8, 9),
    "rtx_3090": GpuType((24,), 8),
    "rtx_2080ti": GpuType((11,), 7),
    "v100": GpuType((16, 32), 7),
    "v100s": GpuType((32,), 7),
    "t4": GpuType((16,), 7),
    "p100": GpuType((12, 16), 6),
    "p40": GpuType((24,), 6),
    "k80": GpuType((12,), 3),
}


def find_gpu_type(name: str | None) -> GpuType | None:
    """The GPU that a gres name as `a100`, `nvidia_a100_80gb_pcie` or `V100-32` means; None if nobody knows.

    A size in the name picks the product; without one all sizes stay. A slice of a GPU (MIG) is none that we know.
    """
    if name is None or "mig" in name.lower() or re.search(r"\d+g\.\d+gb", name.lower()):
        return None
    plain = re.sub(r"[-\s]", "_", name.lower())
    words = plain.replace("rtx_a", "a").removeprefix("nvidia_").removeprefix("tesla_").removeprefix("geforce_")
    words = re.sub(r"^rtx_?(\d{4})_?(ti)?", r"rtx_\1\2", words)
    found = [key for key in _TYPES if words == key or words.startswith(f"{key}_")]
    if not found:
        return None
    gpu = _TYPES[max(found, key=len)]
    sizes = {int(number) for number in re.findall(r"\d+", plain)}
    known = tuple(size for size in gpu.memory_gb if size in sizes)
    return dataclasses.replace(gpu, memory_gb=known or gpu.memory_gb)
