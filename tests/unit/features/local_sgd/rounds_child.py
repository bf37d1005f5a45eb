"""Program of test_rounds.py: one of two ranks that step alone and meet every so often; it says what it saw."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from hpc_trainer.config.schema.optim import SgdConfig
from hpc_trainer.config.schema.parallel import ParallelConfig, PrecisionConfig
from hpc_trainer.config.schema.train import LoopConfig, TrainConfig
from hpc_trainer.errors import CheckpointError, DivergedError
from hpc_trainer.features.local_sgd import Sync
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.tasks.cross_entropy import CrossEntropy
from hpc_trainer.training.checkpoint.objects import from_trees, to_trees
from hpc_trainer.training.optim.build import build_optimizer
from hpc_trainer.training.parallel.mesh import build_mesh
from hpc_trainer.training.parallel.share import StopVote, VotingLoss, share
from hpc_trainer.training.state import StepGuard, TrainState
from hpc_trainer.training.step import Stepper, build_scaler
from tests.unit.training.built_parts import building_of
from tests.unit.training.parallel.shard_builders import start_group
from tests.unit.training.rank_end import leave
from tests.unit.training.step_builders import batches_of

NUM_STEPS = 10
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
WAYS = {
    "ddp": ParallelConfig(),
    "post_local": ParallelConfig(sync=Sync.post_local_sgd, sync_every_steps=4),
    "diloco": ParallelConfig(sync=Sync.diloco, sync_every_steps=4, outer_lr=OUTER_LR, outer_momentum=OUTER_MOMENTUM),
    "warm": ParallelConfig(sync=Sync.post_local_sgd, sync_every_steps=4, sync_warmup_steps=4),
    "each": ParallelConfig(sync=Sync.post_local_sgd, sync_every_steps=1),
}


def model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 5))


def build(parallel: ParallelConfig, group: RankGroup, *, momentum: float = 0.9) -> tuple[TrainState, Stepper]:
    config = TrainConfig(parallel=parallel, train=LoopConfig(num_steps=NUM_STEPS))
    loss, precision = VotingLoss(model(), CrossEntropy()), PrecisionConfig()
    mesh = build_mesh(parallel, group)
    state = TrainState(
        model=loss.model, scaler=build_scaler(precision, "cpu"), guard=StepGuard(1),
        optimizer=build_optimizer(SgdConfig(lr=0.1, momentum=momentum, nesterov=momentum > 0), loss.model),
    )  # fmt: skip
    building = building_of(config, mesh, run=SimpleNamespace(group=group))
    module: nn.Module | None = None
    make: Callable[..., Stepper] = Stepper
    for each in building.abilities:
        module, make = each.share(loss, building), each.stepper(make, state, building)
    stepper = make(
        module=module or share(loss, group, mesh, parallel, deterministic=True), vote=StopVote(loss, group),
        precision=precision, device=group.device, grad_accum_steps=2, max_grad_norm=None,
    )  # fmt: skip
    return state, stepper


def weights_of(state: TrainState) -> list[float]:
    tensors = [*state.model.parameters(), *(each for each in state.model.buffers() if each.is_floating_point())]
    return torch.cat([each.detach().flatten() for each in tensors]).tolist()


def play(way: str, group: RankGroup, *, wish: int | None = None, momentum: float = 0.9) -> dict[str, Any]:
    """Weights and buffers after each step, and the votes."""
    state, stepper = build(WAYS[way], group, momentum=momentum)
    data = batches_of(rank=group.rank, world_size=group.world_size, grad_accum_steps=2, num_steps=NUM_STEPS)
    said: dict[str, Any] = {"weights": [], "stops": [], "kinds": []}
    for step in range(NUM_STEPS):
        result = stepper.step(state, data, lr=0.1, wish_to_stop=group.rank == 1 and step == wish)
        state.step += 1
        said["weights"].append(weights_of(state))
        said["stops"].append(result.should_stop)
        said["kinds"].append(type(stepper.module).__name__)
    return said


def counts(group: RankGroup) -> list[int]:
    """All-reduces of each of eight steps: the vote of each, and where ranks meet one message more."""
    state, stepper = build(WAYS["diloco"], group)
    data = batches_of(rank=group.rank, world_size=group.world_size, grad_accum_steps=2, num_steps=NUM_STEPS)
    found = []
    for _ in range(8):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            stepper.step(state, data, lr=0.1, wish_to_stop=False)
        state.step += 1
        found.append(sum(event.name.startswith("c10d::") for event in seen.events()))
    return found


def state_of_its_own(group: RankGroup) -> dict[str, Any]:
    state, stepper = build(WAYS["diloco"], group)
    data = batches_of(rank=group.rank, world_size=group.world_size, grad_accum_steps=2, num_steps=NUM_STEPS)
    for _ in range(6):
        stepper.step(state, data, lr=0.1, wish_to_stop=False)
        state.step += 1
    shared, own = to_trees(state.objects())
    other, _ = build(WAYS["diloco"], group)
    try:
        from_trees(other.objects(), shared, own, is_same_world=False)
        refused = ""
    except CheckpointError as error:
        refused = str(error)
    from_trees(other.objects(), shared, own)
    return {
        "shared": sorted(shared), "own": sorted(own), "refused": refused,
        "own_model": sorted(own["model"]), "same": weights_of(other) == weights_of(state),
        "outer": sorted(shared["outer"]["weights"]), "momenta": len(shared["outer"]["momenta"]),
    }  # fmt: skip


def diverged(group: RankGroup) -> dict[str, Any]:
    """Only rank 1 gets samples that are no numbers."""
    state, stepper = build(WAYS["post_local"], group)
    size = float("nan") if group.rank == 1 else 1.0
    before = weights_of(state)
    for _ in range(2):
        data = [(torch.full((4, 6), size), torch.zeros(4, dtype=torch.int64))] * 2
        stepper.step(state, iter(data), lr=0.1, wish_to_stop=False)
        state.step += 1
    after = weights_of(state)
    num_trained = sum(each.numel() for each in state.model.parameters())
    try:
        state.guard.check(2, state.scaler)
        message = ""
    except DivergedError as error:
        message = str(error)
    return {"message": message, "total": state.guard.total, "moved": before[:num_trained] != after[:num_trained]}


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    group = start_group(str(folder), rank, 2)
    said: dict[str, Any] = {way: play(way, group) for way in ("ddp", "post_local", "diloco", "warm")}
    said["plain"] = {way: play(way, group, momentum=0.0)["weights"][-1] for way in ("ddp", "each")}
    said["stops"] = {f"{way}-{wish}": play(way, group, wish=wish)["stops"] for way, wish in (
        ("post_local", 0), ("post_local", 5), ("warm", 2), ("warm", 6),
    )}  # fmt: skip
    said |= {"counts": counts(group), "state": state_of_its_own(group), "diverged": diverged(group)}
    (folder / f"said-{rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
    leave()
