"""Rules of one step: sizes of the batch, the device mesh, and number formats (`precision/`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpc_trainer.config.batch import nearest_divisor, num_parts, whole_batch
from hpc_trainer.config.checks import LARGEST
from hpc_trainer.config.gpu_types import GpuType, find_gpu_type, peak_tflops
from hpc_trainer.config.schema.precision import Dtype
from hpc_trainer.config.schema.train import TrainConfig


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Samples of a batch and of a micro-batch, and micro-batches of a rank in a step; None if left open."""

    total: int
    micro: int | None
    accum: int | None

    @property
    def is_fixed(self) -> bool:
        return self.micro is not None and self.accum is not None

    def of_a_rank(self) -> int:
        """Return the number that a rank's share is a multiple of; the share itself if `is_fixed`."""
        return (self.micro or 1) * (self.accum or 1)

    def legal(self, count: int, most: int | None) -> _Sizes:
        """Return the nearest sizes for `count` ranks and `most` (≥ count) samples that break no rule."""
        total = self.total if most is None else min(self.total, most)
        share, micro, accum = max(1, total // count), self.micro, self.accum
        if micro is not None and micro > share:
            return _Sizes(share * count, share, accum if accum == 1 else None)
        if most is not None and self.of_a_rank() > most // count:
            accum = None
        kept = _Sizes(self.total, micro, accum)
        unit = count * kept.of_a_rank()
        nearest = unit if kept.is_fixed else max(unit, round(total / unit) * unit)
        if most is not None and nearest > most:
            nearest = most // unit * unit
        return _Sizes(nearest, micro, accum)

    def way_to(self, legal: _Sizes) -> str:
        """Return the overrides that lead to the sizes `legal`; if only the batch changes, its value without a key."""
        keys = {"global_batch_size": "total", "micro_batch_size": "micro", "grad_accum_steps": "accum"}
        values = {
            key: getattr(legal, name) for key, name in keys.items() if getattr(legal, name) != getattr(self, name)
        }
        if list(values) == ["global_batch_size"]:
            return str(legal.total)
        return " ".join(f"train.{key}={'null' if value is None else value}" for key, value in values.items())


def batch_problems(config: TrainConfig) -> Iterator[str]:
    """Yield each problem with `train.global_batch_size`, `micro_batch_size` and `grad_accum_steps`."""
    train, parts = config.train, num_parts(config.train, config.hardware, config.parallel)
    count = 1 if train.batch_per_rank else parts
    sizes = _Sizes(train.global_batch_size, train.given_micro_batch_size, train.grad_accum_steps)
    given = [size for size in (sizes.total, sizes.micro, sizes.accum) if size is not None]
    if min(given) < 1 or max(given) > LARGEST or parts < 1:
        return
    num_samples = max(0, config.data.num_train_samples() or 0)  # another rule reports 0
    if num_samples and num_samples < parts:
        yield (
            f"data={config.data.name} has {num_samples} training samples, and each of {parts} ranks takes one or more "
            f"in a step. Use hardware with at most {num_samples} ranks, or more samples."
        )
        return
    most = num_samples // (parts if train.batch_per_rank else 1) if num_samples else None
    way = sizes.way_to(sizes.legal(count, most))
    share = max(1, sizes.total // count)
    if sizes.micro is not None and sizes.micro > share:
        yield (
            f"train.micro_batch_size={sizes.micro} must be at most {share}, the samples that one rank takes of "
            f"train.global_batch_size={sizes.total}. Use {way}."
        )
    else:
        yield from _multiple(config, sizes, count, way)
    if num_samples and num_samples < whole_batch(train, config.hardware, config.parallel):
        factor = f" × {parts} ranks" if train.batch_per_rank else ""
        yield (
            f"train.global_batch_size={sizes.total}{factor} must be at most the {num_samples} training "
            f"samples of data={config.data.name}. Use {way}."
        )


def _multiple(config: TrainConfig, sizes: _Sizes, count: int, way: str) -> Iterator[str]:
    train, unit = config.train, count * sizes.of_a_rank()
    is_all = count == config.hardware.world_size
    called = "logical_ranks" if train.logical_ranks else "world_size" if is_all else "data-parallel ranks"
    if sizes.total % unit:
        parts = [f"{called}={count}" + ("" if train.logical_ranks else f" (hardware={config.hardware.name})")]
        parts = [] if train.batch_per_rank else parts
        parts += [] if sizes.micro is None else [f"train.micro_batch_size={sizes.micro}"]
        parts += [] if sizes.accum is None else [f"train.grad_accum_steps={sizes.accum}"]
        yield f"train.global_batch_size={sizes.total} must be a multiple of {' × '.join(parts)}. Use {way}."
    elif sizes.is_fixed and sizes.total != unit:
        yield (
            f"train.global_batch_size={sizes.total} must equal micro_batch_size={sizes.micro} × "
            f"grad_accum_steps={sizes.accum} × {called}={count} = {unit}. "
            f"Use {way}, or leave one of the three null."
        )


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
