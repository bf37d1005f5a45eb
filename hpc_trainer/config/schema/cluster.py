"""`hardware/`, `cluster/`, `budget` and `snapshot/`: where runs work, what they may use, and their code."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from hpc_trainer.config.schema.key import (
    ALWAYS,
    APART,
    COUNTS,
    ONCE_SET,
    RULED,
    SAFE,
    SCHEDULE,
    key,
    only_with,
    section,
)


class Device(str, enum.Enum):
    """Device on which tensors are stored."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
    mps = "mps"
    xla = "xla"


class GpuRequest(str, enum.Enum):
    """Option by which GPUs are requested."""

    gpus_per_node = "gpus_per_node"
    gres = "gres"
    none = "none"


class Launcher(str, enum.Enum):
    """Program that starts the ranks on the nodes of a Slurm job."""

    srun = "srun"
    torchrun = "torchrun"


# Limits: sbatch keeps counts in C ints, and minutes as seconds of 32 bits.
@dataclass(kw_only=True, slots=True)
class HardwareConfig:
    name: str = key("unnamed", ALWAYS, APART, SAFE)
    """Name of the profile, as plans and results show it."""
    num_nodes: int = key(1, ALWAYS, COUNTS, SCHEDULE, limits="1 to 2,147,483,647")
    """Number of nodes of one run."""
    gpus_per_node: int = key(0, ALWAYS, COUNTS, SCHEDULE, limits="0 to 2,147,483,647")
    """GPUs a node, one rank for each; 0: CPUs only."""
    tasks_per_node: int | None = key(None, ALWAYS, COUNTS, SCHEDULE, limits="1 to 2,147,483,647")
    """Ranks on each node. null: one for each GPU, or 1 without GPUs."""
    cpus_per_gpu: int | None = key(None, RULED, COUNTS, SCHEDULE, limits="1 to 2,147,483,647")
    """CPU cores for each GPU's rank. Only with gpus_per_node > 0."""
    cpus_per_task: int | None = key(None, RULED, COUNTS, SCHEDULE, limits="1 to 2,147,483,647")
    """CPU cores for each rank. null: cpus_per_gpu, or 1."""
    mem_gb_per_node: float | None = key(None, RULED, APART, SAFE, limits="> 0")
    """Memory of a node in GB. At most one of the three memory keys may be set: Slurm takes one flag."""
    mem_gb_per_gpu: float | None = key(None, RULED, APART, SAFE, limits="> 0")
    """Memory for each GPU in GB."""
    mem_gb_per_cpu: float | None = key(None, RULED, APART, SAFE, limits="> 0")
    """Memory for each CPU in GB."""
    gpu_type: str | None = key(None, ALWAYS, COUNTS, SCHEDULE)
    """The site's gres name of the GPU, such as `a100`; null: any."""
    gpu_types: list[str] = key([], RULED, ONCE_SET, SCHEDULE)
    """Types of GPUs on any of which the run may start; `hardware=first:a,b` sets it if they differ."""
    gpu_request: GpuRequest = key(GpuRequest.gpus_per_node, ALWAYS, APART, SAFE)
    """gpus_per_node: `--gpus-per-node=a100:4`; gres: `--gres=gpu:a100:4`. Slurm allocates the same, but the submit
    filters of some sites check only one of the two, and Slurm before 19.05 knows only gres. none: no option, where
    every node has its GPUs and Slurm does not count them."""
    device: Device = key(Device.auto, ALWAYS, COUNTS, SCHEDULE)
    """auto: cuda if gpus_per_node > 0, else cpu. cuda: NVIDIA's GPUs, and AMD's in a ROCm build of torch. mps: Apple's
    GPU. xla: TPUs through torch-xla (`hpc_trainer[xla]`). mps and xla: one rank, fp32 or bf16."""
    partition: str | None = key(None, ALWAYS, APART, SAFE)
    """Slurm partition; null: the site's default."""
    qos: str | None = key(None, ALWAYS, APART, SAFE)
    """Slurm quality of service."""
    constraint: str | None = key(None, ALWAYS, APART, SAFE)
    """Slurm feature expression."""
    exclude: str | None = key(None, ALWAYS, APART, SAFE)
    """Host list of nodes that must not be used."""
    time_limit_min: int = key(60, ALWAYS, APART, SAFE, limits="1 to 35,791,394")
    """Wall-clock limit of one attempt in minutes."""
    launcher: Launcher = key(Launcher.srun, ALWAYS, APART, SAFE)
    """srun: one Slurm task a rank. torchrun: one task a node, in which torch.distributed.run starts the node's ranks,
    for sites that allow or bind only one task a node."""
    bind_cores: bool = key(True, ALWAYS, APART, SAFE)
    """Whether training ranks that Slurm has not bound divide the cores of their node's allocation, each near its GPU.
    Programs (`train.command`) keep what Slurm gives them."""
    whole_node: bool = key(False, ALWAYS, APART, SAFE)
    """Whether a run gets its nodes for itself (`--exclusive`), and all of their memory unless a memory key is set."""
    source: str = key("", ALWAYS, APART, SAFE)
    """Source of the figures."""
    checked: str = key("", ALWAYS, APART, SAFE)
    """Day on which the figures were checked, YYYY-MM-DD."""

    @property
    def ranks_per_node(self) -> int:
        """Ranks (Slurm tasks) on each node."""
        return self.tasks_per_node or max(1, self.gpus_per_node)

    @property
    def world_size(self) -> int:
        """Number of ranks of one run."""
        return self.num_nodes * self.ranks_per_node

    @property
    def cpus_per_rank(self) -> int:
        """CPU cores of each rank."""
        return self.cpus_per_task or self.cpus_per_gpu or 1

    @property
    def device_type(self) -> str:
        """`cpu`, `cuda`, `mps` or `xla`: the value of `device`; `auto` becomes `cuda` or `cpu`."""
        if self.device is Device.auto:
            return "cuda" if self.gpus_per_node else "cpu"
        return str(self.device.value)


