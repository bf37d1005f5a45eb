"""gpt on each kind of mesh, and on one rank: the same steps of the same samples."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hpc_trainer.config.schema.model import GptConfig
from hpc_trainer.config.schema.optim import AdamwConfig, OptimConfig
from hpc_trainer.config.schema.parallel import Dtype, ParallelConfig, PrecisionConfig, Strategy
from hpc_trainer.config.schema.train import LoopConfig, Recompute
from hpc_trainer.features.averaged_weights.averaged_weights import AveragedWeights
from hpc_trainer.features.offload import offload as optim_place
from hpc_trainer.features.recompute.recompute import recompute_blocks
from hpc_trainer.features.tensor_parallel.tensor_parallel import MeshStepper, find_plan, share_layers
from hpc_trainer.models.gpt import Gpt
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.tasks.cross_entropy import CrossEntropy
from hpc_trainer.training.parallel.mesh import Mesh, build_mesh
from hpc_trainer.training.parallel.share import StopVote, VotingLoss, share
from hpc_trainer.training.state import StepGuard, TrainState
from hpc_trainer.training.step import Batch, Stepper, build_scaler
from tests.unit.training.built_parts import optimizer_of

# Name -> (ranks, how they share the work).
KINDS: dict[str, tuple[int, ParallelConfig]] = {
    "single": (1, ParallelConfig(strategy=Strategy.none)),
    "tp": (2, ParallelConfig(tensor_parallel=2)),
    "tp_ddp": (4, ParallelConfig(tensor_parallel=2)),
    "fsdp_tp": (4, ParallelConfig(strategy=Strategy.fsdp, tensor_parallel=2)),
    "hsdp": (4, ParallelConfig(strategy=Strategy.fsdp, data_parallel_replicate=2)),
}
TOLERANCE = 2e-6
"""Of losses and norms against one rank in fp32, relative: docs/reference/numerics.md has the table."""
VOCABULARY, SEQ_LEN, GLOBAL_BATCH, ACCUM = 64, 8, 8, 2


def sizes_of(num_layers: int = 1, dropout: float = 0.0) -> GptConfig:
    return GptConfig(num_layers=num_layers, num_heads=2, embed_dim=16, dropout=dropout)


def build(
    kind: str, group: RankGroup, *, seed: int = 3, dtype: Dtype = Dtype.fp32, dropout: float = 0.0, accum: int = ACCUM,
    recompute: Recompute = Recompute.none, num_layers: int = 1, compiled: LoopConfig | None = None,
    parallel: ParallelConfig | None = None, offload: bool = False, optim: OptimConfig | None = None,
) -> tuple[TrainState, Stepper, Mesh]:  # fmt: skip
    """Everything that a step needs. Collective; `seed` of rank 0 counts. `parallel`: instead of that of the kind.
    `offload`: moments in host memory.
    """
    parallel = parallel or KINDS[kind][1]
    mesh = build_mesh(parallel, group)
    torch.manual_seed(seed + group.rank)  # weights must become rank 0's
    model = Gpt(sizes_of(num_layers, dropout), input_shape=(SEQ_LEN,), num_classes=VOCABULARY)
    share_layers(model, mesh, find_plan(model, mesh))
    torch.manual_seed(1000 + mesh.data_rank)
    loss = VotingLoss(model, CrossEntropy())
    if compiled is not None:
        from hpc_trainer.features.compile.graphs import compile_step  # late: torch._dynamo is as slow as torch

        compile_step(loss, compiled)
    recompute_blocks(model, recompute)
    precision = PrecisionConfig(compute_dtype=dtype, init_scale=2.0**14, growth_interval=2)
    module = share(loss, group, mesh, parallel, deterministic=True)
    optim = optim or AdamwConfig(lr=0.01, offload=offload)
    optim_place.PIECE = 1000  # bytes: many pieces a group
    optimizer = optimizer_of(optim, model, zero1=parallel.zero1, mesh=mesh)
    state = TrainState(
        model=model, optimizer=optimizer, scaler=build_scaler(precision, "cpu"),
        guard=StepGuard(10), more={"ema": (average := AveragedWeights(model, 0.9, module))},
    )  # fmt: skip
    more = {} if mesh.model_group is None else {"mesh": mesh}
    stepper = (MeshStepper if more else Stepper)(
        module=module, vote=StopVote(loss, group, mesh), precision=precision, device=group.device,
        grad_accum_steps=accum, max_grad_norm=0.5, after_update=[average.update], **more,
    )  # fmt: skip
    return state, stepper, mesh


def batches_of(mesh: Mesh, num_steps: int, accum: int = ACCUM) -> Iterator[Batch]:
    """This rank's micro-batches: all data-parallel ranks' together are the same samples on any mesh."""
    generator = torch.Generator().manual_seed(9)
    for _ in range(num_steps):
        tokens = torch.randint(VOCABULARY, (GLOBAL_BATCH, SEQ_LEN), generator=generator)
        for index, part in enumerate(tokens.chunk(mesh.num_data_ranks * accum)):
            if index % mesh.num_data_ranks == mesh.data_rank:
                yield part, part // 8
