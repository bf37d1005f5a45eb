"""Program of test_step_ranks.py: one rank takes steps through our own process group, and prints what it saw."""

import json
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpc_trainer.runtime.rank_env import read_rank_env
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.worker.attempt import process_group
from tests.unit.training.rank_end import leave
from tests.unit.training.step_builders import batches_of, build_step


def count_reductions(sizes: list[int]) -> Any:
    """A communication hook that reduces as DDP does and notes the size of each bucket (torch wants it annotated)."""

    def hook(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        sizes.append(bucket.buffer().numel())
        tensor = bucket.buffer().div_(dist.get_world_size())
        work = dist.all_reduce(tensor, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])  # type: ignore[no-any-return]

    return hook


def messages(group: RankGroup) -> dict[str, Any]:
    """What ranks say to each other outside the step."""
    return {
        "gathered": group.gather({"rank": group.rank, "text": "ä" * group.rank}),
        "broadcast": group.broadcast([1, None, {"from": group.rank}]),
        "sum": group.sum(torch.tensor([1.0 + group.rank])).item(),
    }


def steps(group: RankGroup) -> tuple[dict[str, Any], Callable[[], Any]]:
    """(what a rank sees in four steps, a weak reference to its DDP, which is in a cycle)."""
    state, stepper = build_step(group, grad_accum_steps=2)
    stepper.module.itself = [stepper.module]  # type: ignore[assignment]
    sizes: list[int] = []
    stepper.module.register_comm_hook(None, count_reductions(sizes))  # type: ignore[operator, union-attr]
    batches = batches_of(rank=group.rank, world_size=group.world_size, grad_accum_steps=2, num_steps=4)
    stops, losses = [], []
    for step in range(4):
        # Only the last rank wishes to stop, and only in the third step.
        wish = group.rank == group.world_size - 1 and step == 2
        result = stepper.step(state, batches, lr=0.1, wish_to_stop=wish)
        stops.append(result.should_stop)
        losses.append(group.sum(result.loss.clone()).item() / group.world_size)
    weights = [weight.flatten().tolist() for weight in state.model.parameters()]
    said = {"stops": stops, "bucket_sizes": sizes, "losses": losses, "weights": weights}
    return said, weakref.ref(stepper.module)


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    env = read_rank_env(
        {"TORCHELASTIC_RUN_ID": "t", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
         "LOCAL_WORLD_SIZE": str(world_size)}
    )  # fmt: skip
    with process_group(
        env, torch.device("cpu"), rendezvous=folder / "rendezvous.json", address=None, timeout_s=60
    ) as group:
        more, ddp = steps(group)
        said = {**messages(group), **more}
    said["is_gone"] = ddp() is None
    (folder / f"said-{rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
    leave()
