"""A model with all that makes sharding hard, trained a little by each strategy, with averages; its state as digests."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpc_trainer.config.schema.optim import AdamwConfig, OptimConfig
from hpc_trainer.config.schema.parallel import Dtype, ParallelConfig, PrecisionConfig, Strategy
from hpc_trainer.features.averaged_weights.averaged_weights import AveragedWeights
from hpc_trainer.features.offload import offload as optim_place
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.runtime.tensors import is_sharded
from hpc_trainer.tasks.cross_entropy import CrossEntropy
from hpc_trainer.training.checkpoint.objects import to_trees
from hpc_trainer.training.checkpoint.trees import Shard
from hpc_trainer.training.parallel.mesh import build_mesh
from hpc_trainer.training.parallel.share import StopVote, VotingLoss, share
from hpc_trainer.training.state import TrainState
from hpc_trainer.training.step import Stepper, build_scaler
from tests.unit.training.built_parts import optimizer_of

# Name -> (ranks, strategy, ZeRO-1, moments in host memory).
KINDS = {
    "single": (1, Strategy.none, False, False),
    "ddp2": (2, Strategy.ddp, False, False),
    "zero2": (2, Strategy.ddp, True, False),
    "fsdp2": (2, Strategy.fsdp, False, False),
    "zero2_offload": (2, Strategy.ddp, True, True),
    "fsdp2_offload": (2, Strategy.fsdp, False, True),
    "ddp4": (4, Strategy.ddp, False, False),
    "fsdp4": (4, Strategy.fsdp, False, False),
}


class Block(nn.Module):
    """What FSDP shards by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = inputs + self.narrow(torch.tanh(self.wide(inputs)))
        return outputs


class Hard(nn.Module):
    """Tied weights, rows that do not divide by the ranks, fewer rows than ranks, buffers, a weight that is frozen."""

    def __init__(self, *, has_norm: bool = True) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.again.weight = self.first.weight
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.BatchNorm1d(6) if has_norm else nn.Identity()
        self.gain = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.last = nn.Linear(6, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.again(torch.tanh(self.first(inputs))) * self.gain + self.frozen.sum()
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.last(self.norm(hidden))
        return logits


def build(
    kind: str,
    group: RankGroup,
    *,
    seed: int,
    dtype: Dtype = Dtype.fp32,
    grad_accum_steps: int = 2,
    has_norm: bool = True,
    optim: OptimConfig | None = None,
) -> tuple[TrainState, Stepper]:
    """Everything that a step needs, for a strategy of `KINDS`. Collective."""
    _, strategy, is_zero, is_offloaded = KINDS[kind]
    optim = dataclasses.replace(optim or AdamwConfig(lr=0.01), offload=is_offloaded)
    torch.manual_seed(seed)
    model = Hard(has_norm=has_norm)
    precision = PrecisionConfig(compute_dtype=dtype, init_scale=2.0**14, growth_interval=2)
    loss = VotingLoss(model, CrossEntropy())
    parallel = ParallelConfig(strategy=strategy, zero1=is_zero)
    mesh = build_mesh(parallel, group)
    module = share(loss, group, mesh, parallel, deterministic=True)
    optim_place.PIECE = 100  # bytes: many pieces a group
    state = TrainState(
        model=model,
        optimizer=optimizer_of(optim, model, zero1=is_zero, mesh=mesh),
        scaler=build_scaler(precision, "cpu"),
        more={"ema": (average := AveragedWeights(model, 0.9, module))},
    )
    stepper = Stepper(
        module=module, vote=StopVote(loss, group), precision=precision, device=group.device,
        grad_accum_steps=grad_accum_steps, max_grad_norm=0.5, after_update=[average.update],
    )  # fmt: skip
    return state, stepper


def digests(state: TrainState, group: RankGroup) -> dict[str, Any]:
    """SHA-256 of each tensor as a whole, by name, alike on all ranks; and by rank what is its own. Collective."""
    shared, own = to_trees(state.objects())
    mine = {name: _digest(tensor) for name, tensor in _whole(shared).items() if tensor is not None}
    told = group.gather(mine)
    together: dict[str, str] = {}
    for each in told:
        for name, value in each.items():
            is_buffer = "running" in name or "num_batches" in name
            assert is_buffer or together.setdefault(name, value) == value, f"{name} differs between ranks"
    return {"shared": together, "own": group.gather({name: _digest(each) for name, each in _whole(own).items()})}


def _whole(tree: Any, path: str = "") -> dict[str, Any]:
    """Path -> the whole of each leaf; None of what another rank has."""
    if isinstance(tree, Shard):
        return {path: tree.local}
    if is_sharded(tree):
        return {path: tree.full_tensor()}
    if isinstance(tree, dict):
        items = list(tree.items())
    elif isinstance(tree, (list, tuple)):
        items = list(enumerate(tree))
    else:
        return {path: tree}
    return {key: leaf for name, item in items for key, leaf in _whole(item, f"{path}/{name}").items()}


def _digest(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    data = leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{leaf.dtype} {list(leaf.shape)} {hashlib.sha256(data).hexdigest()}"


def start_group(folder: str, rank: int, world_size: int) -> RankGroup:
    """A gloo group that meets in a file."""
    if world_size > 1:
        store = dist.FileStore(f"{folder}/rendezvous-{world_size}", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    return RankGroup(rank=rank, world_size=world_size)
