"""How much faster a model is without half of its channels: a forward pass beside the dense one's, in turn.

On one thread, by that thread's own clock: what else the machine does takes none of its time.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

from hpc_trainer.config.schema.model import CnnConfig, GptConfig, MobilenetV3Config, ResnetConfig, VitConfig
from hpc_trainer.models.channels import groups_of, shrink, tensors_of
from hpc_trainer.models.cnn import Cnn
from hpc_trainer.models.gpt import Gpt
from hpc_trainer.models.mobilenet_v3 import MobilenetV3
from hpc_trainer.models.resnet import Resnet
from hpc_trainer.models.vit import Vit

SECONDS = 4.0
"""Of each pair of models at each batch size."""
MODELS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "cnn of the digits, 8x8": (Cnn(CnnConfig(), input_shape=(1, 8, 8), num_classes=10), (1, 8, 8)),
    "mobilenet_v3_small, 64x64": (
        MobilenetV3(MobilenetV3Config(), input_shape=(3, 64, 64), num_classes=10),
        (3, 64, 64),
    ),
    "vit, 6 blocks of 192, 32x32": (
        Vit(VitConfig(num_layers=6, embed_dim=192, num_heads=6, patch_size=4), input_shape=(3, 32, 32), num_classes=10),
        (3, 32, 32),
    ),
    "gpt, 6 blocks of 192, 128 tokens": (
        Gpt(GptConfig(num_layers=6, embed_dim=192, num_heads=6), input_shape=(128,), num_classes=256),
        (128,),
    ),
    "resnet18, 32x32": (Resnet(ResnetConfig(), input_shape=(3, 32, 32), num_classes=10), (3, 32, 32)),
}


def half(model: nn.Module) -> nn.Module:
    """Without half the units of each group of channels; which ones makes no difference to the time."""
    with torch.no_grad():
        for group in groups_of(model):
            for weight in tensors_of(model, group).values():
                weight[: group.num_units // 2 * group.unit] = 0.0
    return shrink(model)


def latencies(models: list[nn.Module], inputs: torch.Tensor) -> list[list[float]]:
    """Times of forward passes of each, ms; in turn, so that what the caches hold meets them alike."""
    times: list[list[float]] = [[] for _ in models]
    end = time.thread_time() + SECONDS
    with torch.inference_mode():
        for model in models * 2:
            model(inputs)
        while time.thread_time() < end or len(times[0]) < 10:
            for each, model in zip(times, models, strict=True):
                begin = time.thread_time()
                model(inputs)
                each.append(1e3 * (time.thread_time() - begin))
    return times


def run() -> None:
    """Prints a table."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    print("\nHalf of the channels gone, one thread's own time; median of a forward pass (10th to 90th percentile)\n")
    print("| model | batch | weights | dense, ms | smaller, ms | ratio | n |")
    print("|---|---|---|---|---|---|---|")
    for name, (model, shape) in MODELS.items():
        dense = model.eval()
        smaller = half(dense).eval()
        counts = [sum(map(torch.numel, each.parameters())) for each in (dense, smaller)]
        for size in (1, 64):
            inputs = torch.randn(size, *shape) if len(shape) > 1 else torch.randint(0, 256, (size, *shape))
            found = latencies([dense, smaller], inputs)
            medians = [statistics.median(each) for each in found]
            cells = []
            for each, median in zip(found, medians, strict=True):
                cuts = statistics.quantiles(each, n=10)
                cells.append(f"{median:.3f} ({cuts[0]:.3f} to {cuts[-1]:.3f})")
            print(f"| {name} | {size} | {counts[0]:,} to {counts[1]:,} | {cells[0]} | {cells[1]} "
                  f"| {medians[0] / medians[1]:.2f} | {len(found[0])} |", flush=True)  # fmt: skip
    torch.set_num_threads(before)


if __name__ == "__main__":
    run()
