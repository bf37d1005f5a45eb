"""Plan of a submit: frozen runs as arrays, checked against the existing sweep and the cluster's limits.

Writes nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import shlex
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpc_trainer.config.compose.grid import list_of
from hpc_trainer.config.load import plain_value
from hpc_trainer.config.packages import missing_package
from hpc_trainer.config.rules.memory import memory_line
from hpc_trainer.config.schema.cluster import EnvironmentConfig, Executor, HardwareConfig
from hpc_trainer.config.schema.optim import scaling_line
from hpc_trainer.config.schema.output import TrackerName
from hpc_trainer.errors import ExitCode, SlurmError
from hpc_trainer.launch.arrays import ArrayPlan, fit
from hpc_trainer.launch.extend import Twin
from hpc_trainer.launch.follow import NOTHING, Follows
from hpc_trainer.launch.freeze import Grid
from hpc_trainer.launch.frozen_code.archive import CodeChange
from hpc_trainer.launch.known import Known, first_few, timeless
from hpc_trainer.launch.pools import Packing, asks_for_pool, pack
from hpc_trainer.record.spec import RunSpec
from hpc_trainer.record.states import RunState
from hpc_trainer.runtime.pace import SIGNAL_SLACK_S, grace_warning, shortest_limit_min, training_s
from hpc_trainer.slurm.jobs import OFF
from hpc_trainer.slurm.limits import Limits
from hpc_trainer.slurm.queue import ask_left
from hpc_trainer.slurm.shape import Shape, find_shape_problems, longest_limit


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """Exact plan of a submit: `arrays` are submitted in this order, `waiting` runs follow without a user's command.

    `binding` has the limits that cut or delay arrays. `problems` are the reasons why nothing can be submitted. `starts`
    has the start that Slurm expects for each array, or None.
    """

    grid: Grid
    states: Mapping[str, RunState]
    arrays: tuple[ArrayPlan, ...]
    no_longer_in_grid: tuple[str, ...]
    waiting: tuple[RunSpec, ...] = ()
    binding: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    starts: tuple[str | None, ...] = ()
    answers: Mapping[Shape, tuple[str | None, str | None]] = field(default_factory=dict)
    """Start of each shape by `sbatch --test-only`, or the reason why there is none; shapes without an answer are
    absent."""
    notes: tuple[str, ...] = ()
    code: str | None = None
    """Digest of the frozen code that the runs import; None if nothing is frozen."""
    changed: tuple[CodeChange, ...] = ()
    """Changes of code since the submit of runs that stay as they are (completed or in the queue)."""
    twins: tuple[Twin, ...] = ()
    """Runs to be submitted that could continue a finished, shorter run (`extend_grid`)."""
    left_out: tuple[str, ...] = ()
    """Files that are not frozen because of their names, and links to code outside of the frozen folders."""
    known: Known = field(default_factory=Known)
    cluster: str | None = None
    """Name of the cluster that reported the limits."""
    exit_codes: tuple[tuple[int, int], ...] = ()
    """Pairs (our exit code, its replacement) for exit codes that the site's RequeueExit uses."""
    keeps_room: bool = True
    """False if the limits are so tight that a top-up job would take the place of a run."""

    @property
    def specs(self) -> list[RunSpec]:
        """Return the runs that will be submitted, now or once there is room; each once, with its list of hardware."""
        whole = {spec.run_id: spec for spec in self.grid.specs if spec.others}
        specs = {spec.run_id: spec for array in self.arrays for spec in array.specs}
        specs |= {spec.run_id: spec for spec in self.waiting}
        return [whole.get(run_id, spec) for run_id, spec in specs.items()]

    @property
    def gpu_hours_max(self) -> float:
        """Return the GPU-hours if every run to be submitted, or slot of a pool, takes one attempt of full length."""
        pools = [array for array in self.arrays if array.slots]
        in_pools = {spec.run_id for array in pools for spec in array.specs}
        alone = sum(gpu_hours_max(spec) for spec in self.specs if spec.run_id not in in_pools)
        return alone + sum(array.gpu_hours_max for array in pools)

    @property
    def num_to_submit(self) -> int:
        """Return the number of runs that will be submitted, now or as soon as there is room."""
        return len(self.specs)


