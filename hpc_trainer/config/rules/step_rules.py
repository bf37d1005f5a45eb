"""Rules of the format that a step computes in: `precision/`."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_trainer.config.gpu_types import GpuType, find_gpu_type, peak_tflops
from hpc_trainer.config.schema.precision import Dtype
from hpc_trainer.config.schema.train import TrainConfig

# NVIDIA's CUDA C++ Programming Guide, "Compute Capabilities": TF32 and BF16 units came with 8.0.
_AMPERE = 8
# Half precision came with 5.3, but with no server GPU before Pascal, 6.0 (the same source).
_PASCAL = 6
_LARGEST_SCALE = 2.0**127


def step_problems(config: TrainConfig) -> Iterator[str]:
    """Yield each problem with the precision."""
    dtype, hardware = config.precision.compute_dtype, config.hardware
    if dtype is Dtype.fp16 and config.precision.init_scale < 1:
        yield f"precision.init_scale={config.precision.init_scale:g} must be at least 1 for fp16. Use 65536."
    if dtype is Dtype.fp16 and _LARGEST_SCALE < config.precision.init_scale < float("inf"):
        yield (
            f"precision.init_scale={config.precision.init_scale:g} must be at most {_LARGEST_SCALE:g}: the scale is a "
            "number in fp32. Use 65536, as is usual."
        )
    gpu = find_gpu_type(hardware.gpu_type)
    if dtype is Dtype.fp8:
        yield from _fp8(config)
    if config.precision.format.products in ("tf32", "bf16") and gpu is not None and gpu.capability < _AMPERE:
        other = "fp32" if dtype is Dtype.tf32 else _half_of(gpu, hardware.gpu_type)
        yield (
            f"precision={dtype.value} needs a GPU from Ampere on (compute capability 8.0), and "
            f"hardware.gpu_type={hardware.gpu_type} is older. Use precision={other}."
        )
    if dtype is Dtype.fp16 and gpu is not None and _half_of(gpu, hardware.gpu_type) == "fp32":
        yield (
            f"precision=fp16 needs a GPU that computes in it faster than in fp32 (Pascal's P100, or Volta and later), "
            f"and hardware.gpu_type={hardware.gpu_type} does not. Use precision=fp32."
        )


def _half_of(gpu: GpuType, name: str | None) -> str:
    """Return the two-byte format that suits a GPU; fp32 if none does."""
    if gpu.capability >= _AMPERE:
        return "bf16"
    return "fp32" if gpu.capability < _PASCAL or peak_tflops(name, "fp16") is None else "fp16"


def _fp8(config: TrainConfig) -> Iterator[str]:
    hardware, gpu = config.hardware, find_gpu_type(config.hardware.gpu_type)
    if gpu is not None and not gpu.has_fp8 and hardware.device_type != "cpu":
        yield (
            "precision=fp8 needs a GPU from Ada or Hopper on (compute capability 8.9), and hardware.gpu_type="
            f"{hardware.gpu_type} is older. Use precision={_half_of(gpu, hardware.gpu_type)}."
        )
