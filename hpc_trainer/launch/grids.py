"""Plan, submit, retry and top-up of a frozen grid, under the sweep's lock and with one read of the status.

With canaries some runs of each shape start first, and Slurm holds the others until these have trained and saved. The
plan is divided here. `launch/submit.py` marks the canaries and submits the others with --hold, and the canaries release
them (`worker/line.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.domains import contributions
from hpc_trainer.errors import ConfigError, RunStateError, SlurmError, UntrustedFileError
from hpc_trainer.launch.arrays import ArrayPlan
from hpc_trainer.launch.extend import find_twins
from hpc_trainer.launch.follow import read_followed, release_followers
from hpc_trainer.launch.freeze import Grid, grid_of_specs
from hpc_trainer.launch.frozen_code.archive import CodeChange, find_changes
from hpc_trainer.launch.frozen_code.snapshot import Snapshot, frozen_of_command, is_same_code, read_code
from hpc_trainer.launch.known import Known, known_of, what_is_known
from hpc_trainer.launch.plan import SweepPlan, build_plan, specs_to_submit
from hpc_trainer.launch.pools import asks_for_pool
from hpc_trainer.launch.settle import settle_intents
from hpc_trainer.launch.submit import Outcome, SubmittedArray, ask_slurm, submit_plan
from hpc_trainer.launch.targets import find_nowhere
from hpc_trainer.record.files import rename, set_umask
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.processes import FileLock, submit_lock
from hpc_trainer.record.reading import Faults, is_there
from hpc_trainer.record.shared_folder import is_local, mount_of
from hpc_trainer.record.spec import WRITE_AGAIN, RunSpec, append_specs, read_specs
from hpc_trainer.record.states import CANCEL, RunState
from hpc_trainer.record.status import SweepStatus, read_status
from hpc_trainer.record.submissions import SUCCESSOR, read_ledger, read_removed_sweep
from hpc_trainer.record.trust import check_place
from hpc_trainer.slurm.commands import has_slurm, node_hosts
from hpc_trainer.slurm.jobs import cancel_jobs
from hpc_trainer.slurm.limits import Limits, read_limits
from hpc_trainer.slurm.shape import Shape

# A top-up job has half an hour; the lock's holder is a submit that takes seconds, or that died on another machine.
_TOP_UP_LOCK_S = 900.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """Result of a submit: the plan that it carried out, and the outcome."""

    plan: SweepPlan
    outcome: Outcome = dataclasses.field(default_factory=Outcome)

    @property
    def arrays(self) -> tuple[SubmittedArray, ...]:
        """Return the arrays that the scheduler (or the local queue) accepted now."""
        return self.outcome.arrays

    @property
    def num_submitted(self) -> int:
        """Return the number of runs that were handed over now."""
        return len({run_id for array in self.outcome.arrays for run_id in array.run_ids})

    @property
    def num_already(self) -> int:
        """Return the number of the grid's runs that were not handed over now and do not wait in the sweep's queue."""
        busy = {run_id for array in self.outcome.arrays for run_id in array.run_ids} | set(self.outcome.waiting)
        return sum(spec.run_id not in busy for spec in self.plan.grid.specs)


def plan_grid(grid: Grid, *, retry_failed: bool = False, fresh: bool = False) -> SweepPlan:
    """Return the plan that `submit_grid` of this grid would carry out; write nothing.

    Raises:
        RunStateError: `fresh` is set, and one of the runs works or waits.
    """
    known = known_of(grid.sweep, grid)
    return _checked(grid, _anew(grid, known) if fresh else known, retry_failed, must_answer=False)[0]


def submit_grid(
    grid: Grid, *, retry_failed: bool = False, revive: bool = False, fresh: bool = False,
    command_line: Sequence[str] | None = None, canary: int | None = None,
) -> Submitted:  # fmt: skip
    """Submit the new and interrupted runs of a grid; return at once. A repeated call does no harm.

    Args:
        retry_failed: submit failed runs too.
        revive: take back the cancel of cancelled runs, and submit them too.
        fresh: start the runs from the beginning; their present folders are renamed.
        command_line: the user's command.
        canary: so many runs of each shape start first, and the others are held until these have trained and saved.

    Raises:
        RunStateError: `fresh` is set, and one of the runs works or waits.
    """
    # A new sweep is checked before the lock makes its folder, so that a refused submit leaves nothing behind.
    is_new = not grid.sweep.exists
    checked, code = _checked(grid, Known(), retry_failed) if is_new else (None, None)
    if checked is not None and checked.problems:
        raise ConfigError("\n".join(checked.problems))
    if not is_new:
        check_place(grid.sweep.folder)
    set_umask(grid.group_readable)
    with submit_lock(grid.sweep) as lock:
        status = _settled(grid.sweep) if grid.sweep.exists else None
        if fresh and status is not None:
            _anew(grid, what_is_known(status, grid))
        if status is not None and _write_lost_specs(grid, status):
            status = dataclasses.replace(read_status(grid.sweep), faults=status.faults)
        before: list[Outcome] = []
        if status is not None:
            _end_losers(status)
            before, status = _top_up(status, lock)
        known = what_is_known(status, grid) if status is not None else Known()
        named = (RunState.CANCELLED, RunState.GONE)  # such a run restarts only if the user names it
        set_down = [spec.run_id for spec in grid.specs if known.states.get(spec.run_id) in named]
        if revive and set_down:
            known = dataclasses.replace(known, states={**known.states, **dict.fromkeys(set_down, RunState.PREEMPTED)})
        known = _anew(grid, known) if fresh else known
        if checked is None or known.states:
            # Waiting runs were submitted above, with the code of their own submit.
            checked, code = _checked(grid, dataclasses.replace(known, waiting=frozenset()), retry_failed)
        if revive and not checked.problems:
            _end_what_waits(status, set_down)
            for run_id in set_down:
                grid.sweep.run(run_id).marker(CANCEL).unlink(missing_ok=True)
        if fresh and not checked.problems:
            _end_what_waits(status, set_down)
            _set_aside(grid)
        has_held = RunState.HELD in known.states.values()
        if canary is not None:
            checked = with_canaries(checked, canary)
        if status is not None:  # a new sweep has no ends
            _forget_ends(grid.sweep, [spec.run_id for spec in checked.specs])
        outcome = submit_plan(checked, command_line=command_line, code=code, lock=lock)
        outcome = dataclasses.replace(
            outcome, notes=(*outcome.notes, *release_followers(grid.sweep, has_held=has_held))
        )
    own = {spec.run_id for spec in grid.specs}
    still = {run_id for run_id in read_ledger(grid.sweep).waiting if run_id in own}
    return Submitted(plan=checked, outcome=_joined([*before, outcome], still))


def _forget_ends(sweep: SweepPaths, run_ids: Sequence[str]) -> None:
    """Delete records of how these runs ended before (worker/line.py), so that their next ends are reported again."""
    if not run_ids:
        return
    shutil.rmtree(sweep.alike, ignore_errors=True)
    for forget in contributions("submits"):
        forget(sweep, run_ids)


def _end_what_waits(status: SweepStatus | None, run_ids: Sequence[str]) -> None:
    """Cancel jobs that still wait in the queue for runs that are revived: an earlier scancel may have failed.

    Raises:
        SlurmError: scancel failed, or squeue did not answer; a run could then have two jobs.
    """
    runs = [status.run(run_id) for run_id in run_ids] if status is not None else []
    if status is not None and status.queue_error is not None and any(run.job_id for run in runs):
        raise SlurmError(f"{status.queue_error} A job of the cancelled runs may still wait: try again.")
    waiting = [run.waiting_job for run in runs if run.waiting_job is not None]
    cancel_jobs([*waiting, *(job_id for run in runs for _, job_id in run.rivals)])


def _end_losers(status: SweepStatus) -> None:
    """Cancel jobs whose runs other jobs have begun (`hardware=first:a,b`): the cancel of the winner may have failed."""
    losers = [job_id for run in status.open_runs.values() if run.is_claimed for _, job_id in run.rivals]
    with contextlib.suppress(SlurmError):  # such a job ends by itself when it starts
        cancel_jobs(losers)


def _anew(grid: Grid, known: Known) -> Known:
    """Return `known` with the grid's runs as if they had never been submitted.

    Raises:
        RunStateError: one of the runs works or waits.
    """
    for spec in grid.specs:
        state = known.states.get(spec.run_id, RunState.NEW)
        if state.is_active:
            raise RunStateError(f"{spec.run_id} is {state.value}. Cancel it first: hpc-trainer cancel {spec.run_id}")
    return dataclasses.replace(known, states={**known.states, **{spec.run_id: RunState.NEW for spec in grid.specs}})


def _set_aside(grid: Grid) -> None:
    """Rename the folders of runs that start from the beginning. The caller holds the sweep's lock."""
    for spec in grid.specs:
        folder = grid.sweep.run(spec.run_id).folder
        if is_there(folder):
            rename(folder, folder.with_name(f"{spec.run_id}.old-{time.time_ns()}"))