def gpu_hours_max(spec: RunSpec) -> float:
    """Return the GPU-hours of one attempt of full length, on the item of the run's list that takes the most."""
    return max(one.gpu_hours for one in spec.on_each())


def build_plan(
    grid: Grid, known: Known | None = None, *, retry_failed: bool = False, limits: Limits | None = None
) -> SweepPlan:
    """Group the grid's runs into arrays; leave out runs that are done, at work, or failed.

    Args:
        known: known facts of the sweep; runs that are not in it are new.
        retry_failed: submit FAILED and OUT_OF_MEMORY runs too; they resume from their newest checkpoint.
        limits: limits of the cluster; None if there are none.
    """
    known, limits = known or Known(), limits or Limits()
    chosen = {spec.run_id: spec for spec in specs_to_submit(grid, known, retry_failed=retry_failed)}
    arrays, packings = _pack(_group(chosen.values(), known), chosen, limits, known.to_draw)
    no_arrays: list[str] = []
    if arrays and limits.max_elements == 0:
        limits = dataclasses.replace(limits, max_array_size=None, max_array_tasks=None)
        no_arrays = ["the cluster takes no job arrays (MaxArraySize=0), and every submission here is one."]
    fitted = fit(arrays, limits, known.active)
    wrong = {
        array.shape: find_shape_problems(array.shape, array.hardware, limits)
        for array in arrays
        if array.shape not in known.shapes
    }
    held = [_HELD.format(sweep=grid.sweep.name, held=known.hold)] if arrays and known.hold is not None else []
    packing_problems = list(dict.fromkeys(problem for packing in packings for problem in packing.problems))
    unfit = () if packing_problems else itertools.chain(*wrong.values())
    problems = [*held, *no_arrays, *known.followed.problems, *packing_problems, *unfit]
    states = {spec.run_id: _state_of(spec, known) for spec in grid.specs}
    plan = SweepPlan(
        grid=grid, states=states, arrays=fitted.now, waiting=fitted.waiting, binding=fitted.binding,
        keeps_room=fitted.keeps_room, known=known, cluster=limits.cluster,
        no_longer_in_grid=tuple(run_id for run_id in known.states if run_id not in states),
        exit_codes=clear_exit_codes(limits.requeue_exit) if arrays else (),
        answers={shape: (None, reasons[0]) for shape, reasons in wrong.items() if reasons},
    )  # fmt: skip
    packing_notes = [note for packing in packings for note in packing.notes]
    return dataclasses.replace(
        plan,
        problems=(*dict.fromkeys(problems), *_over_budget(plan)),
        notes=tuple(_notes(plan, arrays, packing_notes, limits)),
    )


def _group(specs: Iterable[RunSpec], known: Known) -> list[ArrayPlan]:
    """Return arrays of the runs that one batch script can start; a run with a list of hardware is in several."""
    groups: dict[tuple[str, Shape, int | None, Follows], list[RunSpec]] = {}
    for spec in specs:
        follows = known.followed.of_run.get(spec.run_id, NOTHING)
        for choice, on_one in enumerate(spec.on_each()):
            key = _array_environment(on_one), on_one.shape, choice if spec.others else None, follows
            groups.setdefault(key, []).append(on_one)
    return [
        ArrayPlan(
            hardware=group[0].hardware, shape=shape, specs=tuple(group),
            parallelism=int(group[0].config["cluster"]["array_parallelism"]), choice=choice, follows=follows,
        )
        for (_, shape, choice, follows), group in groups.items()
    ]  # fmt: skip


def _pack(
    arrays: Sequence[ArrayPlan], chosen: Mapping[str, RunSpec], limits: Limits, num_runs: int | None
) -> tuple[list[ArrayPlan], list[Packing]]:
    """Return the arrays, with slots of a pool in place of elements where the runs ask for one, and how it is packed.

    Args:
        arrays: the arrays.
        chosen: run id -> run with its list of hardware, which a pool does not take.
        limits: limits of the cluster.
        num_runs: number of runs of a pool whose grid is a sample of a search; None: all runs are in the grid.
    """
    packed: list[ArrayPlan] = []
    packings: list[Packing] = []
    for array in arrays:
        if not asks_for_pool(array.specs[0]):
            packed.append(array)
            continue
        packing = pack([chosen[spec.run_id] for spec in array.specs], limits, num_runs)
        packings.append(packing)
        packed.append(
            dataclasses.replace(
                array,
                shape=packing.shape,
                slots=packing.slots,
                per_node=packing.per_node,
                per_gpu=packing.per_gpu,
            )
        )
    return packed, packings


