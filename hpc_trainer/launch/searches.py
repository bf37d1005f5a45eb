"""Search as `plan` and `submit` return it in Python, and its slots at work.

The search itself is a domain (hpc_trainer/search), which contributes how it is planned and submitted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hpc_trainer.domains import contributions
from hpc_trainer.launch.grids import Submitted
from hpc_trainer.launch.plan import SweepPlan
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.reading import Faults, is_there
from hpc_trainer.record.spec import RunSpec
from hpc_trainer.record.states import LEAVING
from hpc_trainer.record.submissions import Submission, read_submissions
from hpc_trainer.record.turns import pool_is_alive, pool_job, slot_folder
from hpc_trainer.slurm.queue import is_of, read_queue

_LOOK_S, _LOOK_SLURM_S = 1.0, 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPlan(SweepPlan):
    """Exact plan of a search: `arrays` has its slots. `specs` and `states` are empty, because slots draw the trials."""

    sampler: str
    metric: str
    is_max: bool
    """True if the largest value of the metric is the best."""
    space: tuple[str, ...]
    """A line for each axis."""
    trials: int
    drawn: int
    """Number of trials that were drawn by earlier submits."""
    earlier: int
    """Number of trials of `search.from` that the sampler knows."""
    rungs: tuple[int, ...]
    whole_runs: float | None
    """Training of all trials in units of whole runs; None if the last step of a program is not known."""
    hours_of_trial: float
    """GPU-hours of one trial that takes its whole time limit."""

    @property
    def specs(self) -> list[RunSpec]:
        """Return no runs: they are not drawn yet."""
        return []

    @property
    def num_to_submit(self) -> int:
        """Return the number of trials that are still to be drawn."""
        return self.trials - self.drawn

    @property
    def gpu_hours_max(self) -> float:
        """Return the GPU-hours if every trial takes its whole time limit."""
        return self.hours_of_trial * self.trials


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedSearch(Submitted):
    """Result of the submit of a search.

    `arrays` has its slots; it is empty if slots of an earlier submit work, or no trial is left.
    """

    plan: SearchPlan
    job_id: str
    """Job of the slots, or their process without Slurm; "" if no trial is left and nothing was submitted."""

    @property
    def num_submitted(self) -> int:
        """Return the number of trials that the new slots will draw."""
        return self.plan.num_to_submit if self.arrays else 0

    @property
    def num_already(self) -> int:
        """Return the number of trials that were drawn by earlier submits."""
        return self.plan.drawn


class SearchKind(Protocol):
    """Plan and submit of a search (hook `grid_kinds`)."""

    def takes(self, overrides: Sequence[str]) -> bool:
        """Return True if the overrides ask for a search."""

    def plan_search(
        self, overrides: Sequence[str], *, app: str | None, config_dirs: Sequence[Path], trust: Sequence[str]
    ) -> SearchPlan:
        """Return the plan of the search; write nothing."""

    def submit_search(
        self, overrides: Sequence[str], *, app: str | None, config_dirs: Sequence[Path], trust: Sequence[str]
    ) -> SubmittedSearch:
        """Write the search and start its slots."""


def search_kind(overrides: Sequence[str]) -> SearchKind | None:
    """Return how the search of these overrides is planned and submitted; None if they describe a grid."""
    kinds: Sequence[SearchKind] = contributions("grid_kinds")
    return next((kind for kind in kinds if kind.takes(overrides)), None)


def slots_at_work(sweep: SweepPaths, *, may_leave: bool = False) -> Submission | None:
    """Return the newest pool of a search that has slots in the queue or at work; None if there is none.

    Args:
        sweep: the sweep.
        may_leave: count slots, too, that have announced their end and draw no further trial.

    Raises:
        SlurmError: squeue did not answer.
    """
    pools = [submission for submission in read_submissions(sweep) if submission.source is not None]
    on_slurm = [pool for pool in pools if pool.executor == "slurm"]
    entries = read_queue() if on_slurm else {}
    for pool in reversed(pools):
        leaving = [] if may_leave else _leaving(sweep, pool)
        if pool in on_slurm:
            gone = {f"{pool_job(pool)}_{element}" for element in leaving}
            if any(is_of(entry, pool.uuid) and job_id not in gone for job_id, entry in entries.items()):
                return pool
        elif len(leaving) < max(1, pool.slots) and pool_is_alive(sweep, pool) is not False:
            return pool
    return None


def _leaving(sweep: SweepPaths, pool: Submission) -> list[int]:
    """Return the numbers of a pool's slots that have announced their end."""
    slots = range(max(1, pool.slots))
    return [slot for slot in slots if is_there(slot_folder(sweep, pool.uuid, slot).marker(LEAVING), faults=Faults())]


def await_slots(sweep: SweepPaths) -> None:
    """Wait until a sweep has no slots of a search in the queue or at work; return at once without a search.

    Raises:
        SlurmError: squeue did not answer.
    """
    while (pool := slots_at_work(sweep, may_leave=True)) is not None:
        time.sleep(_LOOK_SLURM_S if pool.executor == "slurm" else _LOOK_S)
