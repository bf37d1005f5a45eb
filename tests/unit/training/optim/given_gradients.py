"""Given gradients on any mesh, and the one rank that has all of the weights."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpc_trainer.models.gpt import Gpt
from hpc_trainer.runtime.tensors import is_sharded
from hpc_trainer.training.checkpoint.trees import local_box
from hpc_trainer.training.state import TrainState
from tests.unit.training.parallel import mesh_builders, shard_builders
from tests.unit.training.parallel.mesh_step_child import whole


def give_gradients(model: nn.Module, seed: int, value: float | None = None, dtype: torch.dtype = torch.float32) -> None:
    """The same on any mesh, of each weight this rank's part."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        gradient = torch.randn(weight.shape, generator=generator).to(dtype)
        if value is not None:
            gradient.view(-1)[-1] = value
        if is_sharded(weight):
            box = local_box(weight)
            where = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.lengths, strict=True))
            gradient = DTensor.from_local(
                gradient[where].clone(), weight.device_mesh, weight.placements, shape=weight.shape,
                stride=weight.stride(), run_check=False,
            )  # type: ignore[no-untyped-call]  # fmt: skip
        weight.grad = gradient if weight.requires_grad else None


def one_rank(state: TrainState) -> nn.Module:
    """The same weights, whole, on each rank by itself."""
    if isinstance(state.model, Gpt):
        sizes = mesh_builders.sizes_of(num_layers=2)
        model: nn.Module = Gpt(sizes, input_shape=(mesh_builders.SEQ_LEN,), num_classes=mesh_builders.VOCABULARY)
    else:
        model = shard_builders.Hard(has_norm=False)
    with torch.no_grad():
        for name, weight in state.model.named_parameters():
            model.get_parameter(name).copy_(whole(weight))
    return model
