"""The root: everything one run is made of. Its sections are the groups of `conf/`, in the order one reads them."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from hpc_trainer.config.schema.budget import BudgetConfig
from hpc_trainer.config.schema.checkpoint import CheckpointConfig
from hpc_trainer.config.schema.cluster import ClusterConfig
from hpc_trainer.config.schema.data.shipped import DataConfig
from hpc_trainer.config.schema.features.augment import AugmentConfig
from hpc_trainer.config.schema.features.compress import PruneConfig, QatConfig
from hpc_trainer.config.schema.features.early_stop import EarlyStopConfig
from hpc_trainer.config.schema.features.guard import GuardConfig
from hpc_trainer.config.schema.features.init_from import InitFromConfig
from hpc_trainer.config.schema.features.lora import LoraConfig
from hpc_trainer.config.schema.features.replay import ReplayConfig
from hpc_trainer.config.schema.hardware import HardwareConfig
from hpc_trainer.config.schema.key import (
    ALWAYS,
    APART,
    COUNTS,
    INCOMPATIBLE,
    ONCE_SET,
    SAFE,
    SCHEDULE,
    key,
    only_with,
    section,
)
from hpc_trainer.config.schema.model.shipped import ModelConfig
from hpc_trainer.config.schema.monitor import MonitorConfig
from hpc_trainer.config.schema.optim import OptimConfig
from hpc_trainer.config.schema.parallel import ParallelConfig
from hpc_trainer.config.schema.precision import PrecisionConfig
from hpc_trainer.config.schema.schedule import ScheduleConfig
from hpc_trainer.config.schema.snapshot import SnapshotConfig
from hpc_trainer.config.schema.task import TaskConfig
from hpc_trainer.config.schema.tracker import TrackerConfig


class CommandPer(str, enum.Enum):
    """How often `train.command` is started."""

    rank = "rank"
    node = "node"


class CommandEnv(str, enum.Enum):
    """The environment variables that tell a program its rank and where the other ranks are."""

    auto = "auto"
    torchrun = "torchrun"
    tensorflow = "tensorflow"


class CommandSignal(str, enum.Enum):
    """What the program hears when the run must stop."""

    TERM = "TERM"
    INT = "INT"
    USR1 = "USR1"
    USR2 = "USR2"


AUTO = "auto"
"""`train.micro_batch_size=auto`: the run finds the size itself."""


class Recompute(str, enum.Enum):
    """What of a block's activations the backward pass computes again."""

    none = "none"
    selective = "selective"
    full = "full"
    budget = "budget"


class CompileScope(str, enum.Enum):
    """What is compiled as one."""

    model = "model"
    blocks = "blocks"


class CompileMode(str, enum.Enum):
    """What the compiler tries: torch.compile's `mode`, with underscores."""

    default = "default"
    reduce_overhead = "reduce_overhead"
    max_autotune = "max_autotune"