class Executor(str, enum.Enum):
    """Program that starts the runs."""

    local = "local"
    slurm = "slurm"


class Container(str, enum.Enum):
    """Program that puts the ranks into a container or an image."""

    apptainer = "apptainer"
    singularity = "singularity"
    pyxis = "pyxis"
    edf = "edf"
    uenv = "uenv"
    uenv_run = "uenv_run"


class GpuLibraries(str, enum.Enum):
    """Kind of GPU whose driver libraries a container gets from its node."""

    nv = "nv"
    rocm = "rocm"


_CONTAINER = "cluster.environment.container"
_IN_APPTAINER = (f"{_CONTAINER}=apptainer", f"{_CONTAINER}=singularity")
_IN_UENV = (f"{_CONTAINER}=uenv", f"{_CONTAINER}=uenv_run")


@dataclass(kw_only=True, slots=True)
class EnvironmentConfig:
    """Software that the ranks start in. config/environment.py turns it into lines of the batch script."""

    modules: list[str] = key([], ALWAYS)
    """Modules to load, in this order, before the lines of cluster.setup."""
    purge_modules: bool = key(False, ALWAYS)
    """Whether `module purge` comes first."""
    venv: str | None = key(None, ALWAYS)
    """Folder of a virtual environment; in a container, as the container sees it. The ranks run its bin/python."""
    uv: str | None = key(None, ALWAYS)
    """Folder of a uv project, whose .venv is used. Jobs install nothing: type `uv sync` before."""
    conda: str | None = key(None, ALWAYS)
    """Name or folder of a conda environment, which is activated without `conda init`."""
    conda_root: str | None = key(None, only_with("cluster.environment.conda"))
    """Folder in which conda is installed; null: `conda` is on PATH, for example by a module."""
    container: Container | None = key(None, ALWAYS)
    """apptainer, singularity: `apptainer exec` before each rank. pyxis: enroot, by srun --container-image. edf: srun
    --environment (CSCS). uenv: srun --uenv (CSCS); uenv_run: `uenv run` before each rank."""
    image: str | None = key(None, only_with(_CONTAINER))
    """Image of the container: a file, or a name as the container's program takes it; for edf a name or a file."""
    binds: list[str] = key([], only_with(*_IN_APPTAINER, f"{_CONTAINER}=pyxis"))
    """Further folders that the container sees: FOLDER, FOLDER:INSIDE or FOLDER:INSIDE:ro. The folder of sweeps is
    always among them."""
    gpus: GpuLibraries | None = key(None, only_with(*_IN_APPTAINER))
    """nv: --nv (NVIDIA); rocm: --rocm (AMD). Used if the hardware has GPUs."""
    view: str | None = key(None, only_with(*_IN_UENV))
    """View of the uenv, such as `default`."""
    container_args: list[str] = key([], only_with(_CONTAINER))
    """Further options of the container's program, each with its value, such as --cleanenv; for pyxis, edf and uenv
    options of srun."""
    stage: str | None = key(None, ALWAYS)
    """Packed environment (a tar of a venv's content, or a file of conda-pack), which each node unpacks once on its own
    disk. The ranks run its bin/python. If no disk has room, they run the Python of venv, uv or conda."""
    inherit: bool = key(True, ALWAYS)
    """Whether jobs get the variables of the shell that submits. false: sbatch --export=NONE."""


