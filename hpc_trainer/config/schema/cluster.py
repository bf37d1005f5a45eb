"""`cluster/`: what the site fixes, the same for every run on it. No account from the repository."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Executor(str, enum.Enum):
    """Who starts the runs."""

    local = "local"
    slurm = "slurm"


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    name: str = "local"
    """The site's name."""
    executor: Executor = Executor.local
    """slurm: sbatch job arrays; local: processes on this machine."""
    account: str | None = None
    """Slurm account. Put it in ~/.config/hpc_trainer/config.yaml, not into the repository."""
    setup: list[str] = field(default_factory=list)
    """Shell lines before srun, trusted: modules, activation of an environment. `plan --script` shows them. Of a run on
    this machine: before each rank."""
    python: str | None = None
    """Python of the ranks; null: the one that submits."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment of every rank, as NCCL_SOCKET_IFNAME. Never secrets: scripts are kept by Slurm."""
    master_addr: str | None = None
    """Address where rank 0 listens for the others; null: 127.0.0.1 on one node, else rank 0's host name."""
    signal_lead_s: int | None = None
    """Seconds before the time limit at which SIGUSR2 arrives; null: 120, or a quarter of a short limit."""
    array_parallelism: int = 256
    """Array elements that may run at the same time, ≥ 1 (`%N` of sbatch --array)."""
    top_up_partition: str | None = None
    """Partition of the one-core job that submits what waits in a sweep's own queue; null: that of the runs."""
    srun_args: list[str] = field(default_factory=list)
    """Further arguments of srun."""
    max_failures: int = 3
    """Times that a run comes back after an error of storage or data (exit 74), ≥ 0; your own code's errors never do."""
    max_no_progress: int = 3
    """Restarts without a new step after which a run stops for good (exit 76), ≥ 1."""
