"""Program of test_sharded_ranks.py: Muon on each way to share weights out, told in FOLDER/KIND-RANK.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.optim
import torch.distributed.tensor.parallel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from hpc_trainer.config.schema.parallel import Dtype
from hpc_trainer.features.muon.muon import ShardedMuon
from hpc_trainer.features.muon.whole_matrices import WholeMatrices
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.optim.build import set_learning_rate, step_unless
from hpc_trainer.training.parallel.mesh import Mesh
from hpc_trainer.training.state import TrainState
from hpc_trainer.training.step import Stepper
from tests.unit.features.muon.muon_ways import KINDS, MUON
from tests.unit.features.optimizer_checks import load, play, save
from tests.unit.training.built_parts import optimizer_of
from tests.unit.training.optim.given_gradients import give_gradients, one_rank
from tests.unit.training.parallel import mesh_builders, shard_builders
from tests.unit.training.parallel.mesh_step_child import whole

NUM_STEPS, SAVED_STEP = 5, 5
LAYOUTS = [
    (Shard(0), Shard(1)), (Shard(0), Shard(0)), (Shard(0), Replicate()), (Replicate(), Shard(1)),
    (Replicate(), Replicate()),
]  # fmt: skip


def build(kind: str, group: RankGroup, **values: Any) -> tuple[TrainState, Stepper, Mesh]:
    return mesh_builders.build(kind, group, parallel=KINDS[kind][1], optim=MUON, num_layers=2, **values)


def steps(kind: str, group: RankGroup, folder: Path) -> dict[str, Any]:
    """The curve, and the state, saved for the others to load."""
    state, stepper, mesh = build(kind, group)
    batches = mesh_builders.batches_of(mesh, NUM_STEPS)
    losses, norms = [], []
    for _ in range(NUM_STEPS):
        result = stepper.step(state, batches, lr=0.01, wish_to_stop=False)
        assert result.grad_norm is not None
        losses.append(result.mean_loss(group))
        norms.append(result.grad_norm.item())
    weights = {name: whole(weight).flatten().tolist() for name, weight in state.model.named_parameters()}
    state.more.clear()  # of one kind in two: the others load what is saved
    save(state, SAVED_STEP, folder, kind, group)
    saved = shard_builders.digests(state, group)["shared"]
    return {"losses": losses, "norms": norms, "weights": weights, "saved": saved}


def bits(state: TrainState) -> dict[str, Any]:
    """Three steps with given gradients, two of them as on a GPU, and a bad one that is skipped as there: what differs
    from one rank, and what ranks said to each other in each step.
    """
    model = one_rank(state)
    alone, optimizer = optimizer_of(MUON, model), state.optimizer
    is_kept, counts = True, []
    for step, rate in enumerate((0.02, 0.01, 0.005)):
        give_gradients(model, step)
        set_learning_rate(alone, rate)
        set_learning_rate(optimizer, rate)
        alone.step()
        if step == 1:
            give_gradients(state.model, 77, float("nan"))
            before = {name: whole(weight).clone() for name, weight in state.model.named_parameters()}
            step_unless(optimizer, torch.tensor(True))
            after = {name: whole(weight) for name, weight in state.model.named_parameters()}
            is_kept = all(torch.equal(before[name], after[name]) for name in before)
        give_gradients(state.model, step)
        with CommDebugMode() as told:
            if step == 2:
                optimizer.step()
            else:
                step_unless(optimizer, torch.tensor(False))
        counts.append({str(kind): count for kind, count in told.get_comm_counts().items()})
    here = dict(state.model.named_parameters())
    differ = [name for name, weight in model.named_parameters() if not torch.equal(weight, whole(here[name]))]
    furthest = max((weight - whole(here[name])).abs().max().item() for name, weight in model.named_parameters())
    momenta = getattr(optimizer, "optim", optimizer).state
    kept = [name for name in here if "momentum_buffer" in momenta.get(here[name], {})]
    differ += [
        f"momentum of {name}"
        for name in kept
        if not torch.equal(
            whole(momenta[here[name]]["momentum_buffer"]), alone.state[model.get_parameter(name)]["momentum_buffer"]
        )
    ]
    return {"differ": differ, "is_kept": is_kept, "furthest": furthest, "counts": counts, "momenta": kept}


def work(state: TrainState) -> list[int]:
    """Matrices that each rank of a copy makes orthogonal."""
    muon = getattr(state.optimizer, "muon", None)
    if not isinstance(muon, ShardedMuon):
        return []
    ranks = muon.matrices.ranks
    return [ranks.count(rank) for rank in range(1 + max(ranks))]


def overflow(kind: str, group: RankGroup) -> list[bool]:
    """Of three steps in fp16, whether each changed a weight: in the second the loss scale is too high."""
    state, stepper, mesh = build(kind, group, dtype=Dtype.fp16, accum=1)
    batches, said = mesh_builders.batches_of(mesh, 3, 1), []
    for step in range(3):
        before = [whole(weight).clone() for weight in state.model.parameters()]
        if step:
            state.scaler.update(2.0**40 if step == 1 else 2.0**10)
        stepper.step(state, batches, lr=0.01, wish_to_stop=False)
        after = [whole(weight) for weight in state.model.parameters()]
        said.append(any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))
    return said


def exchange(group: RankGroup) -> dict[str, Any]:
    """Matrices of every layout on a mesh of two dimensions, turned upside down where they are whole."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    shapes = [(7, 5), (1, 3), (4, 4), (3, 11), (2, 1)]
    wholes = [
        torch.arange(1.0, 1.0 + rows * columns).reshape(rows, columns) for rows, columns in shapes for _ in LAYOUTS
    ]
    placements = [layout for _ in shapes for layout in LAYOUTS]
    weights = [distribute_tensor(each, mesh, layout) for each, layout in zip(wholes, placements, strict=True)]
    matrices = WholeMatrices(weights, [each.numel() for each in wholes], dist.group.WORLD)
    seen, wrong = [], []

    def turn(whole: torch.Tensor) -> torch.Tensor:
        seen.append(list(whole.shape))
        return whole.flip(0)

    for chosen in (range(len(weights)), [3, 4, 11], []):
        with CommDebugMode() as told:
            found = matrices.map(chosen, (weights[index].to_local() for index in chosen), turn)
        assert told.get_total_counts() == (2 if chosen else 0)
        for index, part in zip(chosen, found, strict=True):
            expected = distribute_tensor(wholes[index].flip(0), mesh, placements[index]).to_local()
            if not torch.equal(part.float(), expected):
                wrong.append([shapes[index // len(LAYOUTS)], str(placements[index])])
    assert group.world_size == mesh.size()
    return {"wrong": wrong, "num_seen": len(seen), "num_weights": len(weights)}


def loaded(kind: str, source: str, folder: Path, group: RankGroup) -> Any:
    """The state as it was loaded, into a model with other weights; and the losses of two steps on from there."""
    state, stepper, mesh = build(kind, group, seed=77)
    state.more.clear()
    stepper.after_update = ()
    load(state, folder, source, group)
    found = shard_builders.digests(state, group)["shared"]
    batches = mesh_builders.batches_of(mesh, 2)
    losses = [stepper.step(state, batches, lr=0.01, wish_to_stop=False).mean_loss(group) for _ in range(2)]
    return {"found": found, "losses": losses}


def tell(kind: str, folder: Path, group: RankGroup) -> dict[str, Any]:
    said: dict[str, Any] = {"steps": steps(kind, group, folder), "overflow": overflow(kind, group)}
    state, _, _ = build(kind, group)
    said |= {"bits": bits(state), "work": work(state)}
    if kind in shard_builders.KINDS:  # rows that do not divide by the ranks, tied and frozen weights
        hard, _ = shard_builders.build(kind, group, seed=5, has_norm=False, optim=MUON)
        said["hard"] = bits(hard)
    exchanged = folder / f"exchange-{group.rank}.json"
    if group.world_size == 4 and not exchanged.exists():
        exchanged.write_text(json.dumps(exchange(group)))
    return said


def main(folder: Path, kinds: list[str]) -> None:
    play(
        folder,
        kinds,
        KINDS,
        lambda kind, group: tell(kind, folder, group),
        lambda kind, source, group: loaded(kind, source, folder, group),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
