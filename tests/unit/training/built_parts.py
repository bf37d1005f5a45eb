"""Parts of a run, built as the run itself builds them: with all features that their sections ask for."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from hpc_trainer.config.load import plain_value
from hpc_trainer.config.mesh import MeshShape
from hpc_trainer.config.schema.optim import OptimConfig
from hpc_trainer.config.schema.parallel import ParallelConfig
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.declarations import features
from hpc_trainer.tasks.cross_entropy import CrossEntropy
from hpc_trainer.training.ability import Ability, Building, abilities
from hpc_trainer.training.build import build_dataset, build_model, build_task, make_optimizer
from hpc_trainer.training.data.order import BatchSizes
from hpc_trainer.training.optim.build import Recipe
from hpc_trainer.training.parallel.mesh import Mesh
from tests.composed import composed

ALONE = Mesh(shape=MeshShape(), rank=0)


def with_first_weights(path: Path, words: Sequence[str]) -> list[str]:
    """Return `words` with a file of the model's own weights as `init_from.path`, if they name one."""
    others = [word for word in words if not word.startswith("init_from.path=")]
    if others == [*words]:
        return others
    config = composed([*others, "cluster=local"])
    torch.manual_seed(14)
    model = build_model(config, build_dataset(config, "train", build_task(config)))
    safetensors.torch.save_file(model.state_dict(), path)
    # Of a file nobody knows what it was trained on: the data themselves stand for the old ones.
    values = [f"{key}: {json.dumps(value)}" for key, value in plain_value(config.data).items() if value is not None]
    replayed = [f"replay.data=[{{{', '.join(values)}}}]"] if config.replay.share is not None else []
    return [*others, f"init_from.path={path}", *replayed]


def building_of(config: TrainConfig, mesh: Mesh = ALONE, **changes: Any) -> Building:
    """What hooks are given of a run whose data set does not matter; without what each run has to report of itself."""
    nobodys: Any = None
    settings: dict[str, Any] = {
        "device": torch.device("cpu"), "dataset": nobodys, "task": CrossEntropy(), "run": object(),
        "abilities": _chosen(config), "sizes": BatchSizes.given(config.train), **changes,
    }  # fmt: skip
    return Building(config=config, mesh=mesh, **settings)


def _chosen(config: TrainConfig) -> list[Ability]:
    always = {
        importlib.import_module(each.rank_half).ABILITY
        for each in features()
        if not each.on or (each.is_in_each_run and not each.is_on(config))
    }
    return [each for each in abilities(config) if type(each) not in always]


def optimizer_of(
    optim: OptimConfig, model: nn.Module, *, zero1: bool = False, mesh: Mesh = ALONE, trust: Sequence[str] = ()
) -> torch.optim.Optimizer:
    """Over the weights of `model` as they are now. Collective with ZeRO-1, or where they are in parts."""
    config = TrainConfig(optim=optim, parallel=ParallelConfig(zero1=zero1), trust=list(trust))
    building = building_of(config, mesh)
    for each in building.abilities:
        each.see_whole(model, building)
    return make_optimizer(building, model)


def place(optimizer: torch.optim.Optimizer, optim: OptimConfig) -> None:
    """Of an optimizer that is there already: it steps as `optim.in_backward` and `optim.offload` say."""
    building = building_of(TrainConfig(optim=optim))
    for each in building.abilities:
        recipe = each.around_optimizer(Recipe([], lambda groups: optimizer), nn.Identity(), building)
        recipe.make(recipe.groups)