@dataclass(kw_only=True, slots=True)
class LoopConfig:
    """`train`: the loop. global_batch_size = micro_batch_size × grad_accum_steps × data-parallel ranks.

    Data-parallel ranks are world_size / (parallel.tensor_parallel × parallel.pipeline_parallel): all, where both are 1.
    """

    main: str | None = key(None, ALWAYS, ONCE_SET, INCOMPATIBLE)
    """Dotted name of your own `main(config, run)`, trusted by --trust (docs/own_loop.md); null: the shared loop."""
    command: str | None = key(None, ALWAYS, ONCE_SET, INCOMPATIBLE, in_graph=False)
    """A program of your own in place of a training of ours (docs/any_program.md), as `python train.py --lr {params.lr}
    --out {run.dir}`: words with placeholders, no shell. `submit --command` sets it."""
    command_per: CommandPer = key(CommandPer.rank, only_with("train.command"), ONCE_SET, INCOMPATIBLE, in_graph=False)
    """rank: the program is started once a rank, that is once a GPU. node: once a node, with all its GPUs and cores, for
    programs that start their own ranks, as torchrun, accelerate launch and mpirun do."""
    command_env: CommandEnv = key(CommandEnv.auto, only_with("train.command"), APART, SAFE, in_graph=False)
    """When the program finds RANK, WORLD_SIZE, MASTER_ADDR and the other names of torchrun. auto: if the run has
    several ranks, as many programs take RANK=0 alone for a distributed training. torchrun: with one rank too.
    tensorflow: as auto, and TF_CONFIG, in which each start of the program is a worker."""
    command_signal: CommandSignal = key(CommandSignal.TERM, only_with("train.command"), APART, SAFE, in_graph=False)
    """What the program and its children hear when the run must stop: save then, and exit."""
    command_dir: str | None = key(None, only_with("train.command"), APART, SAFE, in_graph=False)
    """Folder that the program starts in; null: the one in which the run is submitted. run, or {run.dir}: the run's own
    folder, for a program that writes where it stands. Scripts of the command are found where you submit then."""
    command_from: str | None = key(None, only_with("train.command"), APART, SAFE, in_graph=False)
    """Folder that scripts of the command are relative to; null: the one that the program starts in, and with a
    command_dir of the run's own the one in which the run is submitted."""
    num_steps: int = key(200, ALWAYS, COUNTS, SCHEDULE, limits="≥ 1")
    """Optimizer steps of the whole run."""
    global_batch_size: int = key(64, ALWAYS, COUNTS, SCHEDULE, limits="≥ 1")
    """Samples of one optimizer step over all ranks."""
    batch_per_rank: bool = key(False, ALWAYS, ONCE_SET, SAFE)
    """global_batch_size is meant for one rank, and multiplied by the ranks when the run is planned (weak scaling)."""
    micro_batch_size: int | str | None = key(None, ALWAYS, COUNTS, SCHEDULE, in_graph=True, limits="≥ 1")
    """Samples of one forward pass on one rank; null: what the other two leave; auto: the largest that fits, found when
    the run first starts and kept from then on. grad_accum_steps follows, and the global batch stays."""
    memory_margin: float = key(0.1, only_with("train.micro_batch_size=auto"), ONCE_SET, SAFE, limits="[0, 1)")
    """Share of a rank's memory that `micro_batch_size=auto` leaves free: for fragments and communication."""
    grad_accum_steps: int | None = key(None, ALWAYS, COUNTS, SCHEDULE, limits="≥ 1")
    """Forward passes for each optimizer step; null: what the other two leave, else 1."""
    max_grad_norm: float | None = key(1.0, ALWAYS, COUNTS, SCHEDULE, limits="> 0")
    """Gradients are scaled down to this L2 norm over all weights; null: no clipping."""
    eval_every_steps: int = key(0, ALWAYS, COUNTS, SAFE, limits="≥ 0")
    """Steps between evaluations; 0: only at the end."""
    deterministic: bool = key(True, ALWAYS, COUNTS, SCHEDULE, in_graph=True)
    """The same bits after a resume (deterministic kernels, fixed reduction order); on GPUs it may cost speed. false:
    cuDNN tries its kernels and takes the fastest."""
    logical_ranks: int | None = key(None, ALWAYS, ONCE_SET, SCHEDULE, in_graph=True, limits="≥ 1")
    """The same bits on any number of ranks that divides it: the batch is cut into so many parts, whoever computes them.
    A power of two; then global_batch_size = micro_batch_size × grad_accum_steps × logical_ranks. null: off."""
    ema_decay: float | None = key(None, ALWAYS, ONCE_SET, SCHEDULE, limits="(0, 1)")
    """Share of the averaged weights that a step keeps, as 0.999: evaluations use the average. null: none."""
    freeze: list[str] = key([], ALWAYS, ONCE_SET, INCOMPATIBLE, in_graph=True)
    """Names of weights, with * and ?, that training leaves as they are: no gradient, no decay, no moments. A norm
    whose running statistics are named too (as by 'stem.*') keeps and uses those."""
    lora: LoraConfig = section(LoraConfig, ONCE_SET, INCOMPATIBLE)
    early_stop: EarlyStopConfig = section(EarlyStopConfig, ONCE_SET, SCHEDULE)
    label_smoothing: float = key(0.0, ALWAYS, ONCE_SET, SCHEDULE, in_graph=True, limits="[0, 1)")
    """Share of the target's probability that all classes get alike; evaluations use the plain loss."""
    loss_chunk_size: int | None = key(None, ALWAYS, ONCE_SET, SCHEDULE, limits="≥ 1")
    """Rows (tokens) whose logits are held at a time, as 2048: for vocabularies whose logits would fill the memory.
    The output layer is computed once more for it. model=gpt, or one of your own that shows its head. null: all."""
    max_skipped_steps: int | None = key(10, ALWAYS, ONCE_SET, SCHEDULE, limits="≥ 0")
    """A step whose gradient is not finite (NaN, inf) changes no weight; one more than so many in a row end the run.
    0: the first one does. null: nobody looks. fp16's scaler skips steps by itself while it looks for its scale."""
    guard: GuardConfig = section(GuardConfig, ONCE_SET, INCOMPATIBLE)
    recompute: Recompute = key(Recompute.none, ALWAYS, ONCE_SET, SCHEDULE, in_graph=True)
    """Activation checkpointing of the model's blocks: full keeps a block's inputs alone (least memory, about a third
    more time), selective keeps the results of its matrix products too. The same bits as none on a CPU. budget: the
    compiler chooses what to compute again, so that `recompute_budget` is kept; with `compile`, without dropout."""
    recompute_budget: float = key(
        0.5, only_with("train.recompute=budget"), ONCE_SET, SCHEDULE, in_graph=True, limits="[0, 1]"
    )
    """Share of what the compiler would keep for the backward pass that `recompute=budget` may keep."""
    channels_last: bool = key(False, ALWAYS, ONCE_SET, SCHEDULE, in_graph=True)
    """Images and convolutions as NHWC in memory: on GPUs with tensor cores faster for CNNs in bf16 and fp16."""
    compile: bool = key(False, ALWAYS, ONCE_SET, SCHEDULE)
    """The step of the shared loop through torch.compile: faster steps after a start that takes up to minutes longer.
    Other last bits than without, and the same ones after a resume. On a CPU it needs a C++ compiler. Evaluations are
    not compiled. What was compiled is kept in the sweep's folder, for its other runs and restarts."""
    compile_scope: CompileScope = key(
        CompileScope.model, only_with("train.compile=true"), ONCE_SET, SCHEDULE, in_graph=True
    )
    """model: the whole model with its loss. blocks: each layer of a transformer or ResNet by itself, alike ones once:
    a shorter start, and parallel=fsdp gathers their weights one by one as it does without."""
    compile_mode: CompileMode = key(
        CompileMode.default, only_with("train.compile=true"), ONCE_SET, SCHEDULE, in_graph=True
    )
    """reduce_overhead: CUDA graphs, for steps of many small kernels. max_autotune: tries kernels: a longer start."""

    def __post_init__(self) -> None:
        # A key that may be a word is not made a number by OmegaConf: "8" of an environment variable would stay a text.
        if isinstance(self.micro_batch_size, str) and self.micro_batch_size.isdecimal():
            self.micro_batch_size = int(self.micro_batch_size)

    @property
    def is_batch_auto(self) -> bool:
        """True if the run finds its micro-batch itself."""
        return self.micro_batch_size == AUTO

    @property
    def given_micro_batch_size(self) -> int | None:
        """The micro-batch, where it is a number."""
        return self.micro_batch_size if isinstance(self.micro_batch_size, int) else None


