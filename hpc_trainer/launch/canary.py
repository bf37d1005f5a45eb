"""Canaries: of each shape some runs start first, and Slurm holds the others until these have trained and saved.

The plan is divided here. `launch/submit.py` marks the canaries and submits the others with --hold, and the canaries
release them (`worker/line.py`).
"""

from __future__ import annotations

import dataclasses

from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.errors import ConfigError
from hpc_trainer.launch.plan import ArrayPlan, SweepPlan
from hpc_trainer.record.states import RunState
from hpc_trainer.slurm.shape import Shape


def with_canaries(plan: SweepPlan, count: int) -> SweepPlan:
    """Return the plan with `count` canaries for each shape, which are submitted first.

    A shape of which a run of the grid is complete needs none. Runs of the shape that wait or work already are canaries
    before new ones are.

    Raises:
        ConfigError: the count is less than 1, or the runs do not go to Slurm, or to several shapes each.
    """
    if count < 1:
        raise ConfigError(f"--canary {count} must be at least 1. Use --canary 1.")
    if plan.grid.executor is not Executor.slurm:
        raise ConfigError("--canary needs Slurm, which holds the other runs: with cluster=local leave it out.")
    if any(array.choice is not None for array in plan.arrays):
        raise ConfigError("--canary does not go with hardware=first:a,b. Leave one of them out.")
    if any(array.slots for array in plan.arrays):
        raise ConfigError("--canary does not go with a pool, whose jobs take the runs in turn. Leave one of them out.")
    before, after = [], []
    for shape in dict.fromkeys(array.shape for array in plan.arrays):
        arrays = [array for array in plan.arrays if array.shape == shape]
        if _is_proven(plan, shape):
            after += arrays
            continue
        earlier = _earlier(plan, shape)[:count]
        new = [spec for array in arrays for spec in array.specs][: count - len(earlier)]
        chosen = {spec.run_id for spec in new}
        run_ids = (*earlier, *(spec.run_id for spec in new))
        if new:
            first = dataclasses.replace(
                arrays[0], specs=tuple(new), parallelism=len(new), after=(), behind=None, canaries=()
            )
            before.append(first)
        after += [held for array in arrays if (held := _held(array, chosen, run_ids)) is not None]
    starts = (None,) * (len(before) + len(after)) if plan.starts else ()
    return dataclasses.replace(plan, arrays=(*before, *after), starts=starts)


def _held(array: ArrayPlan, chosen: set[str], run_ids: tuple[str, ...]) -> ArrayPlan | None:
    specs = tuple(spec for spec in array.specs if spec.run_id not in chosen)
    if not specs:
        return None
    return dataclasses.replace(
        array, specs=specs, parallelism=min(array.parallelism, len(specs)), behind=None, canaries=run_ids
    )


def _is_proven(plan: SweepPlan, shape: Shape) -> bool:
    return any(spec.shape == shape and plan.states[spec.run_id] is RunState.COMPLETED for spec in plan.grid.specs)


def _earlier(plan: SweepPlan, shape: Shape) -> list[str]:
    at_work = (RunState.RUNNING, RunState.PENDING, RunState.REQUEUED)
    new = {spec.run_id for spec in plan.specs}
    return [
        spec.run_id
        for spec in plan.grid.specs
        if spec.shape == shape and spec.run_id not in new and plan.states[spec.run_id] in at_work
    ]
