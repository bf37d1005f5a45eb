"""A small model, its step and its data, the same for one rank and for many."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from hpc_trainer.config.schema.optim import SgdConfig
from hpc_trainer.config.schema.parallel import Dtype, ParallelConfig, PrecisionConfig
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.tasks.cross_entropy import CrossEntropy
from hpc_trainer.training.optim.build import build_optimizer
from hpc_trainer.training.parallel.mesh import build_mesh
from hpc_trainer.training.parallel.share import StopVote, VotingLoss, share
from hpc_trainer.training.state import TrainState
from hpc_trainer.training.step import Batch, Stepper, build_scaler

GLOBAL_BATCH = 16


def build_step(
    group: RankGroup, *, grad_accum_steps: int, dtype: Dtype = Dtype.fp32, max_grad_norm: float | None = 0.5
) -> tuple[TrainState, Stepper]:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 5))
    precision = PrecisionConfig(compute_dtype=dtype)
    loss, ddp = VotingLoss(model, CrossEntropy()), ParallelConfig()
    state = TrainState(
        model=model, optimizer=build_optimizer(SgdConfig(lr=0.1), model), scaler=build_scaler(precision, "cpu")
    )
    stepper = Stepper(
        module=share(loss, group, build_mesh(ddp, group), ddp, deterministic=True), vote=StopVote(loss, group),
        precision=precision, device=group.device, grad_accum_steps=grad_accum_steps, max_grad_norm=max_grad_norm,
    )  # fmt: skip
    return state, stepper


def batches_of(*, rank: int, world_size: int, grad_accum_steps: int, num_steps: int) -> Iterator[Batch]:
    """This rank's micro-batches; over all ranks and micro-batches each step has the same GLOBAL_BATCH samples."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(num_steps):
        inputs = torch.randn(GLOBAL_BATCH, 6, generator=generator)
        targets = torch.randint(5, (GLOBAL_BATCH,), generator=generator)
        parts = zip(
            inputs.chunk(world_size * grad_accum_steps), targets.chunk(world_size * grad_accum_steps), strict=True
        )
        for index, part in enumerate(parts):
            if index % world_size == rank:
                yield part
