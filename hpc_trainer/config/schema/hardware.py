"""`hardware/`: what one run asks of the machine. Facts of machines only; no training choice."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Device(str, enum.Enum):
    """Where tensors live."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
    mps = "mps"
    xla = "xla"


class GpuRequest(str, enum.Enum):
    """How GPUs are asked for."""

    gpus_per_node = "gpus_per_node"
    gres = "gres"


@dataclass(kw_only=True, slots=True)
class HardwareConfig:
    name: str = "unnamed"
    """The profile's name, as it shows in plans and results."""
    num_nodes: int = 1
    """Nodes of one run, ≥ 1."""
    gpus_per_node: int = 0
    """GPUs a node, ≥ 0. One rank a GPU; 0 asks for CPUs only."""
    tasks_per_node: int | None = None
    """Ranks a node, ≥ 1. null: one a GPU, or 1 without GPUs."""
    cpus_per_gpu: int | None = None
    """CPU cores for each GPU's rank. Only with gpus_per_node > 0."""
    cpus_per_task: int | None = None
    """CPU cores for each rank. null: cpus_per_gpu, or 1."""
    mem_gb_per_node: float | None = None
    """Memory of a node in GB. At most one of the three memory keys may be set: Slurm takes one flag."""
    mem_gb_per_gpu: float | None = None
    """Memory for each GPU in GB."""
    mem_gb_per_cpu: float | None = None
    """Memory for each CPU in GB."""
    gpu_type: str | None = None
    """The site's gres name of the GPU, as `a100`; null: any."""
    gpu_request: GpuRequest = GpuRequest.gpus_per_node
    """gpus_per_node: `--gpus-per-node=a100:4`; gres: `--gres=gpu:a100:4`. Slurm allocates the same, but the submit
    filters of some sites look at one of the two only, and Slurm before 19.05 knows gres alone."""
    device: Device = Device.auto
    """auto: cuda where gpus_per_node > 0, else cpu. cuda: NVIDIA's GPUs, and AMD's in a ROCm build of torch. mps:
    Apple's GPU. xla: TPUs through torch-xla (`hpc_trainer[xla]`). The last two: one rank, fp32 or bf16."""
    partition: str | None = None
    """Slurm partition; null: the site's default."""
    qos: str | None = None
    """Slurm quality of service."""
    constraint: str | None = None
    """Slurm feature expression."""
    exclude: str | None = None
    """Host list that must not be used."""
    time_limit_min: int = 60
    """Wall-clock limit of one attempt in minutes, ≥ 1."""
    source: str = ""
    """Where the figures come from."""
    checked: str = ""
    """The day on which they were checked, YYYY-MM-DD."""

    @property
    def ranks_per_node(self) -> int:
        """Ranks (Slurm tasks) on each node."""
        return self.tasks_per_node or max(1, self.gpus_per_node)

    @property
    def world_size(self) -> int:
        """Ranks of one run."""
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
