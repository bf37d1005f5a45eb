"""Preemption of a partition's jobs: Slurm's mode, and the time that a job gets before it is ended."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpc_trainer.slurm.commands import run_slurm
from hpc_trainer.slurm.jobs import WORKER_TIMEOUT_S

OFF = "OFF"
"""The mode of a partition whose jobs are never preempted."""
DEFAULT_KILL_WAIT_S = 30.0
"""Slurm's default KillWait in seconds (slurm.conf(5))."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """Preemption of a partition's jobs: Slurm's mode (REQUEUE, CANCEL, ...), and the time they get, in seconds.

    First comes the grace time, then KillWait: the time from SIGTERM to SIGKILL that every ended job gets.
    """

    mode: str
    grace_s: float
    kill_wait_s: float

    @property
    def brings_back(self) -> bool:
        """Return True if Slurm requeues preempted jobs; else the job is gone, or only suspended for a while."""
        return self.mode.startswith("REQUEUE")


def show_preemption(partition: str) -> Preemption | None:
    """Ask the controller how this partition's jobs are preempted; None if it does not say.

    Raises:
        SlurmError: the controller does not answer.
    """
    asked = f"show partition {partition}\nshow config\n"
    return parse_preemption(run_slurm(["scontrol", "-o"], script=asked, timeout_s=WORKER_TIMEOUT_S))


def parse_preemption(text: str) -> Preemption | None:
    """Parse `show partition` and `show config`; a partition without its own mode has the cluster's mode."""
    modes = re.findall(r"\bPreemptMode\s*=\s*([A-Z_,]+)", text)
    grace = re.search(r"\bGraceTime=(\d+)", text)
    wait = re.search(r"\bKillWait\s*=\s*(\d+)", text)
    if not modes:
        return None
    return Preemption(
        mode=modes[0],
        grace_s=float(grace[1]) if grace else 0.0,
        kill_wait_s=float(wait[1]) if wait else DEFAULT_KILL_WAIT_S,
    )
