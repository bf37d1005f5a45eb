"""Program of test_reshard_ranks.py: four ranks save tensors on meshes of two dimensions, and load them on others."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.checkpoint.objects import from_trees, to_trees
from hpc_trainer.training.checkpoint.store import CheckpointStore
from tests.unit.training.checkpoint.reshard_child import on_ranks

SHAPES = [(7, 5), (1, 3), (9, 4, 2), (2, 0), (4, 4), (3, 11)]
LAYOUTS = {
    "hsdp": (Replicate(), Shard(0)),
    "tensor_parallel": (Shard(0), Shard(1)),
    "same_dimension": (Shard(0), Shard(0)),
    "copies": (Replicate(), Replicate()),
    "mixed": (Shard(1), Replicate()),
}


def value(shape: tuple[int, ...], factor: float) -> torch.Tensor:
    return factor * torch.arange(1.0, 1.0 + torch.Size(shape).numel()).reshape(shape)


def placed(mesh: DeviceMesh, layout: str, factor: float) -> dict[str, DTensor]:
    return {
        f"{index}": distribute_tensor(value(shape, factor), mesh, LAYOUTS[layout]) for index, shape in enumerate(SHAPES)
    }


def layouts(folder: Path, group: RankGroup) -> int:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    cells = 0
    for source in LAYOUTS:
        store = CheckpointStore(folder / source, group=group, keep_last=1, attempt=0)
        shared, own = to_trees(placed(mesh, source, 1.0))
        path = store.save(1, replicated=shared, per_rank=own, meta={})
        manifest = json.loads((path / "manifest.json").read_text())
        assert sorted(manifest["sharded"]) == [str(index) for index in range(len(SHAPES))]
        info = store.newest_valid()
        assert info is not None
        for goal in LAYOUTS:
            here = placed(mesh, goal, -1.0)
            store.load(info, partial(from_trees, here))
            for index, shape in enumerate(SHAPES):
                assert torch.equal(here[str(index)].full_tensor(), value(shape, 1.0)), (source, goal, shape)
                cells += 1
        whole = {str(index): value(shape, -1.0) for index, shape in enumerate(SHAPES)}
        store.load(info, partial(from_trees, whole))
        assert all(torch.equal(whole[str(index)], value(shape, 1.0)) for index, shape in enumerate(SHAPES))
    return cells


def two_layers(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 7))


def fsdp_over_tensor_parallel(folder: Path, group: RankGroup) -> None:
    """Strided shards: tensor parallel cuts a dimension first, FSDP cuts the parts again."""

    def parallel(seed: int) -> nn.Module:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = parallelize_module(two_layers(seed), mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        return model

    store = CheckpointStore(folder / "both", group=group, keep_last=1, attempt=0)
    model = parallel(1)
    assert any("Strided" in str(weight.placements) for weight in model.parameters() if isinstance(weight, DTensor))
    shared, own = to_trees({"model": model})
    store.save(1, replicated=shared, per_rank=own, meta={})
    info = store.newest_valid()
    assert info is not None
    plain, again, fsdp = two_layers(2), parallel(3), two_layers(4)
    fully_shard(fsdp, mesh=init_device_mesh("cpu", (4,)))
    for goal in (plain, again, fsdp):
        store.load(info, partial(from_trees, {"model": goal}))
    for name, expected in two_layers(1).named_parameters():
        assert torch.equal(plain.get_parameter(name), expected), name
        for goal in (again, fsdp):
            weight = goal.get_parameter(name)
            assert isinstance(weight, DTensor)
            assert torch.equal(weight.full_tensor(), expected), name


def main(folder: Path) -> None:
    torch.set_num_threads(1)

    def all_of_it(group: RankGroup) -> None:
        cells = layouts(folder, group)
        fsdp_over_tensor_parallel(folder, group)
        if group.is_rank_zero:
            (folder / "said.json").write_text(json.dumps({"cells": cells}))

    on_ranks(4, folder, all_of_it)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
