"""Program of test_hooks.py: one of two ranks takes steps with each way to send gradients, and says what it saw."""

from __future__ import annotations

import json
import sys
import unittest.mock
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hpc_trainer.config.schema.optim import SgdConfig
from hpc_trainer.config.schema.parallel import Dtype, ParallelConfig, PrecisionConfig, Strategy
from hpc_trainer.features.gradient_compression import CommHook
from hpc_trainer.features.gradient_compression.gradient_compression import add_comm_hook
from hpc_trainer.features.in_backward.in_backward import step_in_backward
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.tasks.cross_entropy import CrossEntropy
from hpc_trainer.training.optim.build import build_optimizer
from hpc_trainer.training.parallel.mesh import build_mesh
from hpc_trainer.training.parallel.share import StopVote, VotingLoss, share
from hpc_trainer.training.state import StepGuard, TrainState
from hpc_trainer.training.step import Batch, Stepper, build_scaler
from tests.unit.training.parallel.shard_builders import start_group
from tests.unit.training.rank_end import leave

NUM_STEPS, WISH, BATCH = 8, 4, 8
START = 2


class Net(nn.Module):
    """Matrices that are worth two thin ones, a convolution in channels_last, a number without dimensions."""

    def __init__(self, *, is_sharded: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 16, (3, 1))
        self.wide, self.out = nn.Linear(16, 48), nn.Linear(48, 5)
        self.gain = nn.Parameter(torch.ones((1,) if is_sharded else ()))  # FSDP takes none without dimensions

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.conv(inputs.view(-1, 8, 3, 1).contiguous(memory_format=torch.channels_last)).flatten(1)
        outputs: torch.Tensor = self.out(torch.tanh(self.wide(hidden)) * self.gain)
        return outputs


def build(
    group: RankGroup, parallel: ParallelConfig, *, accum: int = 1, dtype: Dtype = Dtype.fp32, clip: float | None = 1.0
) -> tuple[TrainState, Stepper]:
    torch.manual_seed(3)
    is_sharded = parallel.strategy is Strategy.fsdp
    model = Net(is_sharded=is_sharded)
    if not is_sharded:
        model = model.to(memory_format=torch.channels_last)
    precision = PrecisionConfig(compute_dtype=dtype, init_scale=2.0**20, growth_interval=100)
    loss = VotingLoss(model, CrossEntropy())
    module = share(loss, group, build_mesh(parallel, group), parallel, deterministic=True)
    state = TrainState(
        model=model, optimizer=build_optimizer(SgdConfig(lr=0.05), model), scaler=build_scaler(precision, "cpu"),
        guard=StepGuard(10), more=add_comm_hook(module, parallel, seed=1),
    )  # fmt: skip
    stepper = Stepper(
        module=module, vote=StopVote(loss, group), precision=precision, device=group.device, grad_accum_steps=accum,
        max_grad_norm=clip,
    )  # fmt: skip
    return state, stepper


def batches(rank: int, *, bad_step: int | None = None, accum: int = 1) -> Iterator[Batch]:
    draws = torch.Generator().manual_seed(rank)
    for step in range(NUM_STEPS):
        for _ in range(accum):
            inputs = torch.randn(BATCH, 24, generator=draws)
            targets = (inputs[:, :5].argmax(-1)).long()
            yield (inputs * float("nan") if step == bad_step and rank == 1 else inputs), targets


def steps(group: RankGroup, parallel: ParallelConfig, *, dtype: Dtype = Dtype.fp32) -> dict[str, Any]:
    """Losses, votes (only rank 1 wishes to stop, and only in one step) and weights."""
    state, stepper = build(group, parallel, dtype=dtype)
    data, losses, stops, skipped = batches(group.rank), [], [], []
    for step in range(NUM_STEPS):
        wish = group.rank == 1 and step == WISH
        before = state.model.wide.weight.detach().clone()
        result = stepper.step(state, data, lr=0.05, wish_to_stop=wish)
        skipped.append(torch.equal(before, state.model.wide.weight))
        losses.append(result.mean_loss(group))
        stops.append(result.should_stop)
    return {
        "losses": losses, "stops": stops, "skipped": skipped,
        "weights": torch.cat([weight.detach().flatten() for weight in state.model.parameters()]).tolist(),
        "errors": sum(int(each.count_nonzero()) for each in state.more["powersgd"].errors.values())
        if "powersgd" in state.more else 0,
    }  # fmt: skip


