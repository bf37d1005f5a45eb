"""Program of test_mesh_ranks.py: gpt on each mesh takes the same steps; what it saw goes to FOLDER/KIND-RANK.json."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

from hpc_trainer.config.schema.parallel import Dtype
from hpc_trainer.config.schema.train import CompileScope, LoopConfig, Recompute
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.runtime.tensors import is_sharded, local_tensor
from hpc_trainer.tasks.cross_entropy import CrossEntropy
from hpc_trainer.training.checkpoint.objects import from_trees, to_trees
from hpc_trainer.training.checkpoint.store import CheckpointStore
from hpc_trainer.training.evaluate import evaluate
from hpc_trainer.training.parallel.mesh import Mesh
from hpc_trainer.training.parallel.share import for_evaluation
from hpc_trainer.training.state import TrainState
from hpc_trainer.training.step import Stepper
from tests.unit.training.checkpoint.reshard_child import on_ranks
from tests.unit.training.parallel.mesh_builders import GLOBAL_BATCH, KINDS, SEQ_LEN, VOCABULARY, batches_of, build
from tests.unit.training.parallel.shard_builders import digests

NUM_STEPS = 5
SAVED_STEP = 5


class Windows:
    """Held-out windows; three are fewer than ranks."""

    input_shape = (SEQ_LEN,)
    num_classes = VOCABULARY

    def __len__(self) -> int:
        return 3

    def __getitems__(self, indices: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = (torch.arange(3 * SEQ_LEN).reshape(3, SEQ_LEN) * 7) % VOCABULARY
        return tokens[list(indices)], (tokens[list(indices)] + 1) % VOCABULARY


def whole(tensor: Any) -> torch.Tensor:
    full: torch.Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return full.detach()


def steps(kind: str, group: RankGroup, folder: Path) -> dict[str, Any]:
    """The curve, the vote of the last rank, an evaluation; and the state, saved for the others to load."""
    state, stepper, mesh = build(kind, group)
    batches = batches_of(mesh, NUM_STEPS)
    losses, norms, stops = [], [], []
    for step in range(NUM_STEPS):
        wish = group.rank == group.world_size - 1 and step == 2
        result = stepper.step(state, batches, lr=0.01, wish_to_stop=wish)
        assert result.grad_norm is not None
        losses.append(result.mean_loss(group))
        norms.append(result.grad_norm.item())
        stops.append(result.should_stop)
    evaluations = evaluated(state, stepper, mesh, group)
    average = {name: whole(each).flatten().tolist() for name, each in state.more["ema"].module.named_parameters()}
    shared, own = to_trees(state.objects())
    store = CheckpointStore(folder / f"saved-{kind}", group=group, keep_last=1, attempt=0)
    store.save(SAVED_STEP, replicated=shared, per_rank=own, meta={})
    said = digests(state, group)["shared"]
    return {
        "losses": losses, "norms": norms, "stops": stops, "average": average, "saved": said, **evaluations,
    }  # fmt: skip


def evaluated(state: TrainState, stepper: Stepper, mesh: Mesh, group: RankGroup) -> dict[str, Any]:
    """With the weights, with their averages, and with the weights again. Collective."""
    look = partial(
        evaluate, for_evaluation(stepper.module, state.model), Windows(), task=CrossEntropy(), group=group,
        batch_size=2, precision=stepper.precision, mesh=mesh,
    )  # fmt: skip
    raw = look()
    with state.more["ema"].swapped_in():
        averaged = look()
    return {"evaluation": raw, "averaged": averaged, "again": look()}


def overflow(kind: str, group: RankGroup) -> list[float]:
    """One rank's part of one divided weight gets an infinite gradient in the first step; the scales after each."""
    state, stepper, mesh = build(kind, group, dtype=Dtype.fp16, accum=1)
    before = [whole(weight).clone() for weight in state.model.parameters()]
    scales = []
    _spoil(state, mesh, float("inf"))
    for step in range(3):
        stepper.step(state, batches_of(mesh, 1, 1), lr=0.01, wish_to_stop=False)
        scales.append(state.scaler.get_scale())
        if step == 0:
            _spoil(state, mesh, None)
            after = [whole(weight) for weight in state.model.parameters()]
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "skipped"
    return scales


def not_finite(kind: str, group: RankGroup) -> dict[str, Any]:
    """The same with NaN in fp32: all ranks skip the step."""
    state, stepper, mesh = build(kind, group, accum=1)
    before = [whole(weight).clone() for weight in state.model.parameters()]
    _spoil(state, mesh, float("nan"))
    stepper.step(state, batches_of(mesh, 1, 1), lr=0.01, wish_to_stop=False)
    after = [whole(weight) for weight in state.model.parameters()]
    is_same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    _spoil(state, mesh, None)
    stepper.step(state, batches_of(mesh, 1, 1), lr=0.01, wish_to_stop=False)
    moved = not torch.equal(before[0], whole(next(state.model.parameters())))
    return {"is_same": is_same, "has_moved": moved, "total": state.guard.total}


_HOOKS: list[Any] = []


def _spoil(state: Any, mesh: Mesh, value: float | None) -> None:
    """From now on the last rank's part of a wide layer, and its copies, have this gradient; None: no more."""
    for hook in _HOOKS:
        hook.remove()
    _HOOKS.clear()
    weight = state.model.get_parameter("blocks.0.mlp_in.weight")

    def spoil(weight: Any) -> None:
        local = local_tensor(weight.grad) if is_sharded(weight.grad) else weight.grad
        if local.numel():
            local.view(-1)[0] = value

    last, shape = mesh.shape.place(mesh.shape.world_size - 1), mesh.shape
    is_mine = mesh.place.tp == last.tp and (mesh.place.data == last.data or shape.dp_replicate > 1)
    if value is not None and is_mine:
        _HOOKS.append(weight.register_post_accumulate_grad_hook(spoil))