@dataclass(kw_only=True, slots=True)
class LocalConfig:
    """`local`: the executor of machines without Slurm."""

    max_parallel: int = key(1, ALWAYS, limits="≥ 1")
    """Runs at the same time."""


@dataclass(kw_only=True, slots=True)
class PathsConfig:
    runs_dir: str | None = key(None, ALWAYS)
    """Folder of all sweeps; null: $HPC_TRAINER_RUNS, else ./runs."""
    group_readable: bool = key(False, ALWAYS)
    """Folders 0750 and files 0640 instead of 0700 and 0600."""


@dataclass(kw_only=True, slots=True)
class SweepBlock:
    """One block of `sweep.blocks`: a grid of its own, beside what stands in `sweep` for all blocks."""

    axes: dict[str, Any] = key({}, ALWAYS)
    """Key or group -> list of values. Replaces an axis of the same key that is for all blocks."""
    zip: list[dict[str, Any]] = key([], ALWAYS)
    """Axes that step together: each item maps keys or groups to lists of equal length."""
    exclude: list[str] = key([], ALWAYS)
    """Conditions: points of this block of which one is true are left out."""


@dataclass(kw_only=True, slots=True)
class SweepConfig:
    """`sweep`: a grid, kept in a file instead of the command line."""

    axes: dict[str, Any] = key({}, ALWAYS)
    """Key or group -> list of values. An axis of the same key on the command line wins."""
    zip: list[dict[str, Any]] = key([], ALWAYS)
    """Axes that step together: each item maps keys or groups to lists of equal length."""
    exclude: list[str] = key([], ALWAYS)
    """Conditions, as `model == 'mlp' and optim.lr > 1e-3`: points of which one is true are left out."""
    blocks: list[SweepBlock] = key([], ALWAYS)
    """Grids that are joined, one after the other; [] is one grid."""
    forms: list[dict[str, Any]] = key([], ALWAYS)
    """Of one trained run, for `hpc-trainer export RUN sweep=compress`: what is exported, each with `to`, and `quantize`
    and `prune` as the options of that name take them. No grid."""


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    experiment_name: str = key("train", ALWAYS, APART, SAFE, in_graph=False)
    """Set by each file of experiment/."""
    sweep_name: str | None = key(None, ALWAYS, APART, SAFE, in_graph=False)
    """Folder under runs_dir; null: experiment_name."""
    seed: int = key(0, ALWAYS, COUNTS, INCOMPATIBLE, in_graph=False, limits="0 to 4,294,967,295")
    """Seed of weights, data order and dropout."""
    hardware: HardwareConfig = section(HardwareConfig, in_graph=False)
    cluster: ClusterConfig = section(ClusterConfig, APART, SAFE, in_graph=False)
    model: ModelConfig = section(ModelConfig, resume=INCOMPATIBLE, in_graph=True)
    data: DataConfig = section(DataConfig, resume=INCOMPATIBLE, in_graph=True)
    augment: AugmentConfig = section(AugmentConfig, ONCE_SET, SCHEDULE, in_graph=False)
    task: TaskConfig = section(TaskConfig, ONCE_SET, INCOMPATIBLE, in_graph=True)
    optim: OptimConfig = section(OptimConfig, resume=SCHEDULE, in_graph=False)
    schedule: ScheduleConfig = section(ScheduleConfig, resume=SCHEDULE, in_graph=False)
    precision: PrecisionConfig = section(PrecisionConfig, in_graph=True)
    parallel: ParallelConfig = section(ParallelConfig, in_graph=False)
    train: LoopConfig = section(LoopConfig, in_graph=False)
    params: dict[str, Any] = key({}, ALWAYS, ONCE_SET, INCOMPATIBLE, in_graph=False)
    """Values for your own code, by names of your own: `params.dim=64` needs no `+`. What JSON can hold."""
    init_from: InitFromConfig = section(InitFromConfig, ONCE_SET, SAFE, in_graph=False)
    replay: ReplayConfig = section(ReplayConfig, ONCE_SET, INCOMPATIBLE, in_graph=False)
    prune: PruneConfig = section(PruneConfig, ONCE_SET, SCHEDULE, in_graph=False)
    qat: QatConfig = section(QatConfig, ONCE_SET, INCOMPATIBLE, in_graph=True)
    checkpoint: CheckpointConfig = section(CheckpointConfig, APART, SAFE, in_graph=False)
    monitor: MonitorConfig = section(MonitorConfig, APART, SAFE, in_graph=False)
    tracker: TrackerConfig = section(TrackerConfig, APART, SAFE, in_graph=False)
    snapshot: SnapshotConfig = section(SnapshotConfig, APART, SAFE, in_graph=False)
    local: LocalConfig = section(LocalConfig, APART, SAFE, in_graph=False)
    paths: PathsConfig = section(PathsConfig, APART, SAFE, in_graph=False)
    sweep: SweepConfig = section(SweepConfig, APART, SAFE, in_graph=False)
    budget: BudgetConfig = section(BudgetConfig, APART, SAFE, in_graph=False)
    trust: list[str] = key([], ALWAYS, APART, SAFE, in_graph=False)
    """Module prefixes whose `_target_` and `train.main` may be used, besides ours and torch (`--trust`)."""
