"""`hardware/`: resources that one run requests. Facts about machines only; no training choice."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hpc_trainer.config.schema.key import ALWAYS, APART, COUNTS, RULED, SAFE, SCHEDULE, key


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
    """Ranks a node. null: one for each GPU, or 1 without GPUs."""
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
    gpu_request: GpuRequest = key(GpuRequest.gpus_per_node, ALWAYS, APART, SAFE)
    """gpus_per_node: `--gpus-per-node=a100:4`; gres: `--gres=gpu:a100:4`. Slurm allocates the same, but the submit
    filters of some sites check only one of the two, and Slurm before 19.05 knows only gres."""
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
        """`cpu`, `cuda`, `mps` or `xla`: `device` with `auto` decided."""
        if self.device is Device.auto:
            return "cuda" if self.gpus_per_node else "cpu"
        return str(self.device.value)
