"""Measurement of the parts of a run's model in a process of its own, for the ranks that cut it.

python -m hpc_trainer.features.pipeline.measure < questions.jsonl    a line of JSON for each (runtime/own_process.py)
"""

from __future__ import annotations

from typing import Any

import torch

from hpc_trainer.config.load import from_plain
from hpc_trainer.config.mesh import mesh_shape
from hpc_trainer.features.pipeline.cut import Between, measure
from hpc_trainer.runtime.own_process import answer_each
from hpc_trainer.training.ability import Building, abilities
from hpc_trainer.training.build import build_model, build_task
from hpc_trainer.training.data.batches import StandIn
from hpc_trainer.training.parallel.fully_sharded import gathered_dtype
from hpc_trainer.training.parallel.mesh import Mesh


def main() -> None:
    """Answer questions about the parts of a model, a line each.

    A question is {"config": .., "samples": a `StandIn`, "inputs": .., "device_type": ..}. Its answer is {"costs": of
    each part, "ends": the tensor that each hands on}, or {"error": ..}.
    """
    answer_each(_answer)


def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    config, dataset = from_plain(asked["config"]), StandIn.from_plain(asked["samples"])
    mesh = Mesh(shape=mesh_shape(config.parallel, config.hardware.world_size), rank=0)
    building = Building(
        config=config, device=torch.device("cpu"), task=build_task(config), dataset=dataset, mesh=mesh,
        abilities=abilities(config),
    )  # fmt: skip
    for ability in building.abilities:
        ability.begin(mesh, None)
    model = build_model(config, dataset)
    for ability in building.abilities:
        ability.see_whole(model, building)
    measured = measure(
        model, inputs=Between.from_plain(asked["inputs"]), precision=config.precision,
        device_type=asked["device_type"], param_dtype=gathered_dtype(config.parallel),
    )  # fmt: skip
    return measured.to_plain()


if __name__ == "__main__":
    main()
