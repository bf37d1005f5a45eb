"""Plan of a submit: frozen runs as arrays, checked against the existing sweep and the cluster's limits.

Writes nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import shlex
import stat
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpc_trainer.config.compose.grid import list_of
from hpc_trainer.config.load import plain_value
from hpc_trainer.config.packages import missing_package
from hpc_trainer.config.rules.memory import memory_line
from hpc_trainer.config.schema.cluster import EnvironmentConfig, Executor, HardwareConfig, SnapshotMode
from hpc_trainer.config.schema.optim import scaling_line
from hpc_trainer.config.schema.output import TrackerName
from hpc_trainer.errors import ExitCode, SlurmError
from hpc_trainer.launch.extend import Twin
from hpc_trainer.launch.follow import NOBODY, NOTHING, Followed, Follows
from hpc_trainer.launch.freeze import Grid
from hpc_trainer.launch.frozen_code.archive import CodeChange
from hpc_trainer.launch.pools import asks_for_pool, pack
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.ledger import STARTS, Kind
from hpc_trainer.record.reading import told_few
from hpc_trainer.record.run_figures import ledger_of_run
from hpc_trainer.record.run_status import RunStatus
from hpc_trainer.record.spec import RunSpec
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import SweepStatus, read_status
from hpc_trainer.record.submissions import Submission
from hpc_trainer.runtime.pace import SIGNAL_SLACK_S, grace_warning, shortest_limit_min, training_s
from hpc_trainer.slurm.jobs import OFF
from hpc_trainer.slurm.limits import Limits, SubmitCap
from hpc_trainer.slurm.queue import ask_left
from hpc_trainer.slurm.shape import Shape, find_shape_problems, longest_limit

# Division of runs into arrays of legal size that fit the cluster's limits now, and runs that wait for room.

# A dependency is one argument of a command (128 KiB on Linux); the newest jobs end last.
_MOST_AWAITED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayPlan:
    """Runs of one shape that will be submitted together.

    `parallelism` elements may run at once (`%N`). With `after` the array begins when all those jobs have ended. With
    `behind` it begins when the array that many places earlier in the plan has ended. Both enforce
    `cluster.array_parallelism` across several arrays.
    """

    hardware: str
    shape: Shape
    specs: tuple[RunSpec, ...]
    parallelism: int = 1
    after: tuple[str, ...] = ()
    behind: int | None = None
    choice: int | None = None
    """Item of the runs' list of hardware (`hardware=first:a,b`) on which `specs` are; None for runs without a list."""
    canaries: tuple[str, ...] = ()
    """Runs that must have trained and saved before Slurm may start this array (launch/grids.py)."""
    slots: int = 0
    """Jobs of a pool that work through the runs; 0: each run is an element. `shape` is that of a slot."""
    per_node: int = 0
    """Runs beside each other in a slot of a pool."""
    per_gpu: int = 1
    """Runs of a slot that share one GPU."""
    follows: Follows = NOTHING
    """Jobs of other runs that end before the array begins (`after`)."""

    @property
    def num_elements(self) -> int:
        """Number of jobs: one for each slot of a pool, or one for each run."""
        return self.slots or len(self.specs)

    @property
    def gpu_hours_max(self) -> float:
        """GPU-hours if each of its jobs runs to its time limit once."""
        return self.shape.gpu_hours * self.num_elements

    @property
    def place(self) -> tuple[str, int | None]:
        """Key of the arrays that share `parallelism`. Items of a list do not share it: none may wait for another."""
        return f"{self.hardware}{' (pool)' if self.slots else ''}", self.choice


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveArray:
    """Array that was submitted before and has not ended, or the successor job of one run."""

    job_id: str
    hardware: str
    parallelism: int
    num_active: int
    choice: int | None = None
    """As in `ArrayPlan`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Arrays to submit `now`, in this order, runs left `waiting`, and the `binding` limits that caused it."""

    now: tuple[ArrayPlan, ...]
    waiting: tuple[RunSpec, ...] = ()
    binding: tuple[str, ...] = ()
    keeps_room: bool = True
    """False if no room was kept for a top-up job, because no run would fit then."""


