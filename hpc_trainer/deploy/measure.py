"""Measurements of an exported model: its latency beside another model, its zeros, and proof of equal answers."""

from __future__ import annotations

import math
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hpc_trainer.errors import ConfigError
from hpc_trainer.runtime.machine import cpu

BATCHES = (1, 64)
_WARM_UP, _FEWEST, _MOST = 3, 5, 50
_BUDGET_S = 3.0


def latencies(models: Mapping[str, Callable[[torch.Tensor], Any]], inputs: torch.Tensor) -> dict[str, dict[str, Any]]:
    """Return the median, the quartiles (seconds) and the number of calls of each model, by batch size.

    The models take turns, so that other load of the machine affects all of them alike.
    """
    results: dict[str, dict[str, Any]] = {name: {} for name in models}
    for size in BATCHES:
        batch = inputs.repeat(-(-size // len(inputs)), *[1] * (inputs.ndim - 1))[:size].contiguous()
        times = _times(models, batch)
        for name, durations in times.items():
            low, middle, high = statistics.quantiles(durations, n=4, method="inclusive")
            results[name][str(size)] = {"median_s": middle, "low_s": low, "high_s": high, "n": len(durations)}
    return results


@torch.no_grad()
def _times(models: Mapping[str, Callable[[torch.Tensor], Any]], batch: torch.Tensor) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in models}
    begin = time.perf_counter()
    for turn in range(_WARM_UP + _MOST):
        is_late = time.perf_counter() - begin > _BUDGET_S
        if is_late and min(map(len, times.values())) >= _FEWEST:
            break
        is_warm = turn >= _WARM_UP or (is_late and turn > 0)
        # The models go first by turns: what a call leaves behind (caches, a used share of the cores) meets both alike.
        for name, model in sorted(models.items(), reverse=turn % 2 == 0):
            start = time.perf_counter()
            model(batch)
            if is_warm:
                times[name].append(time.perf_counter() - start)
    return times


def machine() -> dict[str, Any]:
    """Return facts about the machine of the measurement, without names of users or hosts."""
    processor = cpu()
    return {
        "processor": processor["model"] or platform.machine(), "num_cores": processor["count"],
        "num_threads": torch.get_num_threads(), "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }  # fmt: skip


def counts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the number of elements in all floating-point tensors, their bytes, and the share of zeros."""
    tensors = [tensor for tensor in state.values() if isinstance(tensor, torch.Tensor) and tensor.is_floating_point()]
    total = sum(tensor.numel() for tensor in tensors)
    zeros = sum(int((tensor == 0).sum()) for tensor in tensors)
    return {
        "num_numbers": total,
        "num_bytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        "sparsity": zeros / total if total else 0.0,
    }


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