def bad_step(group: RankGroup) -> dict[str, Any]:
    """A NaN on rank 1 in the first step with thin matrices, and in a later one."""
    said: dict[str, Any] = {}
    for bad in (START, START + 2):
        state, stepper = build(group, powersgd())
        data, hook = batches(group.rank, bad_step=bad), state.more["powersgd"]
        for step in range(NUM_STEPS):
            before = {index: each.clone() for index, each in hook.errors.items()}
            weights = state.model.wide.weight.detach().clone()
            stepper.step(state, data, lr=0.05, wish_to_stop=False)
            if step == bad:
                none = {index: torch.zeros_like(each) for index, each in hook.errors.items()}
                kept = [torch.equal(each, (before or none)[index]) for index, each in hook.errors.items()]
                said[f"kept_{bad}"] = all(kept) and torch.equal(weights, state.model.wide.weight)
        tensors = [*hook.errors.values(), *hook.state_dict()["q"].values(), *state.model.parameters()]
        said[f"finite_{bad}"] = all(bool(torch.isfinite(each).all()) for each in tensors)
        said[f"skipped_{bad}"] = state.guard.total
    return said


def thin(group: RankGroup) -> dict[str, Any]:
    """One sample a rank: the mean of two gradients has rank 2, so two columns keep all of it, and one does not."""
    weights = []
    for num_columns in (0, 2, 1):
        torch.manual_seed(5)
        model = nn.Linear(32, 40, bias=False)
        parallel = powersgd(num_columns) if num_columns else ParallelConfig()
        loss = VotingLoss(model, CrossEntropy())
        module = share(loss, group, build_mesh(parallel, group), parallel, deterministic=True)
        more = add_comm_hook(module, parallel, seed=1)
        assert bool(num_columns) is bool(more)
        optimizer, draws = torch.optim.SGD(model.parameters(), lr=0.5), torch.Generator().manual_seed(group.rank)
        for _ in range(5):
            batch = torch.randn(1, 32, generator=draws), torch.randint(40, (1,), generator=draws)
            module(batch, torch.zeros(())).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        weights.append(model.weight.detach().flatten())
    return {
        name: (weights[0] - each).abs().max().item() for name, each in zip(("two", "one"), weights[1:], strict=True)
    }


