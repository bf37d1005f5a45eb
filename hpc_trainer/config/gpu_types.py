"""Facts about GPUs by the names that sites give them in Slurm's gres: memory, compute capability, peak rates.

Sources: NVIDIA's datasheets of each product, as each row says for its peaks, and the table "CUDA GPUs" of
developer.nvidia.com. If a datasheet gives only a figure "with sparsity", the row holds half of it.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

Peaks = tuple[float | None, float | None, float]


@dataclass(frozen=True, slots=True)
class GpuType:
    memory_gb: tuple[int, ...]
    """Memory of the products with this name in GB (10^9 bytes), the smallest first."""
    compute_capability: tuple[int, int]
    peaks: Peaks | None = None
    """Dense peaks in TFLOP/s: fp16 and bf16 with fp32 sums, tf32, fp32 outside the tensor cores; None without such a
    unit."""

    @property
    def capability(self) -> int:
        return self.compute_capability[0]

    @property
    def has_fp8(self) -> bool:
        """True from Ada (8.9) and Hopper on."""
        return self.compute_capability >= (8, 9)


_TYPES: dict[str, GpuType] = {
    "b200": GpuType((180,), (10, 0), (2250, 1125, 75)),  # HGX B200 datasheet, an eighth of the board's
    "gh200": GpuType((96, 144), (9, 0), (989.4, 494.7, 66.9)),  # GH200 datasheet, the H100 part
    "h200": GpuType((141,), (9, 0), (989.4, 494.7, 66.9)),  # H200 datasheet (SXM): 1,979 and 989 with sparsity, 67
    "h100": GpuType((80, 94), (9, 0), (989.4, 494.7, 66.9)),  # H100 white paper, table 1 (SXM5)
    "a100": GpuType((40, 80), (8, 0), (312, 156, 19.5)),  # A100 datasheet
    "a40": GpuType((48,), (8, 6), (149.7, 74.8, 37.4)),  # A40 datasheet
    "a30": GpuType((24,), (8, 0), (165, 82, 10.3)),  # A30 datasheet
    "a10": GpuType((24,), (8, 6), (125, 62.5, 31.2)),  # A10 datasheet
    "a16": GpuType((16,), (8, 6), (17.9, 9, 4.5)),  # A16 datasheet, one of its four GPUs
    "a2": GpuType((16,), (8, 6), (18, 9, 4.5)),  # A2 datasheet
    "a6000": GpuType((48,), (8, 6), (154.8, 77.4, 38.7)),  # RTX A6000 datasheet: 309.7 with sparsity
    "a5000": GpuType((24,), (8, 6), (111.1, 55.6, 27.8)),  # RTX A5000 datasheet: 222.2 with sparsity
    "a4000": GpuType((16,), (8, 6), (76.7, 38.3, 19.2)),  # RTX A4000 datasheet: 153.4 with sparsity
    "l40s": GpuType((48,), (8, 9), (362, 183, 91.6)),  # L40S datasheet
    "l40": GpuType((48,), (8, 9), (181, 90.5, 90.5)),  # L40 datasheet
    "l4": GpuType((24,), (8, 9), (121, 60, 30.3)),  # L4 datasheet: 242 and 120 with sparsity
    "rtx_4090": GpuType((24,), (8, 9), (165.2, 82.6, 82.6)),  # Ada white paper, appendix A
    "rtx_3090": GpuType((24,), (8, 6), (71, 35.6, 35.6)),  # GA102 white paper, appendix A
    "rtx_2080ti": GpuType((11,), (7, 5), (53.8, None, 13.4)),  # Turing white paper, appendix A
    "v100": GpuType((16, 32), (7, 0), (125, None, 15.7)),  # V100 datasheet (SXM2)
    "v100s": GpuType((32,), (7, 0), (130, None, 16.4)),  # V100S datasheet
    "t4": GpuType((16,), (7, 5), (65, None, 8.1)),  # T4 datasheet
    "p100": GpuType((12, 16), (6, 0), (21.2, None, 10.6)),  # P100 datasheet (SXM2)
    "p40": GpuType((24,), (6, 1), (None, None, 12)),  # P40 datasheet; its fp16 is a 64th of that
    "k80": GpuType((12,), (3, 7)),
}
# Slower boards of the same name.
_BOARDS: dict[str, Peaks] = {
    "h200_nvl": (835.5, 417.5, 60),  # H200 datasheet (NVL): 1,671 and 835 with sparsity
    "h100_nvl": (835.5, 417.5, 60),  # H100 datasheet (NVL): 1,671 and 835 with sparsity
    "h100_pcie": (756, 378, 51),  # H100 datasheet (PCIe): 1,513 and 756 with sparsity
    "v100_pcie": (112, None, 14),  # V100 datasheet (PCIe)
    "p100_pcie": (18.7, None, 9.3),  # P100 datasheet (PCIe)
}


def find_gpu_type(name: str | None) -> GpuType | None:
    """Return the GPU that a gres name such as `a100`, `nvidia_a100_80gb_pcie` or `V100-32` means; None if unknown.

    A size in the name picks the product; without a size all sizes stay. A slice of a GPU (MIG) is unknown.
    """
    key = _key_of(name)
    if key is None:
        return None
    gpu = _TYPES[key]
    sizes = {int(number) for number in re.findall(r"\d+", _plain(name or ""))}
    sizes_gb = tuple(size for size in gpu.memory_gb if size in sizes)
    return dataclasses.replace(gpu, memory_gb=sizes_gb or gpu.memory_gb)


def peak_tflops(name: str | None, dtype: str) -> float | None:
    """Return the dense peak of a GPU in TFLOP/s, for products of `fp32`, `tf32`, `bf16` or `fp16`; None if unknown.

    `name` is as in `find_gpu_type`, or as CUDA reports it ("NVIDIA H100 PCIe"). A name without a board means the
    fastest board (SXM), so figures computed from the peak are too low rather than too high.
    """
    key = _key_of(name)
    if key is None:
        return None
    name_parts = _plain(name or "").split("_")
    boards = (_BOARDS.get(f"{key}_{word}") for word in ("pcie", "nvl") if word in name_parts)
    peaks = next(filter(None, boards), _TYPES[key].peaks)
    if peaks is None:
        return None
    half, tf32, fp32 = peaks
    return {"bf16": half if tf32 else None, "fp16": half, "tf32": tf32, "fp32": fp32}.get(dtype)


def _plain(name: str) -> str:
    return re.sub(r"[-\s]", "_", name.lower())


def _key_of(name: str | None) -> str | None:
    if name is None or "mig" in name.lower() or re.search(r"\d+g\.\d+gb", name.lower()):
        return None
    plain_name = (
        _plain(name).removeprefix("nvidia_").removeprefix("tesla_").removeprefix("geforce_").replace("rtx_a", "a")
    )
    plain_name = re.sub(r"^rtx_?(\d{4})_?(ti)?", r"rtx_\1\2", plain_name)
    matches = [key for key in _TYPES if plain_name == key or plain_name.startswith(f"{key}_")]
    return max(matches, key=len) if matches else None