_HELD = (
    "the sweep {sweep} is {held}. Nothing of it starts. Release it, with the code of its submit: hpc-trainer release "
    "{sweep}. Or cancel what waits, and submit again: hpc-trainer cancel {sweep}"
)


def specs_to_submit(grid: Grid, known: Known, *, retry_failed: bool = False) -> list[RunSpec]:
    """Return the grid's runs that are new, interrupted or waiting; with `retry_failed` also failed runs."""
    states = ((spec, _state_of(spec, known)) for spec in grid.specs)
    return [
        spec
        for spec, state in states
        if state.needs_submit or (retry_failed and state.has_failed) or spec.run_id in known.waiting
    ]


def _state_of(spec: RunSpec, known: Known) -> RunState:
    return known.states.get(spec.run_id, RunState.NEW)


def _over_budget(plan: SweepPlan) -> Sequence[str]:
    """Return a problem for each limit of `budget.*` that active runs and this plan's runs together exceed."""
    active = [spec for spec in plan.grid.specs if plan.states[spec.run_id].is_active]
    pools = [array for array in plan.arrays if array.slots]
    in_pools = {spec.run_id for array in pools for spec in array.specs}
    counted = {spec.run_id: spec for spec in (*active, *plan.specs) if spec.run_id not in in_pools}.values()
    if not plan.specs:
        return ()
    share = [spec for spec in counted if asks_for_pool(spec)]  # at work in a pool, whose slots are at most so many
    at_work = min(len(share), max((int(spec.config["pool"]["jobs"]) for spec in share), default=0))
    jobs = len(counted) - len(share) + at_work + sum(array.slots for array in pools)
    hours = sum(map(gpu_hours_max, counted)) + sum(array.gpu_hours_max for array in pools)
    budget = plan.grid.budget
    problems = []
    if budget.max_jobs is not None and jobs > budget.max_jobs:
        problems.append(
            f"budget.max_jobs={budget.max_jobs}: this grid would have {jobs} jobs in the queue. Raise it, or take "
            "fewer points."
        )
    if budget.max_gpu_hours is not None and hours > budget.max_gpu_hours:
        problems.append(
            f"budget.max_gpu_hours={budget.max_gpu_hours:g}: this grid may take up to {hours:.4g} GPU-hours (each "
            "run's time limit once). Raise it, shorten hardware.time_limit_min, or take fewer points."
        )
    if budget.max_gpu_hours is not None and not problems:
        problems += _over_account(plan.specs)
    return problems


def _over_account(specs: Sequence[RunSpec]) -> Iterator[str]:
    """Yield a problem for each account with fewer GPU-hours left than new runs may take, if sshare reports them."""
    hours: dict[str, float] = {}
    for spec in specs:
        if spec.config["cluster"]["executor"] == Executor.slurm.value and spec.shape.account is not None:
            hours[spec.shape.account] = hours.get(spec.shape.account, 0.0) + gpu_hours_max(spec)
    for account, needed in hours.items():
        left = None
        with contextlib.suppress(SlurmError):  # many sites have no sshare, or no limit
            left = ask_left(account).get("gpu") if needed else None
        if left is not None and needed > left:
            yield (
                f"budget.max_gpu_hours: account {account} has {left:.4g} GPU-hours left (sshare), and this grid may "
                f"take up to {needed:.4g}. Shorten hardware.time_limit_min, take fewer points or another "
                "cluster.account, or leave the budget out."
            )


