"""Names that sites give GPUs lead to their memory."""

from __future__ import annotations

import pytest

from hpc_trainer.config.gpu_types import find_gpu_type, peak_tflops


@pytest.mark.parametrize(
    ("name", "memory_gb"),
    [
        ("a100", (40, 80)), ("A100", (40, 80)), ("nvidia_a100_80gb_pcie", (80,)), ("a100-40g", (40,)),
        ("a100_80", (80,)), ("a100-sxm4-80gb", (80,)), ("NVIDIA-A100-SXM4-40GB", (40,)), ("v100-32", (32,)),
        ("V100_16GB", (16,)), ("v100s", (32,)), ("tesla_t4", (16,)), ("h200", (141,)), ("h100", (80, 94)),
        ("h100_94gb", (94,)), ("gh200", (96, 144)), ("nvidia_h100_80gb_hbm3", (80,)), ("rtx_a6000", (48,)),
        ("a4000", (16,)), ("l40s", (48,)), ("l4", (24,)), ("nvidia_geforce_rtx_3090", (24,)), ("rtx2080ti", (11,)),
        ("nvidia_geforce_rtx_2080_ti", (11,)),
        ("p100", (12, 16)),
    ],
)  # fmt: skip
def test_known(name: str, memory_gb: tuple[int, ...]) -> None:
    found = find_gpu_type(name)
    assert found is not None
    assert found.memory_gb == memory_gb


@pytest.mark.parametrize("name", [None, "", "gpu", "mi250x", "a100_1g.5gb", "a100-mig-1g", "a1000", "b2000", "x_a100"])
def test_what_nobody_knows_is_none(name: str | None) -> None:
    assert find_gpu_type(name) is None


def test_which_have_fp8() -> None:
    """Ada and Hopper and what came later; NVIDIA's table of compute capabilities."""
    names = ("h100", "nvidia_h200", "gh200", "b200", "l4", "L40S", "rtx4090", "a100", "a40", "rtx3090", "v100")
    have = [name for name in names if (gpu := find_gpu_type(name)) is not None and gpu.has_fp8]
    assert have == ["h100", "nvidia_h200", "gh200", "b200", "l4", "L40S", "rtx4090"]


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA H200", "bf16", 989.4), ("NVIDIA H100 80GB HBM3", "fp16", 989.4), ("NVIDIA H100 PCIe", "bf16", 756),
        ("h100", "tf32", 494.7), ("nvidia_h100_nvl", "bf16", 835.5), ("NVIDIA A100-SXM4-40GB", "bf16", 312),
        ("NVIDIA A100-PCIE-40GB", "tf32", 156), ("a100", "fp32", 19.5), ("Tesla V100-PCIE-16GB", "fp16", 112),
        ("V100-32", "fp32", 15.7), ("NVIDIA GeForce RTX 4090", "bf16", 165.2), ("NVIDIA RTX A6000", "bf16", 154.8),
        # Pascal to Turing have no units for these formats.
        ("v100", "bf16", None), ("t4", "tf32", None), ("p40", "fp16", None),
        ("mi250x", "bf16", None), (None, "bf16", None), ("a100_1g.5gb", "bf16", None), ("a100", "fp8", None),
        ("k80", "fp32", None),
    ],
)  # fmt: skip
def test_peaks_are_dense_and_those_of_the_board(name: str | None, dtype: str, tflops: float | None) -> None:
    assert peak_tflops(name, dtype) == tflops
