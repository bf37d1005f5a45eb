"""Number formats of a step: autocast around the forward pass, and the loss scaler that fp16 needs."""

from __future__ import annotations

import contextlib

import torch

from hpc_trainer.config.schema.parallel import Dtype, PrecisionConfig

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def set_precision(precision: PrecisionConfig) -> None:
    """Set TF32 on or off for the whole process; without this, convolutions on GPUs use TF32 for fp32."""
    is_tf32 = precision.compute_dtype is Dtype.tf32
    torch.backends.cuda.matmul.allow_tf32 = is_tf32
    torch.backends.cudnn.allow_tf32 = is_tf32


def autocast(precision: PrecisionConfig, device_type: str) -> contextlib.AbstractContextManager[None]:
    """Return the context of a forward pass on `device_type` (cpu or cuda); it does nothing for fp32 and tf32."""
    wanted = precision.format.autocast
    return contextlib.nullcontext() if wanted is None else torch.autocast(device_type, dtype=_AUTOCAST[wanted])


def build_scaler(precision: PrecisionConfig, device_type: str) -> torch.amp.GradScaler:
    """Build the loss scaler; it is enabled for fp16 only, because fp16 gradients below 6e-8 are zero.

    bf16 has the exponents of fp32 and needs no scaler. Works on the CPU and on CUDA.
    """
    return torch.amp.GradScaler(
        device_type,
        init_scale=precision.init_scale,
        growth_interval=precision.growth_interval,
        enabled=precision.compute_dtype is Dtype.fp16,
    )