def _name_notes(specs: Sequence[RunSpec]) -> Iterator[str]:
    """Yield a note on each hardware profile that was chosen by another name than its file's `name:`."""
    chosen: dict[str, str] = {}
    alike: dict[tuple[str | None, ...], RunSpec] = {}  # each choice once: 10,000 points share a few
    for spec in specs:
        words = [word for word in spec.overrides if word.startswith("hardware")]
        alike[(spec.axes.get("hardware"), spec.hardware, *words)] = spec
    for spec in alike.values():
        overrides = dict(word.partition("=")[::2] for word in spec.overrides)
        typed = spec.axes.get("hardware", overrides.get("hardware"))
        if typed is None or "hardware.name" in overrides:
            continue
        items = list_of("hardware", typed) or [typed]
        names = [spec.hardware, *(other.hardware for other in spec.others)]
        if len(items) == len(names):
            chosen |= zip(items, names, strict=True)
    for typed, name in chosen.items():
        if typed != name:
            state = "has no name" if name == HardwareConfig().name else f"has name: {name}"
            yield (
                f"hardware={typed}: its file {state}, by which plans, results and measured figures know it. Write "
                f"name: {typed} into {typed}.yaml."
            )


_NO_ENVIRONMENT = plain_value(EnvironmentConfig())


def _array_environment(spec: RunSpec) -> str:
    # An array has one script: runs with different setup lines or srun arguments cannot share it.
    cluster = spec.config["cluster"]
    shared = [cluster[key] for key in ("setup", "python", "srun_args", "array_parallelism")]
    # Specs of older versions lack these.
    pool = spec.config.get("pool") if asks_for_pool(spec) else None
    mail = spec.config.get("notify", {}).get("mail")
    return repr([*shared, mail, cluster.get("sbatch"), cluster.get("environment") or _NO_ENVIRONMENT, pool])


def specs_to_write(plan: SweepPlan, known: Mapping[str, RunSpec]) -> list[RunSpec]:
    """Return the specs that the sweep's file lacks or has with other values, such as a longer time limit.

    They are in the order of the grid, whichever array has them.
    """
    written = [spec for spec in plan.specs if spec.run_id not in known or _bare(spec) != _bare(known[spec.run_id])]
    places = {spec.run_id: place for place, spec in enumerate(plan.grid.specs)}
    return sorted(written, key=lambda spec: places.get(spec.run_id, len(places)))


def _bare(spec: RunSpec) -> RunSpec:
    return dataclasses.replace(spec, axes={}, overrides=())


# Exit codes that no shell, signal or sysexits.h uses (79-125), as replacements if a site uses ours.
_SPARE_CODES = range(79, 126)
_OWN_CODES = (ExitCode.STORAGE, ExitCode.REQUEUED, ExitCode.NO_PROGRESS, ExitCode.CONFIG)


def clear_exit_codes(taken: frozenset[int]) -> tuple[tuple[int, int], ...]:
    """Return (our code, its replacement) for each of our exit codes after which the site requeues or holds a job.

    Without replacements a run that stopped for good would restart, and a requeued run would be requeued twice.
    """
    spare = (code for code in _SPARE_CODES if code not in taken)
    return tuple((int(code), next(spare)) for code in _OWN_CODES if code in taken)


_MOST_LRS = 8
_MOST_MODELS = 4
_MOST_TRACKERS = 3


def _notes(plan: SweepPlan, arrays: Sequence[ArrayPlan], packing_notes: Iterable[str], limits: Limits) -> Iterator[str]:
    """Yield the notes for the user that `plan` shows.

    Args:
        plan: the plan.
        arrays: its arrays before they were cut to the limits of a submit.
        packing_notes: notes on the packing of pools.
        limits: limits of the cluster.
    """
    grid, known = plan.grid, plan.known
    yield from (*grid.notes, *known.notes, *limits.notes)
    yield from (f"Runs start after {line}." for line in known.followed.lines)
    yield from _list_note([spec for array in plan.arrays for spec in array.specs if array.choice is not None])
    yield from _closed_note(grid)
    yield from packing_notes
    yield from _taken_codes_note(plan.exit_codes)
    yield from _grace_notes(arrays, known, limits)
    yield from dict.fromkeys(_limit_notes(arrays, known, limits))
    yield from dict.fromkeys(_whole_node_notes(arrays, limits))
    yield from _name_notes(grid.specs)
    too_large = (memory_line(spec.config, spec.shape.world_size, spec.per_gpu) for spec in grid.specs)
    yield from first_few((scaling_line(spec.config) for spec in grid.specs), _MOST_LRS, "learning rates are scaled")
    yield from first_few(too_large, _MOST_MODELS, "models do not fit")
    yield from first_few((_tracker_line(spec.config) for spec in grid.specs), _MOST_TRACKERS, "trackers")
    yield from first_few((_webhook_line(spec.config) for spec in grid.specs), _MOST_TRACKERS, "webhooks")