def _write_lost_specs(grid: Grid, status: SweepStatus) -> bool:
    """Write specs of this grid again that the sweep's file has lost, because a restarted run needs its spec.

    Returns:
        True if a spec was written.
    """
    lost = {run_id for run_id, spec in status.specs.items() if spec.is_lost}
    specs = [spec for spec in grid.specs if spec.run_id in lost]
    if specs:
        check_place(grid.sweep.folder)
        append_specs(grid.sweep, specs)
        status.faults.append(f"{len(specs)} spec(s) were lost or damaged: written again from this grid.")
    return bool(specs)


def _joined(outcomes: Sequence[Outcome], waiting: Collection[str]) -> Outcome:
    return Outcome(
        arrays=tuple(array for outcome in outcomes for array in outcome.arrays),
        waiting=tuple(sorted(waiting)),
        top_up=next((outcome.top_up for outcome in reversed(outcomes) if outcome.top_up is not None), None),
        notes=tuple(dict.fromkeys(note for outcome in outcomes for note in outcome.notes)),
    )


def retry(
    sweep: SweepPaths, run_ids: Sequence[str], *, take_back: bool = True, changes: Sequence[str] = ()
) -> Submitted:
    """Submit these failed, interrupted or cancelled runs of a sweep again, as they were frozen.

    Args:
        take_back: take back the cancel of cancelled runs; False leaves them cancelled.
        changes: overrides of `cluster.*` and `hardware.*` that hold from now on.

    Raises:
        RunStateError: the sweep has no such run.
        ConfigError: a change is wrong, or turns a run into another one.
        SubmitError, SlurmError: as in `submit`.
    """
    faults = Faults()
    specs = read_specs(sweep, faults)
    missing = [run_id for run_id in run_ids if run_id not in specs]
    if missing or not run_ids:
        why = " ".join(["", *(f"{fault}." for fault in faults[:3]), WRITE_AGAIN]) if missing else ""
        raise RunStateError(f"{sweep.specs} holds no run {', '.join(missing) or 'to retry'}.{why}")
    chosen = [specs[run_id] for run_id in run_ids]
    if changes:
        from hpc_trainer.launch.extend import change_specs  # Hydra: 0.2 s

        chosen = change_specs(chosen, changes)
    grid = dataclasses.replace(grid_of_specs(sweep, chosen), changes=tuple(changes))
    done = submit_grid(grid, retry_failed=True, revive=take_back)
    return dataclasses.replace(done, plan=dataclasses.replace(done.plan, no_longer_in_grid=()))


