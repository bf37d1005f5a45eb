"""`precision/`: the number formats of one step."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hpc_trainer.config.schema.key import ALWAYS, COUNTS, INCOMPATIBLE, SCHEDULE, key, only_with


class Dtype(str, enum.Enum):
    fp32 = "fp32"
    tf32 = "tf32"
    bf16 = "bf16"
    fp16 = "fp16"
    fp8 = "fp8"


@dataclass(kw_only=True, slots=True)
class PrecisionConfig:
    compute_dtype: Dtype = key(Dtype.fp32, ALWAYS, COUNTS, INCOMPATIBLE)
    """Format of matrix products and convolutions; weights and optimizer stay fp32. bf16 and fp16: autocast, fp16 with a
    GradScaler. tf32: fp32 whose factors have 10 bits of mantissa, on GPUs from Ampere on. fp8:
    bf16, and the products of large linear layers in 8 bits (torchao; a scale for each tensor, found at each step), on
    GPUs from Ada and Hopper on; for large transformers with `train.compile=true`."""
    init_scale: float = key(65_536.0, only_with("precision.compute_dtype=fp16"), COUNTS, SCHEDULE, limits="> 0")
    """First loss scale of the GradScaler; fp16 only."""
    growth_interval: int = key(2_000, only_with("precision.compute_dtype=fp16"), COUNTS, SCHEDULE, limits="≥ 1")
    """Steps without overflow before the scale doubles; fp16 only."""
