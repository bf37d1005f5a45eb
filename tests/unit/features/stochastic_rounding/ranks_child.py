"""Program of test_ranks.py: given gradients on each way to share weights out, told in FOLDER/KIND-RANK.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp
import torch.distributed.optim
from torch import nn

from hpc_trainer.config.schema.optim import LionConfig
from hpc_trainer.config.schema.parallel import Dtype, ParallelConfig, PrecisionConfig
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.tasks.cross_entropy import CrossEntropy
from hpc_trainer.training.build import make_optimizer
from hpc_trainer.training.parallel.mesh import build_mesh
from hpc_trainer.training.parallel.share import StopVote, VotingLoss, share
from hpc_trainer.training.state import TrainState
from hpc_trainer.training.step import Stepper
from tests.unit.features.stochastic_rounding.ways import KINDS
from tests.unit.training.built_parts import building_of
from tests.unit.training.checkpoint.reshard_child import on_ranks
from tests.unit.training.optim.given_gradients import give_gradients
from tests.unit.training.parallel.mesh_step_child import whole
from tests.unit.training.parallel.shard_builders import Hard


def build(parallel: ParallelConfig, group: RankGroup) -> tuple[TrainState, Stepper]:
    """As a run does it: the model is bf16 before ranks share it. Collective."""
    config = TrainConfig(
        optim=LionConfig(lr=0.01, weight_decay=0.1), precision=PrecisionConfig(compute_dtype=Dtype.bf16_sr),
        parallel=parallel,
    )  # fmt: skip
    mesh = build_mesh(parallel, group)
    building = building_of(config, mesh)
    torch.manual_seed(5)
    model: nn.Module = Hard(has_norm=False)
    for each in building.abilities:
        each.on_device(model, building)
    loss = VotingLoss(model, CrossEntropy())
    module = share(loss, group, mesh, parallel, deterministic=True)
    optimizer = make_optimizer(building, model)
    state = TrainState(model=model, optimizer=optimizer, scaler=torch.amp.GradScaler("cpu", enabled=False))
    for each in building.abilities:
        each.on_state(state, module, building)
    stepper = Stepper(
        module=module, vote=StopVote(loss, group, mesh), precision=config.precision, device=group.device,
        grad_accum_steps=2, max_grad_norm=0.5,
    )  # fmt: skip
    return state, stepper


def play(kind: str, group: RankGroup) -> dict[str, Any]:
    state, stepper = build(KINDS[kind][1], group)
    for step in range(3):
        give_gradients(state.model, step, dtype=torch.bfloat16)
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
        state.step += 1
    weights = {name: whole(weight).float().flatten().tolist() for name, weight in state.model.named_parameters()}
    formats = sorted({str(weight.dtype) for weight in stepper.module.parameters()})
    moments = getattr(state.optimizer, "optim", state.optimizer).state.values()
    generator = torch.Generator().manual_seed(7)
    losses = []
    for _ in range(8):
        inputs = torch.randn(16, 6, generator=generator)
        batches = [(part, (part.sum(dim=1) > 0).long()) for part in inputs.chunk(2 * group.world_size)]
        result = stepper.step(state, iter(batches[group.rank :: group.world_size]), lr=0.01, wish_to_stop=False)
        losses.append(result.mean_loss(group))
        state.step += 1
    after = {name: whole(weight).float().flatten().tolist() for name, weight in state.model.named_parameters()}
    return {
        "weights": weights, "formats": formats, "losses": losses, "after": after,
        "moments": sorted({str(value.dtype) for each in moments for value in each.values()}),
    }  # fmt: skip


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    for kind, (world_size, _) in KINDS.items():

        def act(group: RankGroup, kind: str = kind) -> None:
            (folder / f"{kind}-{group.rank}.json").write_text(json.dumps(play(kind, group)))

        on_ranks(world_size, folder, act)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
