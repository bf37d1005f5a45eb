"""Root of the configuration of one run. Its sections are the groups of `conf/`, in reading order."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpc_trainer.config.schema.cluster import BudgetConfig, ClusterConfig, HardwareConfig, PoolConfig, SnapshotConfig
from hpc_trainer.config.schema.data import DataConfig
from hpc_trainer.config.schema.key import (
    ALWAYS,
    APART,
    COUNTS,
    INCOMPATIBLE,
    ONCE_SET,
    SAFE,
    SCHEDULE,
    key,
    of_feature,
    only_with,
    section,
    with_feature_keys,
)
from hpc_trainer.config.schema.model import ModelConfig
from hpc_trainer.config.schema.optim import OptimConfig, ScheduleConfig
from hpc_trainer.config.schema.output import CheckpointConfig, MonitorConfig, NotifyConfig, TrackerConfig
from hpc_trainer.config.schema.parallel import ParallelConfig, PrecisionConfig
from hpc_trainer.config.schema.task import TaskConfig

if TYPE_CHECKING:  # at run time `with_feature_keys` gets them
    from hpc_trainer.features.augment import AugmentConfig
    from hpc_trainer.features.early_stop import EarlyStopConfig
    from hpc_trainer.features.init_from import InitFromConfig
    from hpc_trainer.features.lora import LoraConfig
    from hpc_trainer.features.prune import PruneConfig
    from hpc_trainer.features.qat import QatConfig
    from hpc_trainer.features.replay import ReplayConfig
    from hpc_trainer.features.spike_guard import GuardConfig


class CommandPer(str, enum.Enum):
    """Unit for which `train.command` is started once."""

    rank = "rank"
    node = "node"


class CommandEnv(str, enum.Enum):
    """Environment variables that tell a program its rank and where the other ranks are."""

    auto = "auto"
    torchrun = "torchrun"
    tensorflow = "tensorflow"


class CommandSignal(str, enum.Enum):
    """Signal that the program gets when the run must stop."""

    TERM = "TERM"
    INT = "INT"
    USR1 = "USR1"
    USR2 = "USR2"


AUTO = "auto"
"""Value of `train.micro_batch_size` with which the run finds the size itself."""


class Recompute(str, enum.Enum):
    """Activations of a block that the backward pass computes again."""

    none = "none"
    selective = "selective"
    full = "full"
    budget = "budget"


class CompileScope(str, enum.Enum):
    """Unit that is compiled as a whole."""

    model = "model"
    blocks = "blocks"


class CompileMode(str, enum.Enum):
    """Effort of the compiler: torch.compile's `mode`, with underscores."""

    default = "default"
    reduce_overhead = "reduce_overhead"
    max_autotune = "max_autotune"


