"""How the jobs of a partition are preempted: Slurm's modes, and the time that a job gets."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpc_trainer.slurm.commands import run_slurm
from hpc_trainer.slurm.jobs import WORKER_TIMEOUT_S

OFF = "OFF"
"""The mode of a partition whose jobs are never preempted."""
DEFAULT_KILL_WAIT_S = 30.0
"""slurm.conf(5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """How jobs of a partition are preempted: Slurm's word (REQUEUE, CANCEL, ...), and the time they get, in seconds.

    First the grace, then from SIGTERM to SIGKILL the KillWait that every job has that is ended.
    """

    mode: str
    grace_s: float
    kill_wait_s: float

    @property
    def brings_back(self) -> bool:
        """True if Slurm requeues what it preempts; else the job is gone, or only stops for a while."""
        return self.mode.startswith("REQUEUE")


def show_preemption(partition: str) -> Preemption | None:
    """Asks how this partition's jobs are preempted; None if the controller does not say.

    Raises:
        SlurmError: no answer.
    """
    asked = f"show partition {partition}\nshow config\n"
    return parse_preemption(run_slurm(["scontrol", "-o"], script=asked, timeout_s=WORKER_TIMEOUT_S))


def parse_preemption(text: str) -> Preemption | None:
    """Reads `show partition` and `show config`: a partition without a mode of its own has the cluster's."""
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