def fit(arrays: Sequence[ArrayPlan], limits: Limits, active: Sequence[ActiveArray] = ()) -> Fitted:
    """Cut arrays into chunks of at most `limits.max_elements`, as many as the submit limits have room for.

    If runs have to wait, room for one job is kept for the top-up job that submits them later.

    Args:
        arrays: one for each shape; `parallelism` is the number of elements that all its chunks may run at once.
        active: this sweep's jobs that are in the queue already and count against `parallelism`.
    """
    whole = _fit(arrays, limits, active, reserve=None)
    if not whole.waiting:
        return whole
    reserved = _fit(arrays, limits, active, reserve=arrays[0].shape)
    if whole.now and not reserved.now:
        return dataclasses.replace(whole, keeps_room=False)
    return reserved


def _fit(arrays: Sequence[ArrayPlan], limits: Limits, active: Sequence[ActiveArray], reserve: Shape | None) -> Fitted:
    room = _Room(limits)
    if reserve is not None:
        room.take(reserve, 1)
    now, waiting, binding = list[ArrayPlan](), list[RunSpec](), list[str]()
    for array in arrays:
        if array.slots:
            slots = min(array.slots, room.of(array.shape), limits.max_elements or array.slots)
            if slots < array.slots:
                binding += room.full(array.shape, slots) if slots < (limits.max_elements or array.slots) else ()
            room.take(array.shape, slots)
            if slots:
                now.append(dataclasses.replace(array, slots=slots, parallelism=slots))
            else:
                waiting += array.specs
            continue
        count = min(len(array.specs), room.of(array.shape))
        if count < len(array.specs):
            waiting += array.specs[count:]
            binding += room.full(array.shape, count)
        room.take(array.shape, count)
        chunks = list(_chunks(array, count, limits.max_elements))
        if len(chunks) > 1:
            name = "MaxArraySize" if limits.max_elements == limits.max_array_size else "max_array_tasks"
            binding.append(
                f"{name} is {limits.max_elements}: {count} runs on {array.hardware} are {len(chunks)} arrays"
            )
        now += chunks
    submitted = {spec.run_id for array in now for spec in array.specs}  # a run with a list needs one job only
    shared = {place: _share(place, now, active) for place in dict.fromkeys(array.place for array in now)}
    return Fitted(
        now=tuple(next(shared[array.place]) for array in now),
        waiting=tuple({spec.run_id: spec for spec in waiting if spec.run_id not in submitted}.values()),
        binding=tuple(dict.fromkeys(binding)),
    )


def _chunks(array: ArrayPlan, count: int, size: int | None) -> Iterator[ArrayPlan]:
    for start in range(0, count, size or max(1, count)):
        specs = array.specs[start : min(count, start + (size or count))]
        yield dataclasses.replace(array, specs=specs)


def _share(
    place: tuple[str, int | None], arrays: Sequence[ArrayPlan], at_work: Sequence[ActiveArray]
) -> Iterator[ArrayPlan]:
    """Divide `parallelism` among the arrays of one hardware and its arrays that are at work already."""
    chunks = [array for array in arrays if array.place == place]
    if chunks[0].slots:  # a pool bounds itself
        yield from chunks
        return
    active = [array for array in at_work if (array.hardware, array.choice) == place]
    total = chunks[0].parallelism
    left = total - sum(min(other.parallelism, other.num_active) for other in active)
    after: tuple[str, ...] = ()
    wanted = sum(len(chunk.specs) for chunk in chunks)
    if active and left < min(wanted, total / 2):  # others use most of it: wait until all have ended, then use all
        left, after = total, tuple(other.job_id for other in active[-_MOST_AWAITED:])
    share, extra = divmod(max(left, 0), len(chunks))
    for index, chunk in enumerate(chunks):
        parallelism = min(len(chunk.specs), max(1, share + (index < extra)))
        behind = left if share == 0 and index >= left else None
        yield dataclasses.replace(chunk, parallelism=parallelism, after=after, behind=behind)


