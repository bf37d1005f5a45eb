"""Floating-point operations of a sample, counted once on tensors that have shapes and no content; and what a GPU could.

    python -m hpc_trainer.features.mfu.flops < questions.jsonl    a line of JSON for each (runtime/own_process.py)

MFU (model FLOPs utilization) is Chowdhery et al. 2022, "PaLM", appendix B: the operations that the model needs, forward
and backward, over what the GPUs could do in that time. What is computed again (`train.recompute`) does not count.
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
from hpc_trainer.datasets.batch_trees import of_size, without_content
from hpc_trainer.datasets.stand_in import StandIn
from hpc_trainer.runtime.fake_tensors import build_fake, fake_tensors
from hpc_trainer.runtime.own_process import answer_each
from hpc_trainer.tasks.protocol import Task
from hpc_trainer.training.build import build_dataset, build_model, build_task
from hpc_trainer.training.hooks import abilities
from hpc_trainer.training.rng import random_state_kept

# Batch norm refuses a batch of one.
BATCH = 2


@random_state_kept()
def flops_per_sample(build: Callable[[], nn.Module], task: Task, example: Callable[[int], Any]) -> float:
    """Operations of one sample, forward and backward; a multiplication with its addition is two.

    Those of matrix products, convolutions and attention (torch.utils.flop_counter), which tensor cores do; of causal
    attention the whole square, as PaLM counts it. A model that has `flops_per_sample()` is asked for its own figure.
    Takes a second or some, and mostly no memory; draws no random number that the training would miss.

    Args:
        build: makes the model, as it is without recomputing and sharding.
        task: what the model is trained for.
        example: makes a batch of so many samples; only its shapes and formats count.
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
        # The counter does not know the CPU's fused attention; as plain products it does.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            loss: Any = task.loss(model, batch)
            loss.backward()
        return float(counter.get_total_flops()) / BATCH


def peak_flops(config: TrainConfig, device: torch.device) -> float | None:
    """Dense peak of this rank's GPU for `precision=`, FLOP/s; None on a CPU, and where nobody knows the GPU.

    The name that CUDA gives counts, else the one of the hardware profile.
    """
    if device.type != "cuda":
        return None
    dtype = config.precision.format.products
    names = (torch.cuda.get_device_name(device), config.hardware.gpu_type)
    found = (peak_tflops(name, dtype) for name in names)
    peak = next((each for each in found if each is not None), None)
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
