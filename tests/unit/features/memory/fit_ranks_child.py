"""Program of test_search.py: two ranks, of which each runs out of memory in the backward pass at another size."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch

from hpc_trainer.features.memory import search as fit_batch
from hpc_trainer.runtime.rank_env import read_rank_env
from hpc_trainer.worker.attempt import process_group
from tests.journals import journal_records
from tests.unit.training.rank_end import leave
from tests.unit.training.train_here import config_of, saved_bytes, train_here

MOST = {0: 8, 1: 4}
WORDS = (
    "model=resnet18", "model.width=8", "data=synthetic_images", "data.image_size=8", "data.num_samples=80",
    "data.num_eval=20", "train.global_batch_size=32", "train.num_steps=3", "hardware.tasks_per_node=2",
)  # fmt: skip


class EndsInBackward(torch.autograd.Function):
    """Passes its input on; the gradient's way back needs more than there is."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, seen: list[str]) -> torch.Tensor:
        context.seen = seen
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        context.seen.append("backward")
        raise torch.OutOfMemoryError("CUDA out of memory. (test)")


def main(rank: int, folder: Path) -> None:
    strategies = (folder / "strategies").read_text().split()
    torch.set_num_threads(1)
    words = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    env = read_rank_env({"TORCHELASTIC_RUN_ID": "t", **{key: str(value) for key, value in words.items()}})
    ended: list[str] = []
    said: dict[str, Any] = {"rank": rank, "ended": ended}
    forward = fit_batch.VotingLoss.forward

    def limited(loss: Any, batch: Any, *rest: Any, **more: Any) -> torch.Tensor:
        value = forward(loss, batch, *rest, **more)
        is_training = loss.training and torch.is_grad_enabled()
        return EndsInBackward.apply(value, ended) if is_training and len(batch[0]) > MOST[rank] else value  # type: ignore[no-any-return, no-untyped-call]

    fit_batch.VotingLoss.forward = limited  # type: ignore[method-assign]
    # Fake tensors take seconds to import; what they count is the other tests'.
    fit_batch.Trials._estimate = lambda trials, size: None  # type: ignore[assignment, method-assign]
    with process_group(
        env, torch.device("cpu"), rendezvous=folder / "rendezvous.json", address=None, timeout_s=60
    ) as group:
        found = {}
        for strategy in strategies:
            config = config_of(*WORDS, f"parallel={strategy}", "train.micro_batch_size=auto")
            found[strategy] = train_here(config, folder / strategy, group=group)
            (sizes,) = journal_records(found[strategy].paths.folder, "fit")
            names = [field.name for field in dataclasses.fields(fit_batch.BatchSizes)]
            said[strategy] = {name: sizes["found"][name] for name in names}
        given = train_here(
            config_of(*WORDS, f"parallel={strategies[-1]}", "train.micro_batch_size=4"), folder / "given", group=group
        )
        said["as_given"] = saved_bytes(given) == saved_bytes(found[strategies[-1]])
    (folder / f"said-{rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
    leave()