@dataclass(kw_only=True, slots=True)
@with_feature_keys
class LoopConfig:
    """`train`: the loop. global_batch_size = micro_batch_size × grad_accum_steps × data-parallel ranks.

    Data-parallel ranks are world_size / (parallel.tensor_parallel × parallel.pipeline_parallel): all ranks if both are
    1.
    """

    main: str | None = key(None, ALWAYS, ONCE_SET, INCOMPATIBLE)
    """Dotted name of your own `main(config, run)`, trusted by --trust (docs/own_loop.md); null: the shared loop."""
    command: str | None = key(None, ALWAYS, ONCE_SET, INCOMPATIBLE, in_graph=False)
    """Your own program instead of the shared training loop (docs/any_program.md), for example `python train.py --lr
    {params.lr} --out {run.dir}`: arguments with placeholders, without a shell. `submit --command` sets it."""
    command_per: CommandPer = key(CommandPer.rank, only_with("train.command"), ONCE_SET, INCOMPATIBLE, in_graph=False)
    """rank: the program is started once for each rank, that is for each GPU. node: once for each node, with all its
    GPUs and cores, for programs that start their own ranks, as torchrun, accelerate launch and mpirun do."""
    command_env: CommandEnv = key(CommandEnv.auto, only_with("train.command"), APART, SAFE, in_graph=False)
    """Choice of torchrun's variables that the program gets, such as RANK, WORLD_SIZE and MASTER_ADDR. auto: all if the
    run has several ranks, and none for one rank, because many programs start distributed training if RANK is set.
    torchrun: all of them for one rank too. tensorflow: as auto, and also TF_CONFIG, in which each start of the program
    is a worker."""
    command_signal: CommandSignal = key(CommandSignal.TERM, only_with("train.command"), APART, SAFE, in_graph=False)
    """Signal that the program and its children get when the run must stop. The program must then save and exit."""
    command_dir: str | None = key(None, only_with("train.command"), APART, SAFE, in_graph=False)
    """Folder in which the program starts; null: the folder in which the run is submitted. run, or {run.dir}: the run's
    own folder, for a program that writes into its working folder. Scripts of the command are then found where you
    submit."""
    command_from: str | None = key(None, only_with("train.command"), APART, SAFE, in_graph=False)
    """Folder in which the scripts of the command are found. null: the folder in which the program starts; if
    command_dir is the run's own folder, the folder in which you submit."""
    num_steps: int = key(200, ALWAYS, COUNTS, SCHEDULE, limits="≥ 1")
    """Optimizer steps of the whole run."""
    global_batch_size: int = key(64, ALWAYS, COUNTS, SCHEDULE, limits="≥ 1")
    """Samples of one optimizer step over all ranks."""
    batch_per_rank: bool = key(False, ALWAYS, ONCE_SET, SAFE)
    """Whether global_batch_size is the number of samples for one rank; it is multiplied by the number of ranks when the
    run is planned (weak scaling)."""
    micro_batch_size: int | str | None = key(None, ALWAYS, COUNTS, SCHEDULE, in_graph=True, limits="≥ 1")
    """Samples of one forward pass on one rank. null: follows from global_batch_size and grad_accum_steps. auto: the
    largest size that fits, found when the run first starts and kept from then on; grad_accum_steps follows, and the
    global batch stays."""
    memory_margin: float = of_feature("memory")
    grad_accum_steps: int | None = key(None, ALWAYS, COUNTS, SCHEDULE, limits="≥ 1")
    """Forward passes for each optimizer step; null: follows from global_batch_size and micro_batch_size, else 1."""
    max_grad_norm: float | None = key(1.0, ALWAYS, COUNTS, SCHEDULE, limits="> 0")
    """Gradients are scaled down to this L2 norm over all weights; null: no clipping."""
    eval_every_steps: int = key(0, ALWAYS, COUNTS, SAFE, limits="≥ 0")
    """Steps between evaluations; 0: only at the end."""
    deterministic: bool = key(True, ALWAYS, COUNTS, SCHEDULE, in_graph=True)
    """true: the same bits after a resume (deterministic kernels, fixed reduction order); on GPUs it may cost speed.
    false: cuDNN tries its kernels and takes the fastest."""
    logical_ranks: int | None = key(None, ALWAYS, ONCE_SET, SCHEDULE, in_graph=True, limits="≥ 1")
    """The same bits on any number of ranks that divides this number: the batch is cut into this many parts, whichever
    rank computes them. A power of two; then global_batch_size = micro_batch_size × grad_accum_steps × logical_ranks.
    null: off."""
    ema_decay: float | None = of_feature("averaged_weights")
    freeze: list[str] = of_feature("freeze")
    lora: LoraConfig = of_feature("lora")
    early_stop: EarlyStopConfig = of_feature("early_stop")
    label_smoothing: float = key(0.0, ALWAYS, ONCE_SET, SCHEDULE, in_graph=True, limits="[0, 1)")
    """Share of the target's probability that is spread evenly over all classes; evaluations use the plain loss."""
    loss_chunk_size: int | None = of_feature("chunked_loss")
    max_skipped_steps: int | None = key(10, ALWAYS, ONCE_SET, SCHEDULE, limits="≥ 0")
    """Largest number of steps in a row whose gradient is not finite (NaN, inf). Such a step changes no weight; one more
    ends the run. 0: the first one ends the run. null: no check. The scaler of fp16 skips steps by itself while it
    searches its scale."""
    guard: GuardConfig = of_feature("spike_guard")
    recompute: Recompute = key(Recompute.none, ALWAYS, ONCE_SET, SCHEDULE, in_graph=True)
    """Activation checkpointing of the model's blocks. full: only a block's inputs are kept (least memory, about a third
    more time). selective: the results of its matrix products are kept too. Both give the same bits as none on a CPU.
    budget: the compiler chooses what to compute again, within `recompute_budget`; with `compile`, without dropout."""
    recompute_budget: float = of_feature("recompute_budget")
    channels_last: bool = of_feature("channels_last")
    compile: bool = key(False, ALWAYS, ONCE_SET, SCHEDULE)
    """The step of the shared loop runs through torch.compile: faster steps after a start that takes up to minutes
    longer. The last bits differ from those without it, and are the same after a resume. On a CPU it needs a C++
    compiler. Evaluations are not compiled. Compiled code is kept in the sweep's folder, for its other runs and
    restarts."""
    compile_scope: CompileScope = key(
        CompileScope.model, only_with("train.compile=true"), ONCE_SET, SCHEDULE, in_graph=True
    )
    """model: the whole model with its loss. blocks: each layer of a transformer or ResNet by itself, equal layers once:
    a shorter start, and parallel=fsdp gathers their weights one by one as it does without compile."""
    compile_mode: CompileMode = key(
        CompileMode.default, only_with("train.compile=true"), ONCE_SET, SCHEDULE, in_graph=True
    )
    """reduce_overhead: CUDA graphs, for steps of many small kernels. max_autotune: tries kernels, for a longer
    start."""

    def __post_init__(self) -> None:
        # OmegaConf does not turn a text into a number for a key that may be a text: "8" of an environment variable
        # would stay a text.
        if isinstance(self.micro_batch_size, str) and self.micro_batch_size.isdecimal():
            self.micro_batch_size = int(self.micro_batch_size)

    @property
    def is_batch_auto(self) -> bool:
        """True if the run finds its micro-batch itself."""
        return self.micro_batch_size == AUTO

    @property
    def given_micro_batch_size(self) -> int | None:
        """Micro-batch size if it is a number, else None."""
        return self.micro_batch_size if isinstance(self.micro_batch_size, int) else None