def top_up(sweep: SweepPaths, *, wait_s: float = _TOP_UP_LOCK_S) -> Outcome | None:
    """Submit the runs of the sweep's own queue for which there is room now; return None if no run waits.

    Args:
        wait_s: seconds to wait for another submit that holds the sweep's lock.

    Raises:
        RunStateError: the sweep does not exist.
        SubmitError, SlurmError: as in `submit`.
    """
    if not sweep.exists:
        raise RunStateError(f"{sweep.folder} holds no sweep.")
    check_place(sweep.folder)
    with submit_lock(sweep, wait_s=wait_s) as lock:
        outcomes, _ = _top_up(_settled(sweep), lock)
        return _joined(outcomes, read_ledger(sweep).waiting) if outcomes else None


def _top_up(status: SweepStatus, lock: FileLock) -> tuple[list[Outcome], SweepStatus]:
    """Submit the waiting runs, each with the frozen code of its own submit, not that of the present folder.

    Returns:
        The outcomes, and the status afterwards; `status` itself if no run waits.
    """
    outcomes: list[Outcome] = []
    codes: set[str | None] = set()
    while True:
        queue = {run.run_id: status.ledger.waiting[run.run_id].code for run in status.waiting}
        code = next((candidate for candidate in queue.values() if candidate not in codes), ...)
        if code is ...:
            return outcomes, status
        codes.add(code)
        waiting = [status.specs[run.run_id] for run in status.waiting if queue[run.run_id] == code]
        specs = [spec for spec in waiting if not spec.is_lost]
        if not specs:
            continue
        grid = grid_of_specs(status.sweep, specs)
        set_umask(grid.group_readable)
        limits = read_limits(with_nodes=any(map(asks_for_pool, specs)))
        known = dataclasses.replace(what_is_known(status), followed=read_followed(status.sweep, specs))
        plan = build_plan(grid, known, limits=limits)
        plan = dataclasses.replace(plan, code=code)
        outcomes.append(submit_plan(plan, command_line=None, lock=lock, skip_refused=True))
        status = read_status(status.sweep)


