"""What tests of optimizers ask alike, on one rank and on each way to share weights or moments out."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.checkpoint.objects import from_trees, to_trees
from hpc_trainer.training.checkpoint.store import CheckpointStore
from hpc_trainer.training.optim.build import set_learning_rate
from hpc_trainer.training.state import TrainState

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


def give_gradients(model: nn.Module, seed: int) -> None:
    """Of a normal distribution, a function of `seed`."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.grad = torch.randn(weight.shape, generator=generator)


def goes_on_from_what_was_saved(
    make_model: Callable[[], nn.Module], make: Callable[[nn.Module], Optimizer]
) -> Optimizer:
    """Through the trees of a checkpoint, into a model and an optimizer that have made steps of their own."""
    model, other = make_model(), make_model()
    optimizer, loaded = make(model), make(other)
    for step in range(3):
        give_gradients(model, step)
        optimizer.step()
    give_gradients(other, 9)
    loaded.step()
    shared, own = to_trees({"model": model, "optimizer": optimizer})
    from_trees({"model": other, "optimizer": loaded}, copy.deepcopy(shared), own)
    for each, of in ((model, optimizer), (other, loaded)):
        give_gradients(each, 5)
        set_learning_rate(of, 0.01)
        of.step()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert optimizer.state[mine].keys() == loaded.state[theirs].keys()
        for key, value in optimizer.state[mine].items():
            assert torch.equal(value, loaded.state[theirs][key])
    return loaded


def save(state: TrainState, step: int, folder: Path, kind: str, group: RankGroup) -> None:
    """For each other kind to load. Collective."""
    shared, own = to_trees(state.objects())
    _store(folder, kind, group).save(step, replicated=shared, per_rank=own, meta={})


def load(state: TrainState, folder: Path, source: str, group: RankGroup) -> None:
    """What `source` saved, on whatever ranks. Collective."""
    store = _store(folder, source, group)
    info = store.newest_valid()
    assert info is not None
    store.load(info, partial(from_trees, state.objects(), is_same_world=False))


def play(
    folder: Path,
    kinds: Sequence[str],
    known: Mapping[str, tuple[int, Any]],
    tell: Callable[[str, RankGroup], Any],
    tell_loaded: Callable[[str, str, RankGroup], Any],
) -> None:
    """Ranks of each kind write KIND-RANK.json, what `tell` says; then loaded-KIND.json, by source: each kind.

    `known`: with how many ranks.
    """
    from tests.unit.training.checkpoint.reshard_child import on_ranks  # late: torch warns of some of what it imports

    torch.set_num_threads(1)
    by_world: dict[int, list[str]] = {}
    for kind in kinds:
        by_world.setdefault(known[kind][0], []).append(kind)

    def act(group: RankGroup) -> None:
        for kind in by_world[group.world_size]:
            (folder / f"{kind}-{group.rank}.json").write_text(json.dumps(tell(kind, group)))

    def load_all(group: RankGroup) -> None:
        for kind in by_world[group.world_size]:
            found = {source: tell_loaded(kind, source, group) for source in kinds}
            if group.is_rank_zero:
                (folder / f"loaded-{kind}.json").write_text(json.dumps(found))

    for action in (act, load_all):
        for world_size in by_world:
            on_ranks(world_size, folder, action)


def _store(folder: Path, kind: str, group: RankGroup) -> CheckpointStore:
    return CheckpointStore(folder / f"saved-{kind}", group=group, keep_last=1, attempt=0)
