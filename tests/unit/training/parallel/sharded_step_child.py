"""Program of test_sharded_step_ranks.py: each strategy takes the same steps; what it saw goes to FOLDER/KIND.json."""

from __future__ import annotations

import collections
import contextlib
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp
import torch.distributed.optim
from torch.utils._python_dispatch import TorchDispatchMode

from hpc_trainer.config.schema.parallel import Dtype, PrecisionConfig
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.runtime.tensors import is_sharded
from hpc_trainer.tasks.cross_entropy import CrossEntropy
from hpc_trainer.training.checkpoint.objects import to_trees
from hpc_trainer.training.evaluate import evaluate
from hpc_trainer.training.parallel.share import for_evaluation
from tests.unit.training.checkpoint.reshard_child import on_ranks
from tests.unit.training.parallel.shard_builders import KINDS, build
from tests.unit.training.step_builders import batches_of

NUM_STEPS = 4


class Samples:
    """A held-out set that ranks cannot share out evenly."""

    input_shape = (6,)
    num_classes = 5

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitems__(self, indices: Any) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.arange(6.0 * self.count).reshape(self.count, 6).sin()
        return values[list(indices)], torch.tensor(list(indices)) % 5


def whole(tensor: Any) -> list[float]:
    full = tensor.full_tensor() if is_sharded(tensor) else tensor
    values: list[float] = full.detach().flatten().tolist()
    return values


def steps(kind: str, group: RankGroup) -> dict[str, Any]:
    state, stepper = build(kind, group, seed=5, has_norm=False)
    # Before the first step: a run that was stopped between a save and the evaluation begins with it.
    evaluations = [
        evaluate(
            for_evaluation(stepper.module, state.model), Samples(count), task=CrossEntropy(), group=group, batch_size=2,
            precision=PrecisionConfig(),
        )
        for count in (1, 3, 7)
    ]  # fmt: skip
    batches = batches_of(rank=group.rank, world_size=group.world_size, grad_accum_steps=2, num_steps=NUM_STEPS)
    losses, norms, stops = [], [], []
    for step in range(NUM_STEPS):
        wish = group.rank == group.world_size - 1 and step == 2
        result = stepper.step(state, batches, lr=0.01, wish_to_stop=wish)
        assert result.grad_norm is not None
        losses.append(group.sum(result.loss.clone()).item() / group.world_size)
        norms.append(result.grad_norm.item())
        stops.append(result.should_stop)
    look = partial(
        evaluate, for_evaluation(stepper.module, state.model), Samples(3), task=CrossEntropy(), group=group,
        batch_size=2, precision=PrecisionConfig(),
    )  # fmt: skip
    ema = state.more["ema"]
    before = look()
    with contextlib.suppress(ZeroDivisionError), ema.swapped_in():
        averaged = look()
        raise ZeroDivisionError
    assert look() == before != averaged
    average = {name: whole(weight) for name, weight in ema.module.named_parameters()}
    moments = sorted(to_trees(state.objects())[0]["optimizer"]["state"])
    weights = {name: whole(weight) for name, weight in state.model.named_parameters()}
    return {
        "losses": losses,
        "norms": norms,
        "stops": stops,
        "weights": weights,
        "evaluations": evaluations,
        "moments": moments,
        "average": average,
        "averaged": averaged,
    }


class Messages(TorchDispatchMode):
    """Counts what ranks send each other, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def messages(kind: str, group: RankGroup) -> dict[str, dict[str, int]]:
    """Of the second step with averages, and without."""
    said = {}
    for name in ("with", "without"):
        state, stepper = build(kind, group, seed=5)
        if name == "without":
            stepper.after_update = ()
        batches = batches_of(rank=group.rank, world_size=group.world_size, grad_accum_steps=2, num_steps=2)
        stepper.step(state, batches, lr=0.01, wish_to_stop=False)
        with Messages() as seen:
            stepper.step(state, batches, lr=0.01, wish_to_stop=False)
        said[name] = dict(seen.counts)
    return said


def overflow(kind: str, group: RankGroup) -> dict[str, Any]:
    """Only the last rank's samples overflow in fp16."""
    state, stepper = build(kind, group, seed=5, dtype=Dtype.fp16, grad_accum_steps=1, has_norm=False)
    before = {name: whole(weight) for name, weight in state.model.named_parameters()}
    scales = []
    for step in range(3):
        size = 1e30 if step == 0 and group.rank == group.world_size - 1 else 1.0
        batch = (torch.full((4, 6), size), torch.zeros(4, dtype=torch.int64))
        stepper.step(state, iter([batch]), lr=0.01, wish_to_stop=False)
        scales.append(state.scaler.get_scale())
        if step == 0:
            after = {name: whole(weight) for name, weight in state.model.named_parameters()}
    return {"scales": scales, "is_skipped": before == after}


def main(folder: Path, kinds: list[str]) -> None:
    torch.set_num_threads(1)
    for kind in kinds:

        def act(group: RankGroup, kind: str = kind) -> None:
            said = {"steps": steps(kind, group), "overflow": overflow(kind, group), "messages": messages(kind, group)}
            (folder / f"{kind}-{group.rank}.json").write_text(json.dumps(said))

        on_ranks(KINDS[kind][0], folder, act)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