def _settled(sweep: SweepPaths) -> SweepStatus:
    """Settle every submission without an answer, and return the sweep's status. The caller holds the sweep's lock."""
    settle_intents(sweep)
    status = read_status(sweep)
    runs = status.open_runs.values()
    succeeded = [run for run in runs if run.submission is not None and run.submission.kind == SUCCESSOR]
    changes = [settle_intents(sweep, sweep.run(run.run_id)) for run in succeeded]
    return read_status(sweep) if any(changes) else status


def check_new(grid: Grid, *, to_draw: int, must_answer: bool) -> tuple[SweepPlan, Snapshot | None]:
    """Return the plan of a search's sample as for a new sweep, checked against the cluster, and the code of its runs.

    Args:
        grid: one run, which has the shape and environment of all trials.
        to_draw: number of trials.
        must_answer: raise if Slurm does not answer.

    Raises as `_checked`.
    """
    return _checked(grid, Known(to_draw=to_draw), False, must_answer=must_answer)


def _checked(
    grid: Grid, known: Known, retry_failed: bool, *, must_answer: bool = True
) -> tuple[SweepPlan, Snapshot | None]:
    """Return the plan, checked against the cluster's limits, and the code that its runs will import.

    If there is nothing to submit, Slurm is not asked and no code is read.

    Raises:
        SlurmError: Slurm does not answer and `must_answer` is set; without it the plan's notes say so.
    """
    specs = specs_to_submit(grid, known, retry_failed=retry_failed)
    known = dataclasses.replace(known, followed=read_followed(grid.sweep, specs, grid.specs))
    code = read_code(specs, grid.sweep.folder.parent)
    limits, notes = Limits(), []
    before = None if known.states else read_removed_sweep(grid.sweep.folder)
    notes_of_before = [f"An earlier sweep {grid.sweep.name} was {before.words}: this one is new."] if before else []
    asks = grid.executor is Executor.slurm and bool(specs)
    if asks and not has_slurm():
        notes.append("There is no sbatch here: the cluster's limits were not checked.")
    elif asks:
        try:
            limits = read_limits(
                with_nodes=any(spec.shape not in known.shapes or asks_for_pool(spec) for spec in specs)
            )
        except SlurmError as error:
            if must_answer:
                raise
            notes.append(f"the cluster's limits were not checked: {error}")
    plan = build_plan(grid, known, retry_failed=retry_failed, limits=limits)
    private = find_private_folder(grid.sweep.folder.parent) if asks and has_slurm() else None
    unmounted = find_unmounted(grid.sweep.folder.parent) if specs else None
    wrong_places = [problem for problem in (private, unmounted) if problem is not None]
    plan = dataclasses.replace(plan, problems=(*plan.problems, *wrong_places))
    nowhere = find_nowhere(specs, code)
    plan = dataclasses.replace(plan, problems=(*plan.problems, *nowhere.problems), notes=(*plan.notes, *nowhere.notes))
    plan = dataclasses.replace(plan, notes=(*notes_of_before, *plan.notes, *frozen_of_command(specs, code)))
    if code is not None:
        notes_of_both = (*plan.notes, *code.notes)
        plan = dataclasses.replace(plan, code=code.digest, notes=notes_of_both, left_out=code.left_out)
    if asks and not notes:
        try:
            plan = ask_slurm(plan, known.shapes)
        except SlurmError as error:
            if must_answer:
                raise
            notes.append(f"sbatch was not asked: {error}")
    changed, unknown = _changes(grid, plan, specs, code)
    twins = tuple(find_twins(grid.sweep, specs, known.specs)) if known.specs else ()
    return dataclasses.replace(plan, notes=(*plan.notes, *notes, *unknown), changed=changed, twins=twins), code


