"""train, plan and submit: the verbs that take a grid."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape

from hpc_trainer.cli.common import console, counts_line, figure, print_json, print_table, state_markup
from hpc_trainer.cli.live import watch
from hpc_trainer.cli.run_verbs import print_results, status_json
from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.errors import ConfigError, HpcTrainerError, RunStateError
from hpc_trainer.launch.lock import submit_lock
from hpc_trainer.launch.plan import Grid, SweepPlan, build_plan, freeze_grid
from hpc_trainer.launch.snapshot import Snapshot
from hpc_trainer.launch.submit import SubmittedArray, array_script_of, freeze_code, settle_intents, submit_plan
from hpc_trainer.operate.status import SweepStatus, read_status
from hpc_trainer.runs.files import set_umask
from hpc_trainer.runs.local_process import is_alive, pid_of
from hpc_trainer.runs.states import RunState


def run_plan(
    overrides: Sequence[str], config_dirs: Sequence[Path], trust: Sequence[str],
    *, script: bool, retry_failed: bool, as_json: bool,
) -> None:  # fmt: skip
    """Shows the plan; writes nothing."""
    grid = freeze_grid(overrides, config_dirs=config_dirs, trust=trust)
    plan = build_plan(grid, _known_states(grid), retry_failed=retry_failed)
    code = freeze_code(plan)  # what cannot be frozen is said here, and --script shows the very path
    if as_json:
        print_json(_plan_json(plan, code))
        return
    _print_plan(plan)
    if script:
        for array in plan.arrays:
            print(f"\n# --- batch script of the array on {array.hardware} ---")
            print(array_script_of(plan, array, code=code) or "# the local executor needs none")


def run_submit(
    overrides: Sequence[str], config_dirs: Sequence[Path], trust: Sequence[str],
    *, wait: bool, retry_failed: bool, as_json: bool,
) -> None:  # fmt: skip
    """Submits what is new or interrupted; with `wait`, shows progress to the end."""
    grid = freeze_grid(overrides, config_dirs=config_dirs, trust=trust)
    plan, arrays = _submit(grid, retry_failed=retry_failed)
    if as_json and not wait:
        print_json(_submit_json(plan, arrays))
        return
    if not as_json:
        _print_submitted(plan, arrays)
    if wait:
        status = _wait(grid, [array.job_id for array in arrays], quiet=as_json)
        if as_json:
            print_json({**_submit_json(plan, arrays), "status": status_json(status)})
        else:
            print_results(status)
        _exit_by_outcome(grid, status, quiet=as_json)


def run_train(
    overrides: Sequence[str], config_dirs: Sequence[Path], trust: Sequence[str], *, fresh: bool, as_json: bool
) -> None:
    """One run, here: the local executor with one run and a place to watch it."""
    given = [override for override in overrides if not override.startswith("cluster=")]
    grid = freeze_grid([*given, "cluster=local"], config_dirs=config_dirs, trust=trust)
    if len(grid.specs) != 1:
        raise ConfigError(f"train runs one configuration, and this is a grid of {len(grid.specs)}. Use submit.")
    spec = grid.specs[0]
    paths = grid.sweep.run(spec.run_id)
    state = _known_states(grid).get(spec.run_id, RunState.NEW)
    if state is RunState.CANCELLED and not fresh:
        raise RunStateError(f"{spec.run_id} was cancelled and stays so. `--fresh` begins anew in another folder.")
    if fresh and state.is_active:
        raise RunStateError(f"{spec.run_id} is {state.value}. Cancel it first: hpc-trainer cancel {spec.run_id}")
    if fresh and paths.folder.exists():
        paths.folder.rename(paths.folder.with_name(f"{spec.run_id}.old-{time.time_ns()}"))
    _, arrays = _submit(grid, retry_failed=True)
    if not as_json:
        if arrays:
            print(f"{spec.run_id}: {spec.shape.world_size} rank(s), {spec.num_steps} steps. Run folder: {paths.folder}")
        elif state is RunState.COMPLETED:
            print(f"{spec.run_id}: all is done. `--fresh` begins anew. Run folder: {paths.folder}")
        else:
            print(f"{spec.run_id} is {state.value} already; this watches it. Run folder: {paths.folder}")
    status = _wait(grid, [array.job_id for array in arrays], quiet=as_json)
    run = next(each for each in status.runs if each.run_id == spec.run_id)
    if as_json:
        print_json(
            {"run_id": run.run_id, "state": run.state.value, "step": run.step, "metrics": dict(run.metrics),
             "run_dir": str(paths.folder)}
        )  # fmt: skip
    else:
        metrics = "  ".join(f"{key}={figure(value)}" for key, value in run.metrics.items())
        console().print(f"{run.run_id}: {state_markup(run.state)} at step {run.step}/{spec.num_steps}  {metrics}")
    _exit_by_outcome(grid, status, quiet=as_json)


def _known_states(grid: Grid) -> dict[str, RunState]:
    return read_status(grid.sweep).states if grid.sweep.specs.exists() else {}


def _submit(grid: Grid, *, retry_failed: bool) -> tuple[SweepPlan, list[SubmittedArray]]:
    set_umask(grid.group_readable)
    with submit_lock(grid.sweep):
        settle_intents(grid.sweep)
        plan = build_plan(grid, _known_states(grid), retry_failed=retry_failed)
        arrays = submit_plan(plan, command_line=sys.argv) if plan.arrays else []
    return plan, arrays


def _wait(grid: Grid, job_ids: list[str], *, quiet: bool) -> SweepStatus:
    """Watches to the end. Ctrl-C stops local runs, each with a checkpoint; on Slurm it only stops watching."""
    wanted = {spec.run_id for spec in grid.specs}
    try:
        return watch(grid.sweep, wanted, quiet=quiet)
    except KeyboardInterrupt:
        if grid.executor is Executor.slurm or not job_ids:
            print("\nNo longer watching; the runs go on. See: hpc-trainer status", file=sys.stderr)
            sys.exit(1)
        print("\nStopping: every run saves a checkpoint first ...", file=sys.stderr)
        _stop_queues(job_ids)
        status = read_status(grid.sweep)
        steps = ", ".join(f"{run.run_id} at step {run.step}" for run in status.runs if run.state is RunState.PREEMPTED)
        print(f"Stopped{': ' + steps if steps else ''}. The same command goes on from here.", file=sys.stderr)
        sys.exit(1)


def _stop_queues(job_ids: Sequence[str]) -> None:
    for job_id in set(job_ids):
        if is_alive(job_id):
            os.kill(pid_of(job_id), signal.SIGTERM)
    while any(is_alive(job_id) for job_id in job_ids):
        time.sleep(0.1)


def _exit_by_outcome(grid: Grid, status: SweepStatus, *, quiet: bool) -> None:
    """Leaves with an error if a run did not complete; `quiet` where JSON has said so already."""
    wanted = {spec.run_id for spec in grid.specs}
    bad = [run for run in status.runs if run.run_id in wanted and run.state is not RunState.COMPLETED]
    if bad and quiet:
        sys.exit(1)
    if bad:
        causes = "\n".join(f"{run.run_id}: {run.state.value}: {run.reason or 'see its logs'}" for run in bad[:10])
        raise HpcTrainerError(f"{len(bad)} run(s) did not complete:\n{causes}\nRead: hpc-trainer logs {bad[0].run_id}")


def _plan_json(plan: SweepPlan, code: Snapshot | None) -> dict[str, Any]:
    return {
        "sweep": plan.grid.sweep.name,
        "runs": [
            {
                "run_id": spec.run_id,
                "overrides": dict(spec.axes),
                "hardware": spec.hardware,
                "state": plan.states[spec.run_id].value,
            }
            for spec in plan.grid.specs
        ],
        "arrays": [
            {
                "hardware": array.hardware,
                "runs": len(array.specs),
                "nodes": array.shape.num_nodes,
                "gpus_per_node": array.shape.gpus_per_node,
                "script": array_script_of(plan, array, code=code),
            }
            for array in plan.arrays
        ],
        "gpu_hours_max": plan.gpu_hours_max,
        "problems": [],
    }


def _submit_json(plan: SweepPlan, arrays: Sequence[SubmittedArray]) -> dict[str, Any]:
    submitted = sum(len(array.run_ids) for array in arrays)
    return {
        "sweep": plan.grid.sweep.name,
        "submitted": submitted,
        "already": len(plan.grid.specs) - submitted,
        "arrays": [
            {"job_id": array.job_id, "runs": len(array.run_ids), "hardware": array.hardware} for array in arrays
        ],
    }


def _print_plan(plan: SweepPlan) -> None:
    grid, out = plan.grid, console()
    place = escape(str(grid.sweep.folder))
    out.print(f"Sweep [bold]{grid.sweep.name}[/] in {place} ({grid.executor.value})", soft_wrap=True)
    axes = _axes(grid)
    print_table(
        ["RUN", "HARDWARE", "STATE", *axes],
        [
            [spec.run_id, spec.hardware, plan.states[spec.run_id], *(spec.axes.get(axis, "-") for axis in axes)]
            for spec in grid.specs[:50]
        ],
    )
    if len(grid.specs) > 50:
        out.print(f"... and {len(grid.specs) - 50} more (--json lists all)")
    for number, array in enumerate(plan.arrays):
        shape = array.shape
        out.print(
            f"Array {number}: {len(array.specs)} run(s) on {array.hardware}: {shape.num_nodes} node(s) × "
            f"{shape.tasks_per_node} rank(s), {shape.gpus_per_node} GPU(s) a node, partition "
            f"{shape.partition or 'default'}, {shape.time_limit_min} min"
        )
    out.print(f"{counts_line(dict(Counter(state.value for state in plan.states.values())))}. ", end="")
    out.print(f"To submit: {plan.num_to_submit}, at most {plan.gpu_hours_max:.4g} GPU-hours.")
    _print_notes(plan)
    if plan.num_to_submit:
        print(f"Next: hpc-trainer submit {shlex.join(_given_overrides())}")  # to copy: not wrapped, no markup in it


def _given_overrides() -> list[str]:
    return [word for word in sys.argv[2:] if word not in ("--script", "--dry-run")]


def _axes(grid: Grid) -> list[str]:
    return list(dict.fromkeys(axis for spec in grid.specs for axis in spec.axes))


def _print_notes(plan: SweepPlan) -> None:
    out = console()
    if plan.grid.num_duplicates:
        out.print(f"{plan.grid.num_duplicates} point(s) were the same run as another and merged.")
    if plan.no_longer_in_grid:
        out.print(f"{len(plan.no_longer_in_grid)} run(s) of this sweep are not in this grid; they are left alone.")
    failed = sum(state in (RunState.FAILED, RunState.OUT_OF_MEMORY) for state in plan.states.values())
    planned = {spec.run_id for array in plan.arrays for spec in array.specs}
    if failed and not any(plan.states[run_id] is RunState.FAILED for run_id in planned):
        out.print(f"{failed} failed run(s) stay as they are; --retry-failed submits them again.")
    cancelled = sum(state is RunState.CANCELLED for state in plan.states.values())
    if cancelled:
        out.print(f"{cancelled} cancelled run(s) stay cancelled.")


def _print_submitted(plan: SweepPlan, arrays: Sequence[SubmittedArray]) -> None:
    grid, out = plan.grid, console()
    if not arrays:
        counts = counts_line(dict(Counter(state.value for state in plan.states.values())))
        done = all(state is RunState.COMPLETED for state in plan.states.values())
        out.print(f"Sweep {grid.sweep.name}: {'all is done' if done else 'nothing to submit'} ({counts}).")
    for array in arrays:
        where = f"job {array.job_id}" if grid.executor is Executor.slurm else "this machine"
        out.print(f"Submitted {len(array.run_ids)} run(s) on {array.hardware} to {where}.")
    already = len(grid.specs) - sum(len(array.run_ids) for array in arrays)
    if arrays and already:
        out.print(f"{already} run(s) were there already.")
    _print_notes(plan)
    is_over = not arrays and not any(state.is_active for state in plan.states.values())
    out.print(f"Next: hpc-trainer {'results' if is_over else 'status'} {grid.sweep.name}")