@dataclass(kw_only=True, slots=True)
class TimeLimit:
    """Item of `cluster.site.time_limits`: the longest time limit of jobs of some sizes."""

    partition: str | None = key(None, ALWAYS)
    """Partition to which this time limit applies; null: any."""
    qos: str | None = key(None, ALWAYS)
    """QOS to which this time limit applies; null: any that no other item of the partition names."""
    min_nodes: int = key(1, ALWAYS, limits="≥ 1")
    """Fewest nodes of a job to which it applies."""
    max_nodes: int | None = key(None, ALWAYS, limits="≥ 1")
    """Most nodes of a job to which it applies; null: no bound."""
    max_time_min: int = key(35_791_394, ALWAYS, limits="≥ 1")
    """Longest time limit in minutes."""


@dataclass(kw_only=True, slots=True)
class SiteConfig:
    """`cluster.site`: facts about a site. They change no script; plans, checks and messages use them."""

    slurm_cluster: str | None = key(None, ALWAYS)
    """Slurm's name of the cluster (ClusterName), by which a cluster file is recognised."""
    login_hosts: str | None = key(None, ALWAYS)
    """Host names of the login nodes, with * and ? as in a shell."""
    arch: str | None = key(None, ALWAYS)
    """Architecture of the compute nodes, as `uname -m` prints it."""
    internet: bool | None = key(None, ALWAYS)
    """Whether compute nodes reach the internet; null: not known."""
    whole_nodes: bool | None = key(None, ALWAYS)
    """true: a job gets whole nodes and pays for them; false: jobs share nodes; null: not known, or it depends on the
    partition."""
    time_limits: list[TimeLimit] = key([], ALWAYS)
    """Longest time limits by partition, QOS and number of nodes. A plan warns about a job that is longer."""
    preemption: str | None = key(None, ALWAYS)
    """Rules of preemption, in words."""
    notes: list[str] = key([], ALWAYS)
    """Further rules that users of the site must know."""
    reasons: dict[str, str] = key({}, ALWAYS)
    """Reason for each variable of `cluster.env`, and for each option of `srun_args` and `sbatch`."""
    unverified: list[str] = key([], ALWAYS)
    """Keys of this file whose values no public source confirms."""
    source: str = key("", ALWAYS)
    """Sources of these facts: URLs, separated by `; `, each with the figures that it has in parentheses."""
    checked: str = key("", ALWAYS)
    """Day on which the facts were checked, YYYY-MM-DD."""


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    name: str = key("local", ALWAYS)
    """Name of the site."""
    executor: Executor = key(Executor.local, ALWAYS)
    """slurm: sbatch job arrays; local: processes on this machine."""
    account: str | None = key(None, ALWAYS)
    """Slurm account. Put it in ~/.config/hpc_trainer/config.yaml, not into the repository."""
    setup: list[str] = key([], ALWAYS)
    """Shell lines before srun, for example to load modules or to activate an environment. They run as you. If a line
    fails, the job ends. `plan --script` shows them. On this machine they run before each rank."""
    python: str | None = key(None, ALWAYS)
    """Python of the ranks; null: the Python that submits."""
    environment: EnvironmentConfig = section(EnvironmentConfig)
    """Modules, virtual environment or container of the ranks."""
    env: dict[str, str] = key({}, ALWAYS)
    """Environment variables of every rank, such as NCCL_SOCKET_IFNAME. Never secrets: Slurm keeps scripts."""
    master_addr: str | None = key(None, ALWAYS)
    """Address on which rank 0 listens for the other ranks; null: 127.0.0.1 on one node, else rank 0's host name."""
    signal_lead_s: int | None = key(None, ALWAYS, limits="≥ 1")
    """Seconds before the time limit at which SIGUSR2 arrives; null: 120, or a quarter of a short limit."""
    array_parallelism: int = key(256, ALWAYS, limits="1 to 2,147,483,647")
    """Number of array elements that may run at the same time (`%N` of sbatch --array)."""
    top_up_partition: str | None = key(None, ALWAYS)
    """Partition of the one-core job that submits the runs waiting in a sweep's own queue; null: the partition of the
    runs."""
    srun_args: list[str] = key([], ALWAYS)
    """Further arguments of srun."""
    sbatch: dict[str, Any] = key({}, ALWAYS)
    """Further options of sbatch by their long names, for example {mail-type: END, reservation: x, exclusive: true}.
    Options that hpc_trainer sets itself are refused; the message names the key to use."""
    purge_days: int | None = key(None, ALWAYS, limits="≥ 1")
    """Days after which the site deletes files that nobody has used; `hpc-trainer doctor` warns in time. null: never."""
    max_failures: int = key(3, ALWAYS, limits="≥ 0")
    """Number of restarts after an error of storage or data (exit 74). A run never restarts after an error in your own
    code."""
    max_no_progress: int = key(3, ALWAYS, limits="≥ 1")
    """Number of restarts without a new step after which a run stops for good (exit 76)."""
    min_goodput: float = key(0.05, ALWAYS, limits="[0, 1)")
    """Smallest share of the allocated time that must be spent on training in attempts that the time limit ends. A run
    stops for good (exit 76) if its newest three such attempts are below this share (or cluster.max_no_progress
    attempts, if that is more). 0: no limit."""
    stop_after_alike: int = key(0, ALWAYS, limits="≥ 0")
    """If this number of runs fail in the same way before any run of the sweep has completed, the waiting runs are held
    (docs/control.md). 0: runs are never held."""
    site: SiteConfig = section(SiteConfig)
    """Facts about the site, with their sources."""


