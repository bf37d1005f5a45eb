"""Frozen runs -> arrays, compared with what exists. Writes nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_trainer.launch.freeze import Grid
from hpc_trainer.runs.spec import RunSpec, Shape
from hpc_trainer.runs.states import RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayPlan:
    """Runs of one shape that will be submitted together."""

    hardware: str
    shape: Shape
    specs: tuple[RunSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """What `submit` will do, precisely: `arrays` are submitted, nothing else is touched."""

    grid: Grid
    states: Mapping[str, RunState]
    arrays: tuple[ArrayPlan, ...]
    no_longer_in_grid: tuple[str, ...]

    @property
    def gpu_hours_max(self) -> float:
        """GPU-hours if every run to be submitted takes one attempt of full length."""
        return sum(array.shape.gpu_hours * len(array.specs) for array in self.arrays)

    @property
    def num_to_submit(self) -> int:
        """Runs that will be submitted."""
        return sum(len(array.specs) for array in self.arrays)


def build_plan(grid: Grid, states: Mapping[str, RunState], *, retry_failed: bool = False) -> SweepPlan:
    """Sorts the grid's runs into arrays, one for each shape, leaving out what is done, at work, or failed.

    Args:
        states: state of every run that the sweep knows; runs that are not in it are new.
        retry_failed: submit FAILED and OUT_OF_MEMORY runs too; they go on from their newest checkpoint.
    """
    wanted = {spec.run_id: states.get(spec.run_id, RunState.NEW) for spec in grid.specs}
    failed = (RunState.FAILED, RunState.OUT_OF_MEMORY)
    arrays: dict[tuple[str, Shape], list[RunSpec]] = {}
    for spec in grid.specs:
        state = wanted[spec.run_id]
        if state.needs_submit or (retry_failed and state in failed):
            arrays.setdefault((_array_environment(spec), spec.shape), []).append(spec)
    return SweepPlan(
        grid=grid,
        states=wanted,
        arrays=tuple(
            ArrayPlan(hardware=specs[0].hardware, shape=shape, specs=tuple(specs))
            for (_, shape), specs in arrays.items()
        ),
        no_longer_in_grid=tuple(run_id for run_id in states if run_id not in wanted),
    )


def _array_environment(spec: RunSpec) -> str:
    # One array is one script: runs whose setup lines or srun arguments differ cannot share it.
    cluster = spec.config["cluster"]
    return repr([cluster[key] for key in ("setup", "python", "srun_args", "array_parallelism")])


def specs_to_write(plan: SweepPlan, known: Mapping[str, RunSpec]) -> list[RunSpec]:
    """Specs that the sweep's file does not hold yet, or holds with another shape (a longer time limit, say)."""
    planned = [spec for array in plan.arrays for spec in array.specs]
    return [
        spec
        for spec in planned
        if spec.run_id not in known or dataclasses.replace(spec, axes={}, overrides=()) != _bare(known[spec.run_id])
    ]


def _bare(spec: RunSpec) -> RunSpec:
    return dataclasses.replace(spec, axes={}, overrides=())
