"""A plan and the result of its submit, as tables and as JSON."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from rich.markup import escape

from hpc_trainer.cli.common import as_typed, counts_line, gpu_hours, print_next, print_table, say
from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.launch.arrays import ArrayPlan
from hpc_trainer.launch.expected import Expected
from hpc_trainer.launch.fit import Candidate, Fit, duration, moment
from hpc_trainer.launch.grids import Submitted
from hpc_trainer.launch.memory import CONTEXT_GB, FRAGMENTS, PARTS, Need
from hpc_trainer.launch.plan import SweepPlan
from hpc_trainer.launch.stages import Chain
from hpc_trainer.launch.submit import array_script_of
from hpc_trainer.record.spec import shown_axis
from hpc_trainer.record.states import RunState

_LEFT_OUT_SHOWN = 10
_RUNS_SHOWN = 50
_CHANGED_SHOWN = 3
_ONLY_OF_PLAN = ("--script", "--dry-run", "--memory", "--fit")


def plan_json(plan: SweepPlan) -> dict[str, Any]:
    """Return the JSON of `plan` (docs/json.md)."""
    return {
        "sweep": plan.grid.sweep.name,
        "runs": [
            {"run_id": spec.run_id, "overrides": dict(spec.axes), "hardware": spec.hardware_names,
             "state": plan.states[spec.run_id].value}
            for spec in plan.grid.specs
        ],
        "arrays": [
            {"hardware": array.hardware, "runs": len(array.specs), "nodes": array.shape.num_nodes,
             "gpus_per_node": array.shape.gpus_per_node, "partition": array.shape.partition,
             "time_limit_min": array.shape.time_limit_min,
             "gpu_hours_max": array.gpu_hours_max, "start": start,
             "slots": array.slots or None, "per_node": array.per_node or None,
             "per_gpu": array.per_gpu if array.slots else None,
             "script": array_script_of(plan, array)}
            for array, start in zip_longest(plan.arrays, plan.starts)
        ],
        "waiting": len(plan.waiting),
        "no_longer_in_grid": list(plan.no_longer_in_grid),
        "duplicates": plan.grid.num_duplicates,
        "excluded": plan.grid.num_excluded,
        "gpu_hours_max": plan.gpu_hours_max,
        "limits": list(plan.binding),
        "changed_code": _changed_json(plan),
        "shorter_twins": _twins_json(plan),
        "left_out": list(plan.left_out),
        "notes": list(plan.notes),
        "problems": list(plan.problems),
    }  # fmt: skip


def submit_json(done: Submitted) -> dict[str, Any]:
    """Return the JSON of `submit` (docs/json.md)."""
    plan, outcome = done.plan, done.outcome
    return {
        "sweep": plan.grid.sweep.name,
        "submitted": done.num_submitted,
        "waiting": len(outcome.waiting),
        "already": done.num_already,
        "arrays": [
            {"job_id": array.job_id, "runs": len(array.run_ids), "hardware": array.hardware,
             "slots": array.slots or None}
            for array in done.arrays
        ],
        "top_up_job": outcome.top_up,
        "limits": list(plan.binding),
        "changed_code": _changed_json(plan),
        "shorter_twins": _twins_json(plan),
        "left_out": list(plan.left_out),
        "notes": [*plan.notes, *outcome.notes],
    }  # fmt: skip


def _twins_json(plan: SweepPlan) -> list[dict[str, Any]]:
    return [{"run_id": twin.run_id, "twin": twin.twin, "step": twin.step, "why": twin.why} for twin in plan.twins]


def _changed_json(plan: SweepPlan) -> list[dict[str, Any]]:
    return [{"code": change.code, "runs": change.num_runs, "files": list(change.files)} for change in plan.changed]


def print_plan(plan: SweepPlan) -> None:
    """Print the plan for the user to read before submitting."""
    grid = plan.grid
    say(f" in {grid.sweep.folder} ({grid.executor.value})", f"Sweep [bold]{grid.sweep.name}[/]")
    axes = [axis for axis in dict.fromkeys(axis for spec in grid.specs for axis in spec.axes) if axis != "hardware"]
    print_table(
        ["RUN", "HARDWARE", "STATE", *axes],
        [
            [
                spec.run_id,
                spec.hardware_names,
                plan.states[spec.run_id],
                *(shown_axis(spec.axes.get(axis, "-")) for axis in axes),
            ]
            for spec in grid.specs[:_RUNS_SHOWN]
        ],
        least=("HARDWARE",),
    )
    if len(grid.specs) > _RUNS_SHOWN:
        say(f"... and {len(grid.specs) - _RUNS_SHOWN} more (--json lists all)")
    for number, (array, start) in enumerate(zip_longest(plan.arrays, plan.starts)):
        shape = array.shape
        where = f"partition {shape.partition or 'default'}, {shape.time_limit_min} min"
        expected = f", expected start {start}" if start else ""
        if array.slots:
            say(f"Pool {number}: {_packing(array)}, {where}{expected}")
            continue
        say(
            f"Array {number}: {len(array.specs)} run(s) on {array.hardware}: {shape.num_nodes} node(s) × "
            f"{shape.ranks_per_node} rank(s), {shape.gpus_per_node} GPU(s) a node, {where}, at most "
            f"{gpu_hours(array.gpu_hours_max)}{expected}"
        )
    _say_limits(plan)
    if plan.waiting:
        say(f"{len(plan.waiting)} run(s) wait in the sweep's own queue; a top-up job submits them.")
    say(f"{_counts(plan)}. To submit: {plan.num_to_submit}, at most {gpu_hours(plan.gpu_hours_max)}.")
    _say_notes(plan, ())
    for problem in plan.problems:
        say(problem, "[red]Problem:[/] ")


def _packing(array: ArrayPlan) -> str:
    """Describe how the runs of a pool are packed, and compare that with one job for each run."""
    run_shape = array.specs[0].shape
    alone_hours = run_shape.gpu_hours * len(array.specs)
    sharing = f", {array.per_gpu} on each GPU" if array.per_gpu > 1 else ""
    return (
        f"{len(array.specs)} run(s) on {array.hardware}, in {array.slots} slot(s) of {array.per_node} place(s){sharing}"
        f": {array.slots} job(s) instead of {len(array.specs)}, with {array.shape.gpus_per_node} GPU(s) and "
        f"{array.shape.cpus_per_task} CPU(s) each; one time limit of each slot is {gpu_hours(array.gpu_hours_max)}, of "
        f"each run alone {gpu_hours(alone_hours)}"
    )


def print_chain(chain: Chain) -> None:
    """Print the stages of a chain in order, each with its runs, its hardware and the stages that it follows."""
    count = sum(len(stage.grid.specs) for stage in chain.stages)
    say(f": {len(chain.stages)} stages, {count} run(s)", f"Chain [bold]{escape(chain.name)}[/]")
    depth: dict[str, int] = {}
    for stage in chain.stages:
        depth[stage.name] = max((depth[name] + 1 for name in stage.follows if name in depth), default=0)
        hardware = ", ".join(dict.fromkeys(spec.hardware_names for spec in stage.grid.specs))
        follows = f", follows {' and '.join(stage.follows)}" if stage.follows else ""
        arrow = f"{'   ' * (depth[stage.name] - 1)}└─ " if depth[stage.name] else ""
        say(f"  {arrow}{stage.name}: {len(stage.grid.specs)} run(s) on {hardware}{follows}  ({stage.grid.sweep.name})")


def print_next_of(plan: SweepPlan) -> None:
    """Print the submit command of the plan if it would submit a run; else the command that shows its runs."""
    if plan.problems:
        return
    if plan.num_to_submit:
        print_next(f"submit {submit_words()}")
    elif plan.grid.specs:
        is_done = set(plan.states.values()) == {RunState.COMPLETED}
        print_next(f"{'results' if is_done else 'status'} {plan.grid.sweep.name}")


def submit_words() -> str:
    """Return the arguments of this command that `submit` takes too."""
    return shlex.join(word for word in sys.argv[2:] if word not in _ONLY_OF_PLAN)


def say_changed(plan: SweepPlan) -> None:
    """Print files that changed since the submit of runs that stay as they are, and the command that restarts them."""
    files = list(dict.fromkeys(file for change in plan.changed for file in change.files))
    if not files:
        return
    shown = ", ".join(files[:_CHANGED_SHOWN])
    more = f" and {len(files) - _CHANGED_SHOWN} more" if len(files) > _CHANGED_SHOWN else ""
    stay = sum(change.num_runs for change in plan.changed)
    say(
        f"Changed since {stay} of these runs were submitted: {shown}{more}. These runs keep the code that they were "
        "submitted with."
    )
    print(as_typed(f"To run them anew: hpc-trainer {_verb()} --fresh {submit_words()}"))


def _verb() -> str:
    return "train" if sys.argv[1:2] == ["train"] else "submit"


def say_twins(plan: SweepPlan) -> None:
    """Print runs with a shorter twin, and the command that continues where the twin ended."""
    there = [twin for twin in plan.twins if twin.is_extended]
    can = [twin for twin in plan.twins if twin.step is not None]
    cannot = [twin for twin in plan.twins if twin.why is not None]
    for twins, state in ((there, "already exist as extended runs"), (can, "have a shorter, completed twin")):
        if twins:
            step = f", step {twins[0].step}" if twins[0].step is not None else ""
            say(f"{len(twins)} of these runs {state} ({twins[0].twin}{step}), and begin at step 0.")
            print(as_typed(f"To continue from there: hpc-trainer {_verb()} --extend {submit_words()}"))
    if cannot:
        first = cannot[0]
        say(f"{len(cannot)} of these runs cannot continue where shorter twins ended ({first.twin}): {first.why}.")


def _counts(plan: SweepPlan) -> str:
    return counts_line(Counter(state.value for state in plan.states.values()))


def _axes_line(axes: Mapping[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in axes.items())


def _say_limits(plan: SweepPlan) -> None:
    for line in plan.binding:
        say(f"Limit: {line}")


def _say_notes(plan: SweepPlan, more: Sequence[str]) -> None:
    grid = plan.grid
    say_changed(plan)
    say_twins(plan)
    for line in dict.fromkeys((*plan.notes, *more)):
        say(f"Note: {line}")
    if plan.left_out:
        shown = "; ".join(plan.left_out[:_LEFT_OUT_SHOWN])
        others = len(plan.left_out) - _LEFT_OUT_SHOWN
        also = f"; and {others} more (--json lists all)" if others > 0 else ""
        say(f"Not in the frozen code (secrets by their names, links to code outside): {shown}{also}")
    if grid.num_duplicates:
        say(f"{grid.num_duplicates} point(s) gave the same run as another point, and were merged.")
        for kept, merged in grid.duplicates:
            say(f"  {_axes_line(merged)} is the same run as {_axes_line(kept)}")
    if grid.num_excluded:
        say(f"{grid.num_excluded} point(s) were left out by sweep.exclude.")
    if grid.compose_counts.get("hydra"):
        say(f"{grid.compose_counts['hydra']} point(s) used Hydra's own compose, 0.1 s each (docs/grids.md).")
    if plan.no_longer_in_grid:
        say(f"{len(plan.no_longer_in_grid)} run(s) of this sweep are not in this grid; they are left unchanged.")
    failed = sum(state.has_failed for state in plan.states.values())
    if failed and not any(plan.states[spec.run_id].has_failed for spec in plan.specs):
        say(f"{failed} failed run(s) stay as they are; --retry-failed submits them again.")
    cancelled = [run_id for run_id, state in plan.states.items() if state is RunState.CANCELLED]
    if cancelled:
        back = f"hpc-trainer retry {cancelled[0]} restarts it"
        say(as_typed(f"{len(cancelled)} cancelled run(s) stay cancelled; {back}."))
    gone = [run_id for run_id, state in plan.states.items() if state is RunState.GONE]
    if gone:
        text = f"{len(gone)} completed run(s) have lost their folders"
        say(as_typed(f"{text}; hpc-trainer retry {gone[0]} trains one again."))


def print_submitted(done: Submitted, *, has_next: bool = True) -> None:
    """Print the submitted and the waiting runs, and the next useful command if `has_next`."""
    plan, outcome = done.plan, done.outcome
    grid = plan.grid
    if not outcome.arrays and not outcome.waiting:
        is_done = all(state is RunState.COMPLETED for state in plan.states.values())
        say(f"Sweep {grid.sweep.name}: {'all is done' if is_done else 'nothing to submit'} ({_counts(plan)}).")
    for array in outcome.arrays:
        where = f"job {array.job_id}" if grid.executor is Executor.slurm else "this machine"
        slots = f"{array.slots} slot(s) of a pool, " if array.slots else ""
        say(f"Submitted {len(array.run_ids)} run(s) on {array.hardware} to {slots}{where}.")
    _say_limits(plan)
    if outcome.waiting:
        by = f"job {outcome.top_up} submits them as runs end" if outcome.top_up else "no job will submit them"
        say(f"{len(outcome.waiting)} run(s) wait in the sweep's own queue; {by}.")
    if outcome.arrays and done.num_already:
        say(f"{done.num_already} run(s) were there already.")
    _say_notes(plan, outcome.notes)
    at_work = outcome.arrays or outcome.waiting or any(state.is_active for state in plan.states.values())
    if has_next:
        print_next(f"{'status' if at_work else 'results'} {grid.sweep.name}")


def memory_json(needs: Sequence[Need]) -> list[dict[str, Any]]:
    """Return the JSON of `plan --memory` (docs/json.md)."""
    return [{**dataclasses.asdict(need), "total_gb": need.total_gb, "warning": need.warning} for need in needs]


def print_needs(needs: Sequence[Need]) -> None:
    """Print a line for each kind of training, a warning if its GPU cannot hold it, a problem if its estimate failed."""
    if not needs:
        say("Memory: unknown for a loop or program of your own (train.main, train.command).")
        return
    if any(need.parts for need in needs):
        _print_estimates(needs)
    for need in needs:
        if need.problem is not None:
            say(f"the memory of {need.run_id} could not be estimated: {need.problem}", "[red]Problem:[/] ")
        if need.note is not None:
            say(f"Note: {need.run_id}: {need.note}")
        if need.warning is not None:
            say(need.warning, "[yellow]Warning:[/] ")


def expected_json(expected: Sequence[Expected]) -> list[dict[str, Any]]:
    """Return the times in the JSON of `plan` that follow from `hardware check --run` (docs/json.md)."""
    return [dataclasses.asdict(times) for times in expected]


def print_expected(expected: Sequence[Expected]) -> None:
    """Print the expected times of a plan's runs, which follow from measurements of the hardware."""
    for times in expected:
        if times.lines:
            say(f"Expected on {times.hardware}, by {times.source}:")
        for line in times.lines:
            say(f"  {line}.")


