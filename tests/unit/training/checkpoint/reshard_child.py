"""Program of test_reshard_ranks.py: each kind trains and saves, then every kind loads what every kind saved.

    python reshard_child.py FOLDER single ddp2 zero2 ..

Ranks are forked: torch is imported once. What was saved and what was loaded is in FOLDER as JSON of digests.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed.fsdp
import torch.distributed.optim

from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.checkpoint.objects import from_trees, to_trees
from hpc_trainer.training.checkpoint.store import CheckpointInfo, CheckpointStore
from tests.unit.training.parallel.shard_builders import KINDS, build, digests, start_group
from tests.unit.training.step_builders import batches_of


def store_of(folder: Path, source: str, group: RankGroup) -> CheckpointStore:
    return CheckpointStore(folder / source, group=group, keep_last=1, attempt=0)


def save(kind: str, folder: Path, group: RankGroup) -> None:
    state, stepper = build(kind, group, seed=5)
    batches = batches_of(rank=group.rank, world_size=group.world_size, grad_accum_steps=2, num_steps=3)
    for _ in range(3):
        stepper.step(state, batches, lr=0.01, wish_to_stop=False)
    said = digests(state, group)
    shared, own = to_trees(state.objects())
    store_of(folder, kind, group).save(3, replicated=shared, per_rank=own, meta={})
    if group.is_rank_zero:
        (folder / f"saved-{kind}.json").write_text(json.dumps(said))


def load(kind: str, source: str, folder: Path, group: RankGroup) -> None:
    state, _ = build(kind, group, seed=99)
    store = store_of(folder, source, group)
    info = store.newest_valid()
    assert isinstance(info, CheckpointInfo)
    is_same_world = info.world_size == group.world_size
    store.load(info, partial(from_trees, state.objects(), is_same_world=is_same_world))
    said = digests(state, group)
    if group.is_rank_zero:
        (folder / f"loaded-{source}-{kind}.json").write_text(json.dumps(said))


def on_ranks(world_size: int, folder: Path, action: Callable[[RankGroup], None]) -> None:
    """Forks the ranks, and waits for all of them; if one fails the others would wait for it, and are ended."""
    (folder / f"rendezvous-{world_size}").unlink(missing_ok=True)
    pids = []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                action(start_group(str(folder), rank, world_size))
                code = 0
            except BaseException:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(code)
        pids.append(pid)
    while pids:
        ended, status = os.wait()
        pids.remove(ended)
        if status:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            raise SystemExit(f"one of {world_size} ranks ended with {os.waitstatus_to_exitcode(status)}")


def main(folder: Path, kinds: list[str]) -> None:
    torch.set_num_threads(1)
    by_world: dict[int, list[str]] = {}
    for kind in kinds:
        by_world.setdefault(KINDS[kind][0], []).append(kind)

    def save_all(group: RankGroup) -> None:
        for kind in by_world[group.world_size]:
            save(kind, folder, group)

    def load_all(group: RankGroup) -> None:
        for kind in by_world[group.world_size]:
            for source in kinds:
                load(kind, source, folder, group)

    for action in (save_all, load_all):
        for world_size in by_world:
            on_ranks(world_size, folder, action)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
