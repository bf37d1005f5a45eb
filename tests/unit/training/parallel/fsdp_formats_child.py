"""Program of test_fsdp_formats_ranks.py: gpt by each format of FSDP2; what it saw goes to FOLDER/NAME-RANK.json.

python fsdp_formats_child.py FOLDER RANKS
"""

from __future__ import annotations

import collections
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
from torch.utils._python_dispatch import TorchDispatchMode

from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.checkpoint.objects import from_trees, to_trees
from hpc_trainer.training.checkpoint.store import CheckpointStore
from tests.unit.training.checkpoint.reshard_child import on_ranks
from tests.unit.training.parallel.fsdp_ways import NUM_BLOCKS, NUM_STEPS, WAYS, WISH
from tests.unit.training.parallel.mesh_builders import batches_of, build
from tests.unit.training.parallel.mesh_step_child import evaluated
from tests.unit.training.parallel.shard_builders import digests


class Messages(TorchDispatchMode):
    """Counts what FSDP gathers and reduces, by number format: `gather bfloat16`."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kinds = {"c10d::_allgather_base_": "gather", "c10d::_reduce_scatter_base_": "reduce"}
        kind = kinds.get(func._schema.name)
        if kind is not None:
            self.counts[f"{kind} {str(args[0].dtype).removeprefix('torch.')}"] += 1
        return func(*args, **(kwargs or {}))


def play(name: str, group: RankGroup, folder: Path) -> dict[str, Any]:
    """The curve, the last rank's vote, messages of a step, evaluations in between; saved at a half, and resumed."""
    _, parallel, dtype = WAYS[name]

    def steps(state: Any, stepper: Any, batches: Any, first: int) -> None:
        for step in range(first, NUM_STEPS):
            if step == NUM_STEPS // 2 and first == 0:
                save(state)
            wish = group.rank == group.world_size - 1 and step == WISH
            said["scales"].append(state.scaler.get_scale())
            with Messages() as messages:
                result = stepper.step(state, batches, lr=0.01, wish_to_stop=wish)
            said["messages"].append(messages.counts)
            said["losses"].append(result.mean_loss(group))
            said["norms"].append(result.grad_norm.item())
            said["stops"].append(result.should_stop)

    def save(state: Any) -> None:
        # As a run that is stopped in an evaluation: whole weights that nobody has let go of.
        found = evaluated(state, stepper, mesh, group)
        assert found["averaged"] != found["evaluation"] == found["again"]
        said["evaluation"] = found["evaluation"]
        shared, own = to_trees(state.objects())
        store.save(1, replicated=shared, per_rank=own, meta={})

    said: dict[str, Any] = {key: [] for key in ("losses", "norms", "stops", "scales", "messages")}
    store = CheckpointStore(folder / f"saved-{name}", group=group, keep_last=1, attempt=0)
    state, stepper, mesh = build(name, group, dtype=dtype, num_layers=NUM_BLOCKS, parallel=parallel)
    steps(state, stepper, batches_of(mesh, NUM_STEPS), 0)
    undisturbed = dict(said)
    undisturbed["end"] = digests(state, group)["shared"]

    said = {key: [] for key in said if key != "evaluation"}
    state, stepper, mesh = build(name, group, seed=77, dtype=dtype, num_layers=NUM_BLOCKS, parallel=parallel)
    info = store.newest_valid()
    assert info is not None
    store.load(info, partial(from_trees, state.objects()))
    batches = batches_of(mesh, NUM_STEPS)
    for _ in range(NUM_STEPS // 2 * 2):
        next(batches)
    steps(state, stepper, batches, NUM_STEPS // 2)
    return {**undisturbed, "resumed": {"losses": said["losses"], "end": digests(state, group)["shared"]}}


def main(folder: Path, world_size: int) -> None:
    torch.set_num_threads(1)

    def act(group: RankGroup) -> None:
        for name in (name for name, way in WAYS.items() if way[0] == world_size):
            (folder / f"{name}-{group.rank}.json").write_text(json.dumps(play(name, group, folder)))

    on_ranks(world_size, folder, act)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