class _Room:
    """Jobs that the submit limits still allow, less those that this command submits."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._taken: dict[str, int] = {}

    def _caps(self, shape: Shape) -> list[SubmitCap]:
        return self._limits.submit_caps(shape.partition, shape.account, shape.qos)

    def of(self, shape: Shape) -> int:
        """Return the number of jobs of this shape that may still be submitted."""
        left = (cap.room - self._taken.get(cap.name, 0) for cap in self._caps(shape))
        return max(0, min(left, default=2**31))

    def take(self, shape: Shape, count: int) -> None:
        for cap in self._caps(shape):
            self._taken[cap.name] = self._taken.get(cap.name, 0) + count

    def full(self, shape: Shape, count: int) -> Iterator[str]:
        """Yield a description of each cap that allows no more than `count` jobs."""
        for cap in self._caps(shape):
            if cap.room - self._taken.get(cap.name, 0) <= count:
                yield f"{cap.name} is {cap.limit}, {cap.used} in use"


# Seconds from the allocation to the first step: Python and torch come from a shared file system, not the page cache.
_START_S = 30.0
_MOST_LRS = 8
_MOST_MODELS = 4
_MOST_TRACKERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Known facts of a sweep: the state of each run, runs in the sweep's own queue, and jobs in Slurm's queue."""

    states: Mapping[str, RunState] = field(default_factory=dict)
    waiting: frozenset[str] = frozenset()
    active: tuple[ActiveArray, ...] = ()
    elements: tuple[str, ...] = ()
    """Job ids of the runs that are in Slurm's queue."""
    top_up_job: str | None = None
    """Id of a top-up job that has not begun."""
    shapes: frozenset[Shape] = frozenset()
    """Shapes that Slurm has accepted in this sweep before."""
    specs: Mapping[str, RunSpec] = field(default_factory=dict)
    """Submitted run by run id."""
    codes: Mapping[str, str] = field(default_factory=dict)
    """Digest of the frozen code of each run's latest submission, by run id; "" with snapshot=off.

    A run without code to freeze, because all of it was installed, is absent."""
    stop_s: Mapping[Shape, float] = field(default_factory=dict)
    """Measured seconds that the slowest run of a shape needs to stop and save, by shape."""
    steps: Mapping[str, int] = field(default_factory=dict)
    """Step that each interrupted run has reached, by run id."""
    waiting_jobs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Ids of the jobs of each run that wait in Slurm's queue, by run id."""
    start_s: Mapping[Shape, float] = field(default_factory=dict)
    """Median seconds from the allocation to the first step, by shape without time limit (`timeless`)."""
    hold: str | None = None
    """Hold of the whole sweep in words: by whom, since when and why; None if there is none."""
    notes: tuple[str, ...] = ()
    """Notes for the user on unreadable files of the sweep, and on runs that are left alone."""
    followed: Followed = NOBODY
    """Runs that the runs to submit follow (`after`), with their states."""


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
    groups: dict[tuple[str, Shape, int | None, Follows], list[RunSpec]] = {}
    chosen = {spec.run_id: spec for spec in specs_to_submit(grid, known, retry_failed=retry_failed)}
    for spec in chosen.values():
        follows = known.followed.of_run.get(spec.run_id, NOTHING)
        for choice, on_one in enumerate(spec.on_each()):
            key = _array_environment(on_one), on_one.shape, choice if spec.others else None, follows
            groups.setdefault(key, []).append(on_one)
    arrays = [
        ArrayPlan(
            hardware=specs[0].hardware, shape=shape, specs=tuple(specs),
            parallelism=int(specs[0].config["cluster"]["array_parallelism"]), choice=choice, follows=follows,
        )
        for (_, shape, choice, follows), specs in groups.items()
    ]  # fmt: skip
    packed = {  # with the lists of hardware, which a pool does not take
        index: pack([chosen[spec.run_id] for spec in array.specs], limits)
        for index, array in enumerate(arrays)
        if asks_for_pool(array.specs[0])
    }
    for index, packing in packed.items():
        arrays[index] = dataclasses.replace(
            arrays[index], shape=packing.shape, slots=packing.slots, per_node=packing.per_node,
            per_gpu=packing.per_gpu,
        )  # fmt: skip
    if arrays and limits.max_elements == 0:
        limits = dataclasses.replace(limits, max_array_size=None, max_array_tasks=None)
        no_arrays = ["the cluster takes no job arrays (MaxArraySize=0), and every submission here is one."]
    else:
        no_arrays = []
    fitted = fit(arrays, limits, known.active)
    wrong = {
        array.shape: find_shape_problems(array.shape, array.hardware, limits)
        for array in arrays
        if array.shape not in known.shapes
    }
    held = [_HELD.format(sweep=grid.sweep.name, held=known.hold)] if arrays and known.hold is not None else []
    packing_problems = list(dict.fromkeys(problem for packing in packed.values() for problem in packing.problems))
    unfit = () if packing_problems else itertools.chain(*wrong.values())
    problems = [*held, *no_arrays, *known.followed.problems, *packing_problems, *unfit]
    exit_codes = clear_exit_codes(limits.requeue_exit) if arrays else ()
    states = {spec.run_id: _state_of(spec, known) for spec in grid.specs}
    too_large = (memory_line(spec.config, spec.shape.world_size) for spec in grid.specs)
    plan = SweepPlan(
        grid=grid,
        states=states,
        arrays=fitted.now,
        no_longer_in_grid=tuple(run_id for run_id in known.states if run_id not in states),
        waiting=fitted.waiting,
        binding=fitted.binding,
        notes=(
            *grid.notes,
            *known.notes,
            *limits.notes,
            *(f"Runs start after {line}." for line in known.followed.lines),
            *_list_note([spec for array in fitted.now for spec in array.specs if array.choice is not None]),
            *_closed_note(grid),
            *(note for packing in packed.values() for note in packing.notes),
            *_taken_codes_note(exit_codes),
            *_grace_notes(arrays, known, limits),
            *dict.fromkeys(_limit_notes(arrays, known, limits)),
            *dict.fromkeys(_whole_node_notes(arrays, limits)),
            *_name_notes(grid.specs),
            *_first_few((scaling_line(spec.config) for spec in grid.specs), _MOST_LRS, "learning rates are scaled"),
            *_first_few(too_large, _MOST_MODELS, "models do not fit"),
            *_first_few((_tracker_line(spec.config) for spec in grid.specs), _MOST_TRACKERS, "trackers"),
        ),
        exit_codes=exit_codes,
        answers={
            shape: (None, problems_of_shape[0]) for shape, problems_of_shape in wrong.items() if problems_of_shape
        },
        known=known,
        cluster=limits.cluster,
        keeps_room=fitted.keeps_room,
    )
    return dataclasses.replace(plan, problems=(*dict.fromkeys(problems), *_over_budget(plan)))


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
    for spec in specs:
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


