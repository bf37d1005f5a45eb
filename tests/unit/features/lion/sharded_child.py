"""Program of test_sharded_ranks.py: Lion on each way to share weights out, told in FOLDER/KIND-RANK.json."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp
import torch.distributed.optim
import torch.distributed.tensor.parallel
from torch.distributed.tensor.debug import CommDebugMode

from hpc_trainer.config.schema.optim import LionConfig
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.optim.build import set_learning_rate, step_unless
from hpc_trainer.training.state import TrainState
from tests.unit.features.lion.lion_ways import KINDS
from tests.unit.features.optimizer_checks import load, play, save
from tests.unit.training.built_parts import optimizer_of
from tests.unit.training.optim.given_gradients import give_gradients, one_rank
from tests.unit.training.parallel import mesh_builders, shard_builders
from tests.unit.training.parallel.mesh_step_child import whole

LION = LionConfig(lr=0.01, weight_decay=0.1)


def build(kind: str, group: RankGroup, seed: int = 3) -> TrainState:
    state, _, _ = mesh_builders.build(kind, group, parallel=KINDS[kind][1], optim=LION, num_layers=2, seed=seed)
    state.more.clear()
    return state


def steps(kind: str, folder: Path, group: RankGroup) -> dict[str, Any]:
    """Given gradients, bad ones before the second: what differs from one rank, what is sent; then a save."""
    state = build(kind, group)
    model = one_rank(state)
    alone, optimizer = optimizer_of(LION, model), state.optimizer
    counts = []
    for step, rate in enumerate((0.02, 0.01, 0.005)):
        give_gradients(model, step)
        set_learning_rate(alone, rate)
        set_learning_rate(optimizer, rate)
        alone.step()
        if step == 1:
            give_gradients(state.model, 77, float("nan"))
            step_unless(optimizer, torch.tensor(True))
        give_gradients(state.model, step)
        with CommDebugMode() as told:
            step_unless(optimizer, torch.tensor(False))
        counts.append(told.get_total_counts())
    here, momenta = dict(state.model.named_parameters()), getattr(optimizer, "optim", optimizer).state
    differ = [name for name, weight in model.named_parameters() if not torch.equal(weight, whole(here[name]))]
    kept = [name for name in here if "exp_avg" in momenta.get(here[name], {})]
    differ += [
        f"momentum of {name}"
        for name in kept
        if not torch.equal(whole(momenta[here[name]]["exp_avg"]), alone.state[model.get_parameter(name)]["exp_avg"])
    ]
    save(state, 3, folder, kind, group)
    saved = shard_builders.digests(state, group)["shared"]
    return {"differ": differ, "counts": counts, "num_momenta": len(kept), "num_weights": len(here), "saved": saved}


def loaded(kind: str, source: str, folder: Path, group: RankGroup) -> dict[str, str]:
    state = build(kind, group, seed=77)
    load(state, folder, source, group)
    found: dict[str, str] = shard_builders.digests(state, group)["shared"]
    return found


def main(folder: Path, kinds: list[str]) -> None:
    play(
        folder,
        kinds,
        KINDS,
        lambda kind, group: steps(kind, folder, group),
        lambda kind, source, group: loaded(kind, source, folder, group),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
