"""Grids and plans for tests, from runs that were composed once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.launch.freeze import Grid
from hpc_trainer.launch.grids import submit_grid
from hpc_trainer.launch.known import Known
from hpc_trainer.launch.plan import SweepPlan, build_plan
from hpc_trainer.launch.submit import SubmittedArray
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.spec import RunSpec
from hpc_trainer.record.states import RunState


def make_grid(folder: Path, specs: Sequence[RunSpec], executor: Executor = Executor.slurm) -> Grid:
    """A grid of these runs whose sweep is `folder`."""
    return Grid(
        sweep=SweepPaths(folder),
        executor=executor,
        specs=tuple(specs),
        num_duplicates=0,
        max_parallel=1,
        group_readable=False,
    )


def make_plan(folder: Path, specs: Sequence[RunSpec], states: Mapping[str, RunState] | None = None) -> SweepPlan:
    """A plan on Slurm; without `states` all runs are new."""
    return build_plan(make_grid(folder, specs), Known(states=states or {}))


def submit(grid: Grid, *, retry_failed: bool = False) -> list[SubmittedArray]:
    """What `hpc-trainer submit` does with a frozen grid."""
    return list(submit_grid(grid, retry_failed=retry_failed, command_line=["hpc-trainer", "submit"]).arrays)