def timeless(shape: Shape) -> Shape:
    """Return the shape without its time limit, which does not change how fast a run starts."""
    return dataclasses.replace(shape, time_limit_min=0, signal_lead_s=0)


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


def _first_few(lines: Iterable[str | None], most: int, what: str) -> list[str]:
    """Return the first `most` distinct lines, and a line with the number of further `what`."""
    distinct = list(dict.fromkeys(line for line in lines if line is not None))
    more = [f"{len(distinct) - most} more {what}."] if len(distinct) > most else []
    return [*distinct[:most], *more]


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


def _taken_codes_note(exit_codes: Sequence[tuple[int, int]]) -> Iterator[str]:
    if exit_codes:
        listed = ", ".join(f"{instead} instead of {ours}" for ours, instead in exit_codes)
        yield f"This site requeues or holds jobs by hpc-trainer's exit codes (RequeueExit): jobs end with {listed}."


# Known facts of a sweep for a plan: the status of its runs, grouped by array and shape.

# Number of finished runs whose folders are read for the duration of a stop.
_STOPS_LOOKED_AT = 50


def known_of(sweep: SweepPaths, grid: Grid | None = None) -> Known:
    """Return the known facts of a sweep; empty if it was never submitted."""
    return what_is_known(read_status(sweep), grid) if sweep.exists else Known()


def what_is_known(status: SweepStatus, grid: Grid | None = None) -> Known:
    """Return the known facts of a sweep from its status.

    Args:
        grid: its runs that the sweep does not list become UNKNOWN if a job that no file describes may have them.
    """
    own = [spec.run_id for spec in grid.specs] if grid is not None else []
    claimed = {run_id: why for run_id in own if run_id not in status.specs and (why := status.lost.cause(run_id))}
    in_queue = [run for run in status.open_runs.values() if run.state.is_active and run.own_job is not None]
    submitted = {
        run_id
        for submission in status.ledger.submissions
        if submission.executor == Executor.slurm.value and submission.job_id is not None
        for run_id in submission.run_ids
    }
    return Known(
        states={
            **status.states,
            **dict.fromkeys(status.removed, RunState.NEW),
            **dict.fromkeys(claimed, RunState.UNKNOWN),
        },
        waiting=frozenset(run.run_id for run in status.waiting),
        elements=tuple(str(run.own_job) for run in in_queue),
        steps={run.run_id: run.step for run in status.open_runs.values() if run.state.needs_submit and run.step},
        waiting_jobs={
            run.run_id: (run.waiting_job, *(job_id for _, job_id in run.rivals))
            for run in status.open_runs.values()
            if run.waiting_job is not None and not run.is_claimed
        },
        top_up_job=status.top_up_job,
        active=tuple(_active(in_queue)),
        specs=status.specs,
        codes=_codes(status),
        stop_s=_slowest_stops(status),
        start_s=_median_starts(status),
        hold=None if status.hold is None else status.hold.words,
        shapes=frozenset(
            shape
            for run_id, spec in status.specs.items()
            if run_id in submitted and not spec.is_lost
            for shape in (spec.shape, *(other.shape for other in spec.others))
        ),
        notes=(
            *told_few(status.faults),
            *status.left_alone,
            *dict.fromkeys(claimed.values()),
            *_removed_notes(status, own),
        ),
    )


