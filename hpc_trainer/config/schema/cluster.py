"""`cluster/`: what the site fixes, the same for every run on it. No account from the repository."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from hpc_trainer.config.schema.key import ALWAYS, key


class Executor(str, enum.Enum):
    """Who starts the runs."""

    local = "local"
    slurm = "slurm"


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    name: str = key("local", ALWAYS)
    """The site's name."""
    executor: Executor = key(Executor.local, ALWAYS)
    """slurm: sbatch job arrays; local: processes on this machine."""
    account: str | None = key(None, ALWAYS)
    """Slurm account. Put it in ~/.config/hpc_trainer/config.yaml, not into the repository."""
    setup: list[str] = key([], ALWAYS)
    """Shell lines before srun, trusted: modules, activation of an environment. The first that fails ends the job.
    `plan --script` shows them. Of a run on this machine: before each rank."""
    python: str | None = key(None, ALWAYS)
    """Python of the ranks; null: the one that submits."""
    env: dict[str, str] = key({}, ALWAYS)
    """Environment of every rank, as NCCL_SOCKET_IFNAME. Never secrets: scripts are kept by Slurm."""
    master_addr: str | None = key(None, ALWAYS)
    """Address where rank 0 listens for the others; null: 127.0.0.1 on one node, else rank 0's host name."""
    signal_lead_s: int | None = key(None, ALWAYS, limits="≥ 1")
    """Seconds before the time limit at which SIGUSR2 arrives; null: 120, or a quarter of a short limit."""
    array_parallelism: int = key(256, ALWAYS, limits="1 to 2,147,483,647")
    """Array elements that may run at the same time (`%N` of sbatch --array)."""
    top_up_partition: str | None = key(None, ALWAYS)
    """Partition of the one-core job that submits what waits in a sweep's own queue; null: that of the runs."""
    srun_args: list[str] = key([], ALWAYS)
    """Further arguments of srun."""
    sbatch: dict[str, Any] = key({}, ALWAYS)
    """Further options of sbatch by their long names, as {mail-type: END, reservation: x, exclusive: true}. What
    hpc_trainer sets itself is refused, with the key to use."""
    max_failures: int = key(3, ALWAYS, limits="≥ 0")
    """Times that a run comes back after an error of storage or data (exit 74); your own code's errors never do."""
    max_no_progress: int = key(3, ALWAYS, limits="≥ 1")
    """Restarts without a new step after which a run stops for good (exit 76)."""
    min_goodput: float = key(0.05, ALWAYS, limits="[0, 1)")
    """Least share of allocated time that training must get in attempts that the time limit ends. A run stops for good
    (exit 76) if its newest attempts of this kind, three or cluster.max_no_progress, are below; 0: no such bound."""
