"""Grids and plans for tests, from runs that were composed once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.launch.freeze import Grid
from hpc_trainer.launch.plan import SweepPlan, build_plan
from hpc_trainer.launch.submit import SubmittedArray, settle_intents, submit_plan
from hpc_trainer.operate.status import read_status
from hpc_trainer.runs.layout import SweepPaths
from hpc_trainer.runs.spec import RunSpec
from hpc_trainer.runs.states import RunState


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
    return build_plan(make_grid(folder, specs), states or {})


def submit(grid: Grid, *, retry_failed: bool = False) -> list[SubmittedArray]:
    """What `hpc-trainer submit` does under its lock."""
    grid.sweep.folder.mkdir(parents=True, exist_ok=True)
    settle_intents(grid.sweep)
    states = read_status(grid.sweep).states if grid.sweep.specs.exists() else {}
    plan = build_plan(grid, states, retry_failed=retry_failed)
    return submit_plan(plan, command_line=["hpc-trainer", "submit"]) if plan.arrays else []