class OnFailure(str, enum.Enum):
    """Reaction of a run to the failure or cancel of a run that it follows."""

    wait = "wait"
    cancel = "cancel"
    start = "start"


@dataclass(kw_only=True, slots=True)
class AfterConfig:
    """`after`: runs that must be COMPLETED before the run starts (docs/chain.md)."""

    runs: list[str] = key([], ALWAYS, APART)
    """Sweeps and runs for which the run waits: SWEEP, SWEEP/RUN, or the folder of either. A sweep means all its runs.
    `after=A,B/RUN` is a short form. If the source of `init_from` is a run that is not complete, the run waits for it
    automatically."""
    on_failure: OnFailure = key(OnFailure.wait, ALWAYS, APART)
    """Reaction of the run if a run that it follows fails or is cancelled. wait: the run is HELD until the other one is
    retried and complete. cancel: the run is cancelled. start: the run starts as if the other one were complete."""
    content: str | None = key(None, only_with("after.runs"), ONCE_SET)
    """SHA-256 of the runs that the command names by {after.NAME.checkpoint}; filled in by `plan`."""


@dataclass(kw_only=True, slots=True)
class LocalConfig:
    """`local`: the executor for machines without Slurm."""

    max_parallel: int = key(1, ALWAYS, limits="≥ 1")
    """Number of runs that work at the same time."""


@dataclass(kw_only=True, slots=True)
class PathsConfig:
    runs_dir: str | None = key(None, ALWAYS)
    """Folder of all sweeps; null: $HPC_TRAINER_RUNS, else ./runs."""
    group_readable: bool = key(False, ALWAYS)
    """Folders 0750 and files 0640 instead of 0700 and 0600."""


@dataclass(kw_only=True, slots=True)
class SweepBlock:
    """Block of `sweep.blocks`: a separate grid, to which the entries of `sweep` for all blocks are added."""

    axes: dict[str, Any] = key({}, ALWAYS)
    """Key or group -> list of values. It replaces an axis of the same key that holds for all blocks."""
    zip: list[dict[str, Any]] = key([], ALWAYS)
    """Axes that step together: each item maps keys or groups to lists of equal length."""
    exclude: list[str] = key([], ALWAYS)
    """Conditions: points of this block for which one is true are left out."""


