"""Resources that a validated configuration requests from Slurm."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_trainer.config.program import is_one_a_node
from hpc_trainer.config.schema.cluster import ClusterConfig, HardwareConfig, Launcher
from hpc_trainer.config.schema.train import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Resources of one run; runs of equal shape become one job array."""

    num_nodes: int
    tasks_per_node: int
    gpus_per_node: int
    cpus_per_task: int
    mem_gb_per_node: float | None
    mem_gb_per_gpu: float | None
    mem_gb_per_cpu: float | None
    gpu_type: str | None
    partition: str | None
    qos: str | None
    constraint: str | None
    exclude: str | None
    account: str | None
    time_limit_min: int
    signal_lead_s: int
    # The defaults are the meaning of specs that are older than these fields.
    gpu_request: str = "gpus_per_node"
    ranks_per_task: int = 1
    whole_node: bool = False

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each node."""
        return self.tasks_per_node * self.ranks_per_task

    @property
    def world_size(self) -> int:
        """Ranks of one run."""
        return self.num_nodes * self.ranks_per_node

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of one attempt that runs to its time limit."""
        return self.num_nodes * self.gpus_per_node * self.time_limit_min / 60


def shape_of(config: TrainConfig) -> Shape:
    """Return the shape of a validated configuration."""
    return resources(config.hardware, config.cluster, is_one_a_node(config))


def resources(hardware: HardwareConfig, cluster: ClusterConfig, is_one_a_node: bool) -> Shape:
    """Return the shape from the sections that determine it.

    Args:
        hardware: the hardware profile.
        cluster: the cluster's settings.
        is_one_a_node: True if one task on each node starts all of the node's ranks.
    """
    lead_s = signal_lead_s(hardware.time_limit_min, cluster.signal_lead_s)
    by_torchrun = hardware.launcher is Launcher.torchrun and not is_one_a_node
    is_one = by_torchrun or is_one_a_node
    return Shape(
        num_nodes=hardware.num_nodes,
        tasks_per_node=1 if is_one else hardware.ranks_per_node,
        ranks_per_task=hardware.ranks_per_node if by_torchrun else 1,
        gpus_per_node=hardware.gpus_per_node,
        cpus_per_task=hardware.cpus_per_rank * (hardware.ranks_per_node if is_one else 1),
        mem_gb_per_node=hardware.mem_gb_per_node,
        mem_gb_per_gpu=hardware.mem_gb_per_gpu,
        mem_gb_per_cpu=hardware.mem_gb_per_cpu,
        gpu_type=hardware.gpu_type,
        partition=hardware.partition,
        qos=hardware.qos,
        constraint=hardware.constraint,
        exclude=hardware.exclude,
        account=cluster.account,
        time_limit_min=hardware.time_limit_min,
        signal_lead_s=lead_s,
        gpu_request=hardware.gpu_request.value,
        whole_node=hardware.whole_node,
    )


def signal_lead_s(time_limit_min: int, asked_s: int | None = None) -> int:
    """Return how many seconds before the time limit Slurm should send its warning signal.

    Args:
        time_limit_min: time limit of the job in minutes.
        asked_s: `cluster.signal_lead_s`; None for the default.
    """
    # Slurm may send the signal up to 60 s early (sbatch --signal), and KillWait follows: 120 s is enough for a save
    # that takes seconds. A short job keeps three quarters of its time.
    return asked_s or max(1, min(LONGEST_LEAD_S, time_limit_min * 60 // 4))


LONGEST_LEAD_S = 120
"""Seconds between warning and time limit if `cluster.signal_lead_s` is not set and the limit is at least 8 min."""
