"""Program of test_sharded_ranks.py: Lion on each way to share weights out, told in FOLDER/KIND-RANK.json."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp
import torch.distributed.optim
import torch.distributed.tensor.parallel
from torch.distributed.tensor.debug import CommDebugMode

from hpc_trainer.config.schema.optim import LionConfig
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.checkpoint.objects import from_trees, to_trees
from hpc_trainer.training.checkpoint.store import CheckpointStore
from hpc_trainer.training.optim.build import set_learning_rate
from hpc_trainer.training.optim.skip import step_unless
from hpc_trainer.training.state import TrainState
from tests.unit.features.lion.lion_ways import KINDS
from tests.unit.training.built_parts import optimizer_of
from tests.unit.training.checkpoint.reshard_child import on_ranks
from tests.unit.training.optim.given_gradients import give_gradients, one_rank
from tests.unit.training.parallel import mesh_builders, shard_builders
from tests.unit.training.parallel.mesh_step_child import whole

LION = LionConfig(lr=0.01, weight_decay=0.1)


def build(kind: str, group: RankGroup, seed: int = 3) -> TrainState:
    state, _, _ = mesh_builders.build(kind, group, parallel=KINDS[kind][1], optim=LION, num_layers=2, seed=seed)
    state.more.clear()
    return state


def store_of(folder: Path, kind: str, group: RankGroup) -> CheckpointStore:
    return CheckpointStore(folder / f"saved-{kind}", group=group, keep_last=1, attempt=0)


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
    shared, own = to_trees(state.objects())
    store_of(folder, kind, group).save(3, replicated=shared, per_rank=own, meta={})
    saved = shard_builders.digests(state, group)["shared"]
    return {"differ": differ, "counts": counts, "num_momenta": len(kept), "num_weights": len(here), "saved": saved}


def load(kind: str, source: str, folder: Path, group: RankGroup) -> dict[str, str]:
    state = build(kind, group, seed=77)
    store = store_of(folder, source, group)
    info = store.newest_valid()
    assert info is not None
    store.load(info, partial(from_trees, state.objects(), is_same_world=False))
    found: dict[str, str] = shard_builders.digests(state, group)["shared"]
    return found


def main(folder: Path, kinds: list[str]) -> None:
    torch.set_num_threads(1)
    by_world: dict[int, list[str]] = {}
    for kind in kinds:
        by_world.setdefault(KINDS[kind][0], []).append(kind)

    def act(group: RankGroup) -> None:
        for kind in by_world[group.world_size]:
            (folder / f"{kind}-{group.rank}.json").write_text(json.dumps(steps(kind, folder, group)))

    def load_all(group: RankGroup) -> None:
        for kind in by_world[group.world_size]:
            found = {source: load(kind, source, folder, group) for source in kinds}
            if group.is_rank_zero:
                (folder / f"loaded-{kind}.json").write_text(json.dumps(found))

    for action in (act, load_all):
        for world_size in by_world:
            on_ranks(world_size, folder, action)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