def fit_json(fit: Fit) -> dict[str, Any]:
    """Return the JSON of `plan --fit` (docs/json.md)."""
    return {
        "why": fit.why,
        "compared_by": "end" if fit.by_end else "start",
        "candidates": [
            {"hardware": candidate.hardware, "partition": candidate.shape.partition, "runs": candidate.num_runs,
             "longest_run": candidate.run_id, "start": candidate.start, "end": candidate.end,
             "duration_s": candidate.duration_s, "waits_s": candidate.waits_s, "steps": candidate.steps,
             "segments": candidate.segments,
             "note": candidate.note, "time_limit_min": candidate.shape.time_limit_min,
             "speed": None if candidate.speed is None else dataclasses.asdict(candidate.speed)}
            for candidate in fit.candidates
        ],
        "waiting": [dataclasses.asdict(job) for job in fit.waiting],
    }  # fmt: skip


def print_fit(fit: Fit) -> None:
    """Print the hardware of the plan, the one on which runs end soonest first, and why that one is first."""
    if fit.candidates:
        say("\nHardware, soonest end first; each line shows the run that needs the most time there")
        print_table(
            ["HARDWARE", "PARTITION", "RUNS", "START", "STEPS", "STEP", "ATTEMPTS", "NEEDS", "WAITS", "END", "NOTE"],
            [_fit_row(candidate) for candidate in fit.candidates],
            least=("HARDWARE", "START", "END"),
        )
    for job in fit.waiting[:_RUNS_SHOWN]:
        say(f"Already waiting: {job.run_id} as job {job.job_id}, expected start {moment(job.start)}")
    if fit.candidates or not fit.waiting:
        say(fit.why)


