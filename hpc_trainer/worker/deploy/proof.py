"""Proof, on validation samples, that a file gives the model's own outputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from hpc_trainer.errors import ConfigError

NUM_SAMPLES = 64
SAME = 1e-4
"""Largest difference for a file that holds the same numbers, as a share of the largest output: kernels differ."""
QUANTIZED = {"int8": 0.05, "dynamic_int8": 0.1, "int4": 0.3}
"""Largest difference for a file with fewer bits, from the original in fp32, as a share of the largest output."""


@torch.no_grad()
def compare(
    file: Callable[[torch.Tensor], Any], model: Callable[[torch.Tensor], Any], inputs: torch.Tensor, share: float,
    what: str,
) -> dict[str, Any]:  # fmt: skip
    """Return the difference of the outputs of `file` and `model`, on a batch of all inputs and one of the first input.

    Args:
        share: largest difference that is allowed, as a share of the largest output.
        what: name of the file, for messages.

    Raises:
        ConfigError: the difference is larger, the shapes differ, or an output is no number.
    """
    pairs = [(file(batch), model(batch)) for batch in (inputs, inputs[:1])]
    for found, wanted in pairs:
        if not isinstance(wanted, torch.Tensor):
            raise ConfigError(
                f"{what}: the model returns a {type(wanted).__name__}, and its answers are compared as one tensor. Let "
                "forward return one, or use --to safetensors --no-measure."
            )
        if not isinstance(found, torch.Tensor) or found.shape != wanted.shape:
            raise ConfigError(f"{what} gives outputs of another shape than the model. Nothing was written.")
        if not bool(wanted.isfinite().all()):
            raise ConfigError(
                f"{what}: the model's outputs on validation samples are not all finite, so nothing can be compared. "
                "Export another checkpoint: --best, or --step."
            )
    largest = max(float(wanted.abs().max()) for _, wanted in pairs)
    differences = [float((found.double() - wanted.double()).abs().max()) for found, wanted in pairs]
    difference = float("inf") if any(map(math.isnan, differences)) else max(differences)
    tolerance = share * max(largest, torch.finfo(torch.float32).tiny)
    if not difference <= tolerance:
        raise ConfigError(
            f"{what} differs from the model by up to {difference:.3g} on {len(inputs)} validation samples, and may by "
            f"{tolerance:.3g}, {share:g} of the largest output. Nothing was written. Use another --to or --quantize"
            f"{', or allow more by --tolerance' if share != SAME else ''}."
        )
    return {
        "num_samples": len(inputs), "max_abs_difference": difference, "tolerance": tolerance, "largest_output": largest
    }  # fmt: skip
