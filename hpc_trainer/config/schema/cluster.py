"""`cluster/`: settings of the site, the same for every run on it. The repository holds no account."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from hpc_trainer.config.schema.key import ALWAYS, key


class Executor(str, enum.Enum):
    """Program that starts the runs."""

    local = "local"
    slurm = "slurm"


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    name: str = key("local", ALWAYS)
    """Name of the site."""
    executor: Executor = key(Executor.local, ALWAYS)
    """slurm: sbatch job arrays; local: processes on this machine."""
    account: str | None = key(None, ALWAYS)
    """Slurm account. Put it in ~/.config/hpc_trainer/config.yaml, not into the repository."""
    setup: list[str] = key([], ALWAYS)
    """Shell lines before srun, trusted: modules, activation of an environment. The first line that fails ends the job.
    `plan --script` shows them. On this machine they run before each rank."""
    python: str | None = key(None, ALWAYS)
    """Python of the ranks; null: the Python that submits."""
    env: dict[str, str] = key({}, ALWAYS)
    """Environment variables of every rank, such as NCCL_SOCKET_IFNAME. Never secrets: Slurm keeps scripts."""
    master_addr: str | None = key(None, ALWAYS)
    """Address where rank 0 listens for the others; null: 127.0.0.1 on one node, else rank 0's host name."""
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
    """Further options of sbatch by their long names, as {mail-type: END, reservation: x, exclusive: true}. Options that
    hpc_trainer sets itself are refused, with the key to use."""
    max_failures: int = key(3, ALWAYS, limits="≥ 0")
    """Times that a run restarts after an error of storage or data (exit 74); errors of your own code never restart
    it."""
    max_no_progress: int = key(3, ALWAYS, limits="≥ 1")
    """Restarts without a new step after which a run stops for good (exit 76)."""
    min_goodput: float = key(0.05, ALWAYS, limits="[0, 1)")
    """Least share of allocated time that training must get in attempts that the time limit ends. A run stops for good
    (exit 76) if its newest attempts of this kind, three or cluster.max_no_progress, are below; 0: no bound."""
