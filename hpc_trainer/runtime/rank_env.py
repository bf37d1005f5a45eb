"""Rank of this process, read from Slurm, torchrun or the local executor. No torch."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hpc_trainer.errors import RankEnvError


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnv:
    """Place of one rank in one attempt.

    `incarnation` names the attempt, and is the same on all its ranks: job id and restart count under Slurm. By this
    name the ranks of one attempt find each other, and never those of the previous attempt.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    launcher: str
    job_id: str
    restart_count: int = 0
    node: str
    elastic_count: int = 0
    per_gpu: int = 1
    """Number of runs that share this rank's GPU in a slot of a pool, this one included."""

    @property
    def incarnation(self) -> str:
        """Name of the attempt: `<job id>.<restart count>.<restarts by torchrun>`."""
        return f"{self.job_id}.{self.restart_count}.{self.elastic_count}"


# Set by the local queue for each start of a run: distinguishes starts if process ids are reused.
LOCAL_START_VARIABLE = "HPC_TRAINER_LOCAL_START"
PROBE_VARIABLE = "HPC_TRAINER_PROBE"
"""Environment variable of a run that is tested: module of this package whose `replacements(config)` a rank calls."""

BY_OUR_TORCHRUN = "HPC_TRAINER_BY_TORCHRUN"
"""Variable that the agent of a node (worker/agent.py) sets for its ranks, which are then ranks of a Slurm job."""

# Variables of each launcher: (rank, local rank, world size, ranks on this node, node rank, nodes).
_SLURM = (
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NTASKS",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_NODEID",
    "SLURM_NNODES",
)
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
TORCHRUN_NAMES = (
    *_TORCHRUN, "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
)  # fmt: skip
"""Variables that torchrun sets for each process that it starts."""
_LOCAL = (
    "SUBMITIT_LOCAL_GLOBALID",
    "SUBMITIT_LOCAL_LOCALID",
    "SUBMITIT_LOCAL_NTASKS",
    "SUBMITIT_LOCAL_NTASKS",
    "SUBMITIT_LOCAL_NODEID",
    "SUBMITIT_LOCAL_JOB_NUM_NODES",
)


def read_rank_env(environ: Mapping[str, str] | None = None) -> RankEnv:
    """Read the rank environment of torchrun (which may run inside Slurm), else local, else Slurm, else one rank.

    Raises:
        RankEnvError: a launcher is present but one of its variables is missing or not a number in range.
    """
    env = os.environ if environ is None else environ
    if "TORCHELASTIC_RUN_ID" in env:
        # The agent's process id distinguishes starts that share torchrun's default run id, "none".
        job_id = slurm_job_id(env) or f"torchrun-{env['TORCHELASTIC_RUN_ID']}-{os.getppid()}"
        restarts = _number(env, "SLURM_RESTART_COUNT", default=0)
        elastic = _number(env, "TORCHELASTIC_RESTART_COUNT", default=0)
        launcher = "slurm" if BY_OUR_TORCHRUN in env else "torchrun"
        return replace(_from(env, _TORCHRUN, launcher, job_id, restarts), elastic_count=elastic)
    if "SUBMITIT_LOCAL_GLOBALID" in env:
        parts = ("local", env.get("SUBMITIT_LOCAL_JOB_ID", "0"), env.get(LOCAL_START_VARIABLE, ""))
        job_id = "-".join(part for part in parts if part)
        return _from(env, _LOCAL, "local", job_id, 0)
    if "SLURM_PROCID" in env and "SLURM_JOB_ID" in env:
        return _from(env, _SLURM, "slurm", slurm_job_id(env), _number(env, "SLURM_RESTART_COUNT", default=0))
    return RankEnv(launcher="none", job_id=f"here-{os.getpid()}", node=socket.gethostname())


def named_gpus() -> list[str]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names for this process, by number or UUID; [] if it names none."""
    return [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]


def slurm_job_id(env: Mapping[str, str]) -> str:
    """Return `<array>_<task>` inside an array, the job id outside one, "" without Slurm.

    Inside an array only the first form is safe: one element's SLURM_JOB_ID equals the array's id, and a requeue by that
    id restarts all elements (Lightning#15022).
    """
    if "SLURM_ARRAY_JOB_ID" in env and "SLURM_ARRAY_TASK_ID" in env:
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return env.get("SLURM_JOB_ID", "")


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    # SLURM_RESTART_COUNT is unset on the first run (22.05): that is 0.
    text = env.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        raise RankEnvError(f"{name}={text!r} must be a whole number ≥ 0: this rank's number is unknown.")
    return int(text)


def _from(env: Mapping[str, str], names: tuple[str, ...], launcher: str, job_id: str, restarts: int) -> RankEnv:
    rank, local_rank, world_size = (_number(env, name) for name in names[:3])
    node_rank = _number(env, names[4], default=0)
    num_nodes = _number(env, names[5], default=1)
    local_world_size = _number(env, names[3], default=world_size // max(1, num_nodes))
    if not rank < world_size:
        raise RankEnvError(f"{names[0]}={rank} must be less than {names[2]}={world_size} ({launcher}).")
    return RankEnv(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
        launcher=launcher,
        job_id=job_id,
        restart_count=restarts,
        node=env.get("SLURMD_NODENAME", socket.gethostname()),
    )