@dataclass(kw_only=True, slots=True)
class BudgetConfig:
    max_gpu_hours: float | None = key(None, ALWAYS, limits="> 0")
    """Largest number of GPU-hours of all waiting and running runs, each counted once with its full time limit; null: no
    limit. If it is set, new runs must also fit into the hours that `cluster.account` has left, if Slurm's `sshare`
    reports them."""
    max_jobs: int | None = key(None, ALWAYS, limits="≥ 1")
    """Largest number of runs of the grid that may wait or run at once; null: no limit."""


AUTO_PLACES = "auto"
"""Value of `pool.per_node` for as many places as a node has room for."""


class Mps(str, enum.Enum):
    """Use of NVIDIA's Multi-Process Service, by which runs compute on one GPU at the same time."""

    auto = "auto"
    on = "on"
    off = "off"


@dataclass(kw_only=True, slots=True)
class PoolConfig:
    """`pool`: a few jobs that work through all runs, instead of a job for each run."""

    jobs: int | None = key(None, ALWAYS, limits="≥ 1")
    """Jobs, called slots, that take one run after the other; null: each run has a job of its own."""
    per_node: int | str = key(1, only_with("pool.jobs"), limits="≥ 1")
    """Number of runs side by side in one slot, each with its own GPUs and cores. auto: as many as the GPUs, cores and
    memory of a node allow."""
    per_gpu: int = key(1, only_with("pool.jobs"), limits="≥ 1")
    """Number of these runs that share one GPU; runs with one GPU each. per_node is a multiple of it, or 1, which then
    means the runs of one GPU."""
    mps: Mps = key(Mps.auto, only_with("pool.jobs"))
    """NVIDIA's Multi-Process Service for runs that share a GPU. auto: a slot starts it if its node has it. on: a slot
    on a node without it fails. off: no slot starts it, and the runs take turns on the GPU."""


class SnapshotMode(str, enum.Enum):
    git = "git"
    copy = "copy"
    off = "off"


@dataclass(kw_only=True, slots=True)
class SnapshotConfig:
    mode: SnapshotMode = key(SnapshotMode.git, ALWAYS)
    """git: the checkout's files, including uncommitted and new ones, without ignored ones; outside a checkout as copy.
    copy: files that Python can import from the folder that holds the package. off: runs import the code as it is when
    they start."""
    packages: list[str] = key([], ALWAYS)
    """Top-level packages to freeze besides those that train.main, model._target_ and data._target_ name."""
    include: list[str] = key(["*.so", "_version.py", "*_pb2.py"], ALWAYS)
    """Names or paths (* and ? as in a shell) to freeze even if git ignores them or they look like weights."""
    exclude: list[str] = key([], ALWAYS)
    """Names or paths (* and ? as in a shell) of files and folders to leave out, from the top of the checkout."""
    max_mb: float = key(50.0, ALWAYS, limits="> 0")
    """Most megabytes of all frozen files together; more are refused."""
    max_files: int = key(10_000, ALWAYS, limits="≥ 1")
    """Most files to freeze; more are refused."""