_REMOVED_SHOWN = 3


def _removed_notes(status: SweepStatus, run_ids: Iterable[str]) -> list[str]:
    """Return notes on runs of the grid that `rm` removed: they begin anew."""
    removed = [(run_id, status.removed[run_id]) for run_id in run_ids if run_id in status.removed]
    lines = (f"{run_id} was {removal.words}: it begins anew, at step 0." for run_id, removal in removed)
    return _first_few(lines, _REMOVED_SHOWN, "removed runs begin anew")


def _active(in_queue: Iterable[RunStatus]) -> Iterator[ActiveArray]:
    """Yield the arrays and successor jobs of these runs, in the order of their submission."""
    of_job: dict[str, list[Submission]] = {}
    for run in in_queue:
        for submission in (run.submission, *(rival for rival, _ in run.rivals)):
            if submission is not None and submission.job_id is not None:
                of_job.setdefault(submission.job_id, []).append(submission)
    for job_id, (first, *others) in sorted(of_job.items(), key=lambda item: item[1][0].time):
        parallelism = first.parallelism or max(1, len(first.run_ids))
        yield ActiveArray(
            job_id=job_id, hardware=first.hardware, parallelism=parallelism, num_active=1 + len(others),
            choice=None if first.race is None else first.choice,
        )  # fmt: skip


def _codes(status: SweepStatus) -> dict[str, str]:
    """Return the digest of each run's code, from its newest submission or its entry in the sweep's own queue."""
    codes: dict[str, str] = {}
    for submission in status.ledger.submissions:
        code = submission.code
        if code is None and submission.run_ids:  # a submission has one snapshot, so its first run stands for all
            spec = status.specs.get(submission.run_ids[0])
            if spec is not None and spec.config.get("snapshot", {}).get("mode") == SnapshotMode.off.value:
                code = ""
        if code is not None:
            codes.update(dict.fromkeys(submission.run_ids, code))
        else:
            for run_id in submission.run_ids if codes else ():
                codes.pop(run_id, None)
    return codes | {
        run_id: submission.code for run_id, submission in status.ledger.waiting.items() if submission.code is not None
    }


def _slowest_stops(status: SweepStatus) -> dict[Shape, float]:
    """Return the slowest stop in seconds by shape, of open runs and of the last 50 completed runs."""
    slowest: dict[Shape, float] = {}
    done = [run_id for run_id, state in status.states.items() if state is RunState.COMPLETED][-_STOPS_LOOKED_AT:]
    for run in (*status.open_runs.values(), *map(status.run, done)):
        if run.stop_s is not None:
            slowest[run.spec.shape] = max(run.stop_s, slowest.get(run.spec.shape, 0.0))
    return slowest


def _median_starts(status: SweepStatus) -> dict[Shape, float]:
    """Return the median seconds from the allocation to the first step, by shape without time limit."""
    begun = [run for run in status.open_runs.values() if run.attempts][-_STOPS_LOOKED_AT:]
    done = [run_id for run_id, state in status.states.items() if state is RunState.COMPLETED][-_STOPS_LOOKED_AT:]
    starts_of: dict[Shape, list[float]] = {}
    for run in itertools.chain(begun, map(status.run, done)):
        ledger = ledger_of_run(status, run)
        for attempt in () if ledger is None else ledger.attempts:
            if any(attempt.seconds.get(kind) for kind in (Kind.step, Kind.program)):
                start_s = math.fsum(attempt.seconds.get(kind, 0.0) for kind in STARTS)
                starts_of.setdefault(timeless(run.spec.shape), []).append(start_s)
    return {shape: statistics.median(starts) for shape, starts in starts_of.items()}