def _changes(
    grid: Grid, plan: SweepPlan, submitted: Sequence[RunSpec], code: Snapshot | None
) -> tuple[tuple[CodeChange, ...], list[str]]:
    """Return the files that have changed in the code of kept runs (completed or in the queue), and notes."""
    leaving = {spec.run_id for spec in submitted}
    states = ((spec, plan.states[spec.run_id]) for spec in grid.specs if spec.run_id not in leaving)
    kept = [spec for spec, state in states if state is RunState.COMPLETED or state.is_active]
    recorded = [(spec.run_id, plan.known.codes[spec.run_id]) for spec in kept if spec.run_id in plan.known.codes]
    # With snapshot=off a waiting run takes the code of its start, so there is nothing to compare.
    codes = Counter(code for run_id, code in recorded if code or plan.states[run_id] is RunState.COMPLETED)
    now = code
    if any(codes) and (code is None or not is_same_code(kept, submitted)):
        try:
            now = read_code(kept, grid.sweep.folder.parent, is_look=True)
        except (ConfigError, UntrustedFileError) as error:  # this code is only compared, not submitted
            return (), [f"It is unknown whether the code of {len(kept)} run(s) has changed since: {error}"]
    changed, unknown = find_changes(grid.sweep, codes, now)
    return tuple(changed), unknown


# Check that compute nodes can see the folder of sweeps, before anything is written.
#
# The type of a file system alone proves nothing: a small cluster's login node is often its file server and exports
# home folders from its own disk. Therefore only places that no site exports are refused: memory, a container's own
# layer, and folders for temporary files. Slurm must also say that its nodes are other machines.

# File systems that are never exported: tmpfs(5); a container's layers (kernel's overlayfs.rst).
_MEMORY = {"tmpfs": "memory of", "ramfs": "memory of", "overlay": "a container's own layer on"}

# hier(7): files in these folders belong to this machine and may be deleted at any time.
_TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # noqa: S108  (looked for, not used)
_BETTER = ("SCRATCH", "WORK", "PROJECT", "HOME")
_SHOWN = 3


