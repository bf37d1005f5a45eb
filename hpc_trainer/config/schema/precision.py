"""`precision/`: the number formats of one step."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from hpc_trainer.config.schema.key import ALWAYS, COUNTS, INCOMPATIBLE, SCHEDULE, key, only_with


class Dtype(str, enum.Enum):
    fp32 = "fp32"
    tf32 = "tf32"
    bf16 = "bf16"
    bf16_sr = "bf16_sr"
    fp16 = "fp16"
    fp8 = "fp8"


class Format(NamedTuple):
    """Formats of a precision that its name alone does not give."""

    products: str
    """Format of matrix products, as in the lists of GPUs' peak rates."""
    autocast: str | None = None
    """Format of autocast; None without autocast."""
    weight_bytes: int = 4
    """Bytes of each weight and of each gradient. Moments are fp32 in every precision."""


FORMATS = {
    Dtype.fp32: Format("fp32"),
    Dtype.tf32: Format("tf32"),
    Dtype.bf16: Format("bf16", autocast="bf16"),
    Dtype.bf16_sr: Format("bf16", autocast="bf16", weight_bytes=2),
    Dtype.fp16: Format("fp16", autocast="fp16"),
    Dtype.fp8: Format("fp8", autocast="bf16"),
}


@dataclass(kw_only=True, slots=True)
class PrecisionConfig:
    compute_dtype: Dtype = key(Dtype.fp32, ALWAYS, COUNTS, INCOMPATIBLE)
    """Format of matrix products and convolutions; weights and optimizer stay fp32. bf16 and fp16: autocast, fp16 with a
    GradScaler. bf16_sr: bf16, with weights and gradients in bf16 too and no copy in fp32; moments are fp32, and updates
    are computed in fp32 and rounded stochastically. tf32: fp32 whose factors have 10 bits of mantissa, on GPUs from
    Ampere on. fp8: bf16, with the products of large linear layers in 8 bits (torchao; a scale for each tensor, computed
    at each step), on GPUs from Ada and Hopper on; for large transformers with `train.compile=true`."""
    init_scale: float = key(65_536.0, only_with("precision.compute_dtype=fp16"), COUNTS, SCHEDULE, limits="> 0")
    """First loss scale of the GradScaler; fp16 only."""
    growth_interval: int = key(2_000, only_with("precision.compute_dtype=fp16"), COUNTS, SCHEDULE, limits="≥ 1")
    """Steps without overflow before the scale doubles; fp16 only."""

    @property
    def format(self) -> Format:
        return FORMATS[self.compute_dtype]