def resumed(group: RankGroup) -> dict[str, Any]:
    """The hook's state into a hook that is new: the same steps from there on."""
    weights = []
    state, stepper = build(group, powersgd())
    saved: dict[str, Any] = {}
    data = list(batches(group.rank))
    for step in range(NUM_STEPS):
        if step == NUM_STEPS // 2:
            copied = {name: each.state_dict() for name, each in state.objects().items() if hasattr(each, "state_dict")}
            saved = torch.utils._pytree.tree_map(
                lambda each: each.clone() if isinstance(each, torch.Tensor) else each, copied
            )
        stepper.step(state, iter([data[step]]), lr=0.05, wish_to_stop=False)
    weights.append(torch.cat([each.detach().flatten() for each in state.model.parameters()]))
    for forget in (False, True):
        state, stepper = build(group, powersgd())
        if forget:
            saved["powersgd"]["errors"] = {i: torch.zeros_like(e) for i, e in saved["powersgd"]["errors"].items()}
        for name, each in state.objects().items():
            if hasattr(each, "load_state_dict"):
                each.load_state_dict(saved[name])
        for step in range(NUM_STEPS // 2, NUM_STEPS):
            stepper.step(state, iter([data[step]]), lr=0.05, wish_to_stop=False)
        weights.append(torch.cat([each.detach().flatten() for each in state.model.parameters()]))
    return {"same": torch.equal(weights[0], weights[1]), "without_errors": torch.equal(weights[0], weights[2])}


def sharded_in_backward(group: RankGroup) -> dict[str, Any]:
    """FSDP's weights after some steps, and with each updated as soon as its part of the gradient is there."""
    weights, gradients = [], []
    for is_in_backward in (False, True):
        state, stepper = build(group, ParallelConfig(strategy=Strategy.fsdp), clip=None)
        state.guard = StepGuard(None)
        if is_in_backward:
            step_in_backward(state.optimizer)
        data = batches(group.rank)
        stops = [stepper.step(state, data, lr=0.05, wish_to_stop=step == WISH).should_stop for step in range(NUM_STEPS)]
        assert stops == [step == WISH for step in range(NUM_STEPS)]
        weights.append([each.to_local().tolist() for each in state.model.parameters()])
        stepper.module(next(batches(group.rank)), torch.zeros(())).backward()
        gradients.append(sum(each.grad is not None for each in state.model.parameters()))
    return {"same": weights[0] == weights[1], "gradients": gradients}


def powersgd(rank: int = 2) -> ParallelConfig:
    return ParallelConfig(
        comm_hook=CommHook.powersgd, powersgd_start_step=START, powersgd_rank=rank, bucket_cap_mb=0.002
    )


def count(group: RankGroup, strategy: Strategy, accum: int, hook: CommHook = CommHook.none) -> dict[str, int]:
    """Collectives of one step, the third, by name."""
    parallel = ParallelConfig(strategy=strategy, bucket_cap_mb=0.002, comm_hook=hook, powersgd_start_step=2)
    state, stepper = build(group, parallel, accum=accum, clip=None)
    data = batches(group.rank, accum=accum)
    for _ in range(2):
        stepper.step(state, data, lr=0.05, wish_to_stop=False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        stepper.step(state, data, lr=0.05, wish_to_stop=True)
    names = [event.name.removeprefix("c10d::") for event in seen.events() if event.name.startswith("c10d::")]
    found = {name: names.count(name) for name in sorted(set(names))}
    if hook is CommHook.powersgd:  # the profiler does not see threads of gloo
        with unittest.mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as called:
            stepper.step(state, data, lr=0.05, wish_to_stop=True)
        found = {"allreduce_": called.call_count}
    if strategy is Strategy.fsdp:
        assert all(isinstance(each, DTensor) for each in state.model.parameters())
    return found


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    group = start_group(str(folder), rank, 2)
    ways = {
        "none": ParallelConfig(),
        "bf16": ParallelConfig(comm_hook=CommHook.bf16),
        "fp16": ParallelConfig(comm_hook=CommHook.fp16),
        "powersgd": powersgd(),
        "small_buckets": ParallelConfig(bucket_cap_mb=0.002),
    }
    said: dict[str, Any] = {name: steps(group, parallel) for name, parallel in ways.items()}
    # 2^20 as a loss scale: gradients and the flag are infinite in fp16.
    said["fp16_scaled"] = steps(group, ways["fp16"], dtype=Dtype.fp16)
    said |= {"bad_step": bad_step(group), "thin": thin(group), "resumed": resumed(group)}
    said["sharded_in_backward"] = sharded_in_backward(group)
    said["counts"] = {
        f"{strategy.value}-{hook.value}-{accum}": count(group, strategy, accum, hook)
        for strategy, hook, accum in (
            (Strategy.ddp, CommHook.none, 1), (Strategy.ddp, CommHook.none, 4), (Strategy.ddp, CommHook.bf16, 4),
            (Strategy.ddp, CommHook.powersgd, 4), (Strategy.fsdp, CommHook.none, 1), (Strategy.fsdp, CommHook.none, 4),
        )
    }  # fmt: skip
    (folder / f"said-{rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
    leave()