def randomness(kind: str, group: RankGroup) -> dict[str, Any]:
    """With dropout: the loss of this rank's samples, and the random state afterwards; recomputed layers the same."""
    said: dict[str, Any] = {}
    for mode in Recompute if kind == "tp" else (Recompute.none,):
        state, stepper, mesh = build(kind, group, dropout=0.3, recompute=mode, accum=1)
        result = stepper.step(state, batches_of(mesh, 1, 1), lr=0.01, wish_to_stop=False)
        assert result.grad_norm is not None
        said[mode.value] = [result.loss.item(), result.grad_norm.item(), torch.get_rng_state().sum().item()]
    return said


def compiled(kind: str, group: RankGroup, scope: CompileScope | None) -> dict[str, Any]:
    """Of three layers that are alike, not compiled with `scope` None: this rank's curve, also with dropout; graphs."""
    from hpc_trainer.features.compile.graphs import graph_counts

    loop = None if scope is None else LoopConfig(compile=True, compile_scope=scope)
    said: dict[str, Any] = {}
    for name, dropout in (("plain", 0.0), ("dropout", 0.3)):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        state, stepper, mesh = build(kind, group, num_layers=3, dropout=dropout, compiled=loop)
        batches = batches_of(mesh, 2)
        results = [stepper.step(state, batches, lr=0.01, wish_to_stop=False) for _ in range(2)]
        said[name] = {
            "losses": [each.loss.item() for each in results],
            "norms": [each.grad_norm.item() for each in results if each.grad_norm is not None],
            "random": torch.get_rng_state().sum().item(),
            "graphs": graph_counts()["graphs"],
        }
    return said


def load(kind: str, source: str, folder: Path, group: RankGroup) -> dict[str, str]:
    state, stepper, mesh = build(kind, group, seed=77)
    store = CheckpointStore(folder / f"saved-{source}", group=group, keep_last=1, attempt=0)
    info = store.newest_valid()
    assert info is not None
    store.load(info, partial(from_trees, state.objects(), is_same_world=False))
    found: dict[str, str] = digests(state, group)["shared"]
    if source == "single":
        stepper.step(state, batches_of(mesh, 1), lr=0.01, wish_to_stop=False)  # what was loaded can be trained
    return found


def offloaded(kind: str, group: RankGroup, folder: Path) -> list[bool]:
    """Whether three steps with moments in host memory give the bits of those without, and one more after each has
    loaded what the other saved; and whether that one changed anything.
    """
    found = []
    stores = [
        CheckpointStore(folder / f"moments-{kind}-{offload}", group=group, keep_last=1, attempt=0)
        for offload in (False, True)
    ]
    for store, offload in zip(stores, (False, True), strict=True):
        state, stepper, mesh = build(kind, group, offload=offload)
        batches = batches_of(mesh, 3)
        for _ in range(3):
            stepper.step(state, batches, lr=0.01, wish_to_stop=False)
        found.append(digests(state, group)["shared"])
        shared, own = to_trees(state.objects())
        store.save(3, replicated=shared, per_rank=own, meta={})
    for store, offload in zip(stores, (True, False), strict=True):
        state, stepper, mesh = build(kind, group, seed=77, offload=offload)
        info = store.newest_valid()
        assert info is not None
        store.load(info, partial(from_trees, state.objects()))
        stepper.step(state, batches_of(mesh, 1), lr=0.01, wish_to_stop=False)
        found.append(digests(state, group)["shared"])
    return [found[0] == found[1], found[2] == found[3], found[1] != found[2]]


def main(folder: Path, kinds: list[str]) -> None:
    torch.set_num_threads(1)
    assert GLOBAL_BATCH % (4 * 2) == 0
    is_long = len(kinds) == len(KINDS)
    by_world: dict[int, list[str]] = {}
    for kind in kinds:
        by_world.setdefault(KINDS[kind][0], []).append(kind)

    def act(group: RankGroup) -> None:
        for kind in by_world[group.world_size]:
            said = {"steps": steps(kind, group, folder)}
            if kind != "hsdp":
                said["overflow"] = overflow(kind, group)
                said["not_finite"] = not_finite(kind, group)
            if kind != "single":
                said["offloaded"] = offloaded(kind, group, folder)
            if kind in ("tp", "fsdp_tp"):
                said["randomness"] = randomness(kind, group)
            if is_long and kind in ("tp", "tp_ddp", "fsdp_tp"):
                scopes: list[CompileScope | None] = [None, CompileScope.blocks]
                scopes += [CompileScope.model] if kind == "tp" else []
                said["compiled"] = {str(scope and scope.value): compiled(kind, group, scope) for scope in scopes}
            (folder / f"{kind}-{group.rank}.json").write_text(json.dumps(said))
        load_all(group)

    def load_all(group: RankGroup) -> None:
        """Of what is saved by now."""
        sources = [source for source in kinds if (folder / f"saved-{source}").exists()]
        group.barrier()
        for kind in by_world[group.world_size]:
            said = {source: load(kind, source, folder, group) for source in sources}
            if group.is_rank_zero:
                (folder / f"loaded-{kind}.json").write_text(json.dumps(said))

    for world_size in by_world:
        on_ranks(world_size, folder, act)
    for world_size in by_world if is_long else [1]:
        on_ranks(world_size, folder, load_all)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