@dataclass(kw_only=True, slots=True)
class SweepStage:
    """Stage of `sweep.stages`: a grid of its own, which may follow earlier stages by their names."""

    name: str = key("", ALWAYS)
    """Name of the stage; its sweep is NAME-STAGE."""
    hardware: str | None = key(None, ALWAYS)
    """Hardware profile of the stage; null: that of the command line."""
    overrides: list[str] = key([], ALWAYS)
    """Overrides as on the command line, axes too: `init_from=best:pretrain`, `optim.lr=1e-3,1e-4`. A key on the command
    line wins."""


@dataclass(kw_only=True, slots=True)
class SweepConfig:
    """`sweep`: a grid, kept in a file instead of the command line."""

    axes: dict[str, Any] = key({}, ALWAYS)
    """Key or group -> list of values. An axis of the same key on the command line wins."""
    zip: list[dict[str, Any]] = key([], ALWAYS)
    """Axes that step together: each item maps keys or groups to lists of equal length."""
    exclude: list[str] = key([], ALWAYS)
    """Conditions, such as `model == 'mlp' and optim.lr > 1e-3`: points for which one is true are left out."""
    blocks: list[SweepBlock] = key([], ALWAYS)
    """Grids that are joined, one after the other; []: one grid."""
    stages: list[SweepStage] = key([], ALWAYS)
    """Chain of grids, each in a sweep of its own (docs/chain.md); []: one grid. Other keys of `sweep` exclude it."""
    forms: list[dict[str, Any]] = key([], ALWAYS)
    """Exports of one trained run, for `hpc-trainer export RUN sweep=compress`: each with `to`, and with `quantize` and
    `prune` as the options of that name take them. Not a grid."""


class Sampler(str, enum.Enum):
    """Way in which a search draws the values of its next trial, and whether trials pause at rungs."""

    none = "none"
    random = "random"
    quasi_random = "quasi_random"
    tpe = "tpe"
    gp = "gp"
    cma_es = "cma_es"
    asha = "asha"
    hyperband = "hyperband"
    asha_tpe = "asha_tpe"


class SearchMode(str, enum.Enum):
    """Direction in which the metric of a search improves."""

    min = "min"
    max = "max"


class FailedTrial(str, enum.Enum):
    """Value of a trial that has failed, as the sampler gets it."""

    worst = "worst"
    skip = "skip"


@dataclass(kw_only=True, slots=True)
class SearchConfig:
    """`search`: trials drawn from ranges of values, in place of a grid (docs/search.md)."""

    sampler: Sampler = key(Sampler.none, ALWAYS)
    """Way to draw trials; `search=tpe` is short for `search.sampler=tpe`. random, quasi_random, asha and hyperband need
    no package, the others Optuna. asha, hyperband and asha_tpe pause trials at rungs. none: no search."""
    metric: str = key("eval_loss", only_with("search.sampler"))
    """Metric that the search improves: one that runs log or return."""
    mode: SearchMode | None = key(None, only_with("search.sampler"))
    """min: smaller is better; max: larger is better; null: min for losses, errors and perplexity, else max."""
    trials: int = key(32, only_with("search.sampler"), limits="≥ 1")
    """Number of trials. A larger number later continues the search."""
    parallel: int = key(1, only_with("search.sampler"), limits="≥ 1")
    """Number of trials that work at the same time."""
    seed: int = key(0, only_with("search.sampler"), limits="≥ 0")
    """Seed of the draws. The seed of the runs is `seed`."""
    failed: FailedTrial = key(FailedTrial.worst, only_with("search.sampler"))
    """worst: a failed trial, or one whose metric is NaN, counts as the worst value so far. skip: it is left out."""
    from_sweep: str | None = key(None, only_with("search.sampler=tpe", "search.sampler=gp", "search.sampler=asha_tpe"))
    """Sweep of an earlier search, whose trials the sampler knows from the beginning if they fit into the space;
    `search.from=SWEEP` is short for it."""
    when: list[str] = key([], only_with("search.sampler"))
    """Conditions of axes, written `KEY if CONDITION`: an axis has a value only in trials whose other values fulfil the
    condition, such as `optim.momentum if optim == 'sgd'`."""
    median: bool = key(
        False,
        only_with(
            "search.sampler=random", "search.sampler=quasi_random", "search.sampler=tpe", "search.sampler=gp",
            "search.sampler=cma_es",
        ),
    )  # fmt: skip
    """Pause each trial at its rungs, and let it continue only if its value there is at least as good as the median of
    all values at that rung. The first five trials at a rung always continue."""
    rungs: list[int] = key(
        [],
        only_with(
            "search.sampler=asha", "search.sampler=hyperband", "search.sampler=asha_tpe", "search.median=true"
        ),
        limits="≥ 1",
    )  # fmt: skip
    """Steps at which trials pause, in ascending order; [] takes train.num_steps divided by powers of `search.eta`. A
    program's steps are those that it logs."""
    eta: int = key(
        4,
        only_with(
            "search.sampler=asha", "search.sampler=hyperband", "search.sampler=asha_tpe", "search.median=true"
        ),
        limits="≥ 2",
    )  # fmt: skip
    """Number of trials at a rung of which one is promoted to the next rung; with `search.median` only the distance of
    the default rungs."""