def _list_note(specs: Sequence[RunSpec]) -> Iterator[str]:
    """Yield a note on runs with a list of hardware, given once for each of their jobs."""
    if specs:
        jobs = f"{len({spec.run_id for spec in specs})} run(s) have {len(specs)} jobs (hardware=first:..)"
        yield f"{jobs}: the first job that starts executes the run, and the others are cancelled."


def _closed_note(grid: Grid) -> list[str]:
    """Name existing folders whose modes keep the group out of a sweep that it should read."""
    if not grid.group_readable:
        return []
    folder = grid.sweep.folder.absolute()
    above = [
        parent
        for parent in folder.parents
        if parent.is_dir() and not parent.stat().st_mode & (stat.S_IXGRP | stat.S_IXOTH)
    ]
    is_closed = folder.is_dir() and not folder.stat().st_mode & stat.S_IRGRP
    if not above and not is_closed:
        return []
    commands = [f"chmod g+x {shlex.join(map(str, above))}"] if above else []
    commands += [f"chmod -R g+rX {shlex.quote(str(folder))}"] if is_closed else []
    listed = ", ".join(map(str, [*above, *([folder] if is_closed else [])]))
    return [f"paths.group_readable=true: the modes of {listed} keep the group out. Type: {'; '.join(commands)}"]


def _grace_notes(arrays: Sequence[ArrayPlan], known: Known, limits: Limits) -> Iterator[str]:
    """Yield a warning for each array whose runs get too little time to save when they are preempted.

    Such a run loses up to one checkpoint interval.
    """
    for array in arrays:
        needed = known.stop_s.get(array.shape)
        partition = limits.partition_of(array.shape.partition)
        if needed is None or partition is None or limits.kill_wait_s is None or partition.preempt_mode == OFF:
            continue
        warning = grace_warning(needed, partition.name, partition.grace_s, limits.kill_wait_s)
        if warning is not None:
            yield f"{array.hardware}: {warning} Use a partition with a longer grace period, or checkpoint.every=auto."


# Seconds from the allocation to the first step: Python and torch come from a shared file system, not the page cache.
_START_S = 30.0


def _limit_notes(arrays: Sequence[ArrayPlan], known: Known, limits: Limits) -> Iterator[str]:
    """Yield a warning for each array whose runs may have to stop before they have trained."""
    for array in arrays:
        shape, cluster = array.shape, array.specs[0].config["cluster"]
        if {type(shape.signal_lead_s), type(shape.time_limit_min)} != {int}:
            continue  # a spec that was edited by hand is refused when its script is written
        share, told_s = cluster.get("min_goodput", 0.0), known.start_s.get(timeless(shape))
        start_s = _START_S if told_s is None else told_s
        left_s = training_s(shape.time_limit_min, shape.signal_lead_s, start_s)
        if cluster["executor"] != Executor.slurm.value or left_s > share * 60 * shape.time_limit_min:
            continue
        needed_min = shortest_limit_min(start_s, share, cluster["signal_lead_s"])
        source = "the median of this sweep's runs"
        if told_s is None:
            source = "assumed, because no run of this sweep has measured it"
        yield (
            f"{array.hardware}: hardware.time_limit_min={shape.time_limit_min} leaves {max(0.0, left_s):.0f} s for "
            f"training. A start takes {start_s:.0f} s ({source}); Slurm sends its warning {shape.signal_lead_s} s "
            f"before the limit (cluster.signal_lead_s) and may send it {SIGNAL_SLACK_S} s earlier. A run that is not "
            f"done by then may do one step an attempt. {_longer(needed_min, shape, limits)}"
        )


_IDLE_CPUS = 0.5


