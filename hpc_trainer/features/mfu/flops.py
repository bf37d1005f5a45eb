"""Floating-point operations of a sample, counted once on tensors without content; and the peak of a GPU.

    python -m hpc_trainer.features.mfu.flops < questions.jsonl    a line of JSON for each (runtime/own_process.py)

MFU (model FLOPs utilization) is Chowdhery et al. 2022, "PaLM", appendix B: the operations that the model needs, forward
and backward, over what the GPUs could do in that time. Recomputed operations (`train.recompute`) do not count.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from hpc_trainer.config.gpu_types import peak_tflops
from hpc_trainer.config.load import from_plain
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.runtime.fake_tensors import build_fake, fake_tensors
from hpc_trainer.runtime.own_process import answer_each
from hpc_trainer.tasks.protocol import Task
from hpc_trainer.training.ability import abilities
from hpc_trainer.training.build import build_dataset, build_model, build_task
from hpc_trainer.training.data.batches import StandIn, of_size, without_content
from hpc_trainer.training.rng import random_state_kept

# Batch norm refuses a batch of one.
BATCH = 2


@random_state_kept()
def flops_per_sample(build: Callable[[], nn.Module], task: Task, example: Callable[[int], Any]) -> float:
    """Count the operations of one sample, forward and backward; a multiplication with its addition is two.

    Counted are matrix products, convolutions and attention (torch.utils.flop_counter), which tensor cores do. Causal
    attention counts as the whole square, as in PaLM. A model with a method `flops_per_sample()` gives its own figure.
    It takes a second or some, and mostly no memory; it draws no random number that the training would miss.

    Args:
        build: makes the model, without recomputing and sharding.
        task: task that the model is trained for.
        example: makes a batch of the given number of samples; only its shapes and formats count.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    real = example(BATCH)
    with fake_tensors(), torch.device("cpu"):
        model = build_fake(build)
        own: Any = getattr(model, "flops_per_sample", None)
        if callable(own):
            return float(own())
        batch = without_content(real)
        # The counter does not know the CPU's fused attention; it counts plain products.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            loss: Any = task.loss(model, batch)
            loss.backward()
        return float(counter.get_total_flops()) / BATCH


def peak_flops(config: TrainConfig, device: torch.device) -> float | None:
    """Return the dense peak of this rank's GPU for `precision=`, FLOP/s; None on a CPU or for an unknown GPU.

    The name that CUDA reports is looked up first, then that of the hardware profile.
    """
    if device.type != "cuda":
        return None
    dtype = config.precision.format.products
    names = (torch.cuda.get_device_name(device), config.hardware.gpu_type)
    peaks = (peak_tflops(name, dtype) for name in names)
    peak = next((value for value in peaks if value is not None), None)
    return None if peak is None else peak * 1e12


def main() -> None:
    """Answer {"config": .., "samples": a `StandIn` or null} with {"flops": of one sample}, or {"error": ..}."""
    answer_each(_answer)


def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    config, samples = from_plain(asked["config"]), asked["samples"]
    task = build_task(config)
    dataset = StandIn.from_plain(samples) if samples else build_dataset(config, "train", task, abilities(config))
    example = partial(of_size, dataset, task, dataset.__getitems__(range(1)))
    return {"flops": flops_per_sample(partial(build_model, config, dataset), task, example)}


if __name__ == "__main__":
    main()