@dataclass(kw_only=True, slots=True)
@with_feature_keys
class TrainConfig:
    experiment_name: str = key("train", ALWAYS, APART, SAFE, in_graph=False)
    """Name of the experiment; each file of experiment/ sets its own."""
    sweep_name: str | None = key(None, ALWAYS, APART, SAFE, in_graph=False)
    """Name of the sweep, and of its folder under runs_dir; null: experiment_name."""
    seed: int = key(0, ALWAYS, COUNTS, INCOMPATIBLE, in_graph=False, limits="0 to 4,294,967,295")
    """Seed of weights, data order and dropout."""
    hardware: HardwareConfig = section(HardwareConfig, in_graph=False)
    cluster: ClusterConfig = section(ClusterConfig, APART, SAFE, in_graph=False)
    model: ModelConfig = section(ModelConfig, resume=INCOMPATIBLE, in_graph=True)
    data: DataConfig = section(DataConfig, resume=INCOMPATIBLE, in_graph=True)
    augment: AugmentConfig = of_feature("augment")
    task: TaskConfig = section(TaskConfig, ONCE_SET, INCOMPATIBLE, in_graph=True)
    optim: OptimConfig = section(OptimConfig, resume=SCHEDULE, in_graph=False)
    schedule: ScheduleConfig = section(ScheduleConfig, resume=SCHEDULE, in_graph=False)
    precision: PrecisionConfig = section(PrecisionConfig, in_graph=True)
    parallel: ParallelConfig = section(ParallelConfig, in_graph=False)
    train: LoopConfig = section(LoopConfig, in_graph=False)
    params: dict[str, Any] = key({}, ALWAYS, ONCE_SET, INCOMPATIBLE, in_graph=False)
    """Values for your own code, under your own names: `params.dim=64` needs no `+`. They must be valid JSON."""
    after: AfterConfig = section(AfterConfig, ONCE_SET, SAFE, in_graph=False)
    init_from: InitFromConfig = of_feature("init_from")
    replay: ReplayConfig = of_feature("replay")
    prune: PruneConfig = of_feature("prune")
    qat: QatConfig = of_feature("qat")
    checkpoint: CheckpointConfig = section(CheckpointConfig, APART, SAFE, in_graph=False)
    monitor: MonitorConfig = section(MonitorConfig, APART, SAFE, in_graph=False)
    notify: NotifyConfig = section(NotifyConfig, APART, SAFE, in_graph=False)
    tracker: TrackerConfig = section(TrackerConfig, APART, SAFE, in_graph=False)
    snapshot: SnapshotConfig = section(SnapshotConfig, APART, SAFE, in_graph=False)
    local: LocalConfig = section(LocalConfig, APART, SAFE, in_graph=False)
    paths: PathsConfig = section(PathsConfig, APART, SAFE, in_graph=False)
    sweep: SweepConfig = section(SweepConfig, APART, SAFE, in_graph=False)
    search: SearchConfig = section(SearchConfig, APART, SAFE, in_graph=False)
    budget: BudgetConfig = section(BudgetConfig, APART, SAFE, in_graph=False)
    pool: PoolConfig = section(PoolConfig, APART, SAFE, in_graph=False)
    trust: list[str] = key([], ALWAYS, APART, SAFE, in_graph=False)
    """Module prefixes that `_target_` and `train.main` may name, besides hpc_trainer and torch (`--trust`)."""