def _fit_row(candidate: Candidate) -> list[str]:
    return [
        candidate.hardware, candidate.shape.partition or "-", str(candidate.num_runs),
        moment(candidate.start).removeprefix("at "), str(candidate.steps),
        "-" if candidate.speed is None else f"{candidate.speed.step_s:.3g} s",
        "-" if candidate.segments is None else str(candidate.segments),
        "-" if candidate.duration_s is None else duration(candidate.duration_s),
        "-" if (candidate.segments or 1) == 1 else duration(candidate.waits_s),
        moment(candidate.end).removeprefix("at "), candidate.note or "-",
    ]  # fmt: skip


def _kind_name(need: Need) -> str:
    """Return the point of the first run of a kind, else its id; and the item of its list of hardware."""
    point = " ".join(f"{key}={value}" for key, value in need.axes.items()) or need.run_id
    return point if need.hardware is None else f"{point} on {need.hardware} {need.gpu_type or ''}".rstrip()


def _print_estimates(needs: Sequence[Need]) -> None:
    shown = [part for part in PARTS if any(need.parts.get(part) for need in needs)]
    say(f"\nGB of a rank's memory; the total adds {FRAGMENTS:.0%} for fragmentation and {CONTEXT_GB:g} GB for CUDA")
    has_measured = any(need.measured_gb is not None for need in needs)
    print_table(
        ["RUNS", "AS", "BATCH", *(part.upper() for part in shown), "TOTAL", *["MEASURED"] * has_measured, "CHECKPOINT"],
        [
            [
                str(need.num_runs), _kind_name(need),
                str(need.micro_batch_size),
                *(f"{need.parts[part]:.3g}" for part in shown), f"{need.total_gb or 0:.3g}",
                *["-" if need.measured_gb is None else f"{need.measured_gb:.3g}"] * has_measured,
                f"{need.checkpoint_gb or 0:.3g}",
            ]
            for need in needs if need.parts
        ],
        least=[part.upper() for part in reversed(shown)],
    )  # fmt: skip