def _whole_node_notes(arrays: Sequence[ArrayPlan], limits: Limits) -> Iterator[str]:
    """Yield a note for each array whose jobs get whole nodes, and pay for more of them than they use."""
    for array in arrays:
        shape, partition = array.shape, limits.partition_of(array.shape.partition)
        reasons = {
            "hardware.whole_node=true": shape.whole_node,
            f"partition {'' if partition is None else partition.name} gives whole nodes": limits.gives_whole_nodes
            or (partition is not None and partition.gives_whole_nodes),
        }
        reason = next((text for text, is_so in reasons.items() if is_so), None)
        nodes = [group for group in limits.nodes if partition is not None and group.partition == partition.name]
        if reason is None or not nodes:
            continue
        gpus, cpus = min(sum(group.gpus.values()) for group in nodes), min(group.cpus for group in nodes)
        used_cpus = shape.tasks_per_node * shape.cpus_per_task
        if shape.gpus_per_node and gpus > shape.gpus_per_node:
            hours = shape.gpu_hours * gpus / shape.gpus_per_node
            used = f"{shape.gpus_per_node} of {gpus} GPUs: up to {hours:.4g} GPU-hours a run, of which the plan counts"
            usage = f"{used} {shape.gpu_hours:.4g}. Use hardware.gpus_per_node={gpus}"
        elif not shape.gpus_per_node and used_cpus < _IDLE_CPUS * cpus:
            usage = f"{used_cpus} of {cpus} CPUs. Use more ranks (hardware.tasks_per_node) or cores"
        else:
            continue
        yield (
            f"{array.hardware}: each job has its nodes alone ({reason}), and uses {usage}, or run several in "
            "one job, by the same submit with cluster=local local.max_parallel=N inside it."
        )


def _longer(needed_min: int, shape: Shape, limits: Limits) -> str:
    bound = longest_limit(shape, limits)
    if bound is None or bound[0] >= needed_min:
        return f"Use hardware.time_limit_min={needed_min} or more."
    others = [
        partition.name
        for partition in limits.partitions.values()
        if partition.max_time_min is None or partition.max_time_min >= needed_min
    ]
    listed = f" Partitions that allow it: {', '.join(others)}." if others and "partition" in bound[1] else ""
    return f"It needs hardware.time_limit_min={needed_min}, and the {bound[1]} is {bound[0]}.{listed}"


def _tracker_line(config: Mapping[str, Any]) -> str | None:
    """Return a note if the tracker's package is missing here; None if it is present.

    With another Python on the nodes (cluster.python) their packages are unknown, so only synced trackers are checked.
    """
    name = TrackerName(config.get("tracker", {}).get("name", TrackerName.none))
    missing = None if config["cluster"].get("python") and not name.is_synced else missing_package(name)
    if missing is None:
        return None
    what = "hpc-trainer sync needs it here" if name.is_synced else "without it the runs write no event files"
    return f"{missing}; {what}. Training continues without it."


def _webhook_line(config: Mapping[str, Any]) -> str | None:
    """Return a note if the jobs will not have the variable with the webhook's address; its value is never shown."""
    variable, cluster = config.get("notify", {}).get("webhook_env"), config["cluster"]
    if variable is None or any(variable in line for line in cluster.get("setup", ())):
        return None
    if cluster["executor"] == Executor.slurm and not cluster.get("environment", {}).get("inherit", True):
        found = "with cluster.environment.inherit=false the jobs do not inherit it. Set it in cluster.setup"
    elif not (address := os.environ.get(variable)):
        found = (
            f"this shell has no variable {variable} that the jobs could inherit. Type export {variable}=ADDRESS before "
            "submit, or set it in cluster.setup"
        )
    elif not address.startswith(("https://", "http://")):
        found = "its value does not begin with https:// or http://. Export the whole address before submit"
    else:
        return None
    return f"notify.webhook_env={variable}: {found}; otherwise nobody gets a message."


def _taken_codes_note(exit_codes: Sequence[tuple[int, int]]) -> Iterator[str]:
    if exit_codes:
        listed = ", ".join(f"{instead} instead of {ours}" for ours, instead in exit_codes)
        yield f"This site requeues or holds jobs by hpc-trainer's exit codes (RequeueExit): jobs end with {listed}."