def find_private_folder(
    folder: Path, *, ask: Callable[[], Mapping[str, str]] = node_hosts, exports: Path = Path("/etc/exports")
) -> str | None:
    """Return an error message if compute nodes cannot see `folder`; None if they may see it.

    Slurm is asked only about a folder that looks private.

    Args:
        folder: the folder of sweeps; it need not exist.
        ask: returns the host of each of the cluster's nodes, by node name.
        exports: list of the folders that this machine exports by NFS (exports(5)).
    """
    mount = mount_of(folder)
    if mount is None or not is_local(mount[1]):
        return None
    place = os.path.realpath(folder)
    is_temporary = any(place == temporary or place.startswith(f"{temporary}/") for temporary in _TEMPORARY)
    if not (mount[1] in _MEMORY or is_temporary) or _is_exported(place, exports):
        return None
    try:
        hosts = ask()
    except SlurmError:
        return None  # it is unknown whether the nodes are other machines
    here = socket.gethostname().partition(".")[0]
    others = sorted(name for name, host in hosts.items() if host.partition(".")[0] not in (here, "localhost"))
    if not others or len(others) < len(hosts):
        return None  # this machine is one of the nodes; the user may mean only this node
    what = f"{_MEMORY[mount[1]]} {here}" if mount[1] in _MEMORY else f"a folder for temporary files of {here}"
    shown = ", ".join(others[:_SHOWN]) + (f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else "")
    better = next((shared for shared in map(_shared_folder_of, _BETTER) if shared is not None), "a shared file system")
    return (
        f"paths.runs_dir={folder} is {what} ({mount[1]} at {mount[0]}, by /proc/self/mountinfo), and Slurm's nodes "
        f"{shown} are other machines (scontrol show nodes): they do not see it. Use a folder on a shared file system: "
        f"paths.runs_dir={better}/runs, or once: export HPC_TRAINER_RUNS={better}/runs"
    )


def find_unmounted(folder: Path, *, fstab: Path = Path("/etc/fstab")) -> str | None:
    """Return an error message if `folder` belongs on a file system that is not mounted now; None if nothing says so.

    An empty mount point looks like a folder without sweeps: a submit would begin them anew on this machine's disk. A
    folder that has entries is in use as it is. An automount that fails is an error of its own.

    Args:
        folder: the folder of sweeps; it need not exist.
        fstab: list of the file systems that this machine mounts at its start (fstab(5)).
    """
    mount = mount_of(folder)
    try:
        lines = fstab.read_text(encoding="utf-8", errors="replace").splitlines()
        if mount is None or (folder.is_dir() and any(folder.iterdir())):
            return None
    except OSError:
        return None  # without such a list; or another check tells that the folder cannot be read
    place = os.path.realpath(folder)
    for fields in (line.split() for line in lines if not line.lstrip().startswith("#")):
        if len(fields) < 4 or not fields[1].startswith("/") or "noauto" in fields[3].split(","):
            continue
        point = os.path.realpath(fields[1].replace("\\040", " "))
        is_above = place == point or place.startswith(f"{point}/")
        if is_above and len(point) > len(mount[0]):
            return (
                f"paths.runs_dir={folder}: {fstab} has a file system for {point} ({fields[0]}, {fields[2]}), and "
                "nothing is mounted there now. Sweeps on it would not be found, and begun anew. Mount it: mount "
                f"{point}. Or name another folder: paths.runs_dir=FOLDER, or once: export HPC_TRAINER_RUNS=FOLDER"
            )
    return None


def _shared_folder_of(variable: str) -> str | None:
    """Return the folder that the variable names if it is on a shared file system; else None."""
    folder = os.environ.get(variable)
    mount = mount_of(folder) if folder and Path(folder).is_dir() else None
    return folder if mount is not None and not is_local(mount[1]) else None


def _is_exported(place: str, exports: Path) -> bool:
    try:
        lines = exports.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    folders = [line.split()[0].strip('"') for line in lines if line.strip() and not line.lstrip().startswith("#")]
    return any(place == exported or place.startswith(exported.rstrip("/") + "/") for exported in folders)


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
        raise ConfigError("--canary cannot be combined with hardware=first:a,b. Leave one of them out.")
    if any(array.slots for array in plan.arrays):
        raise ConfigError(
            "--canary cannot be combined with pool.jobs, as slots take runs in turn. Leave one of them out."
        )
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
