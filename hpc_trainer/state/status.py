"""The state of every run of a sweep: what the run wrote, then what Slurm says, never a guess."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.errors import ExitCode, RunStateError
from hpc_trainer.runs.failure import read_failure
from hpc_trainer.runs.layout import SweepPaths
from hpc_trainer.runs.metrics_log import SPEED
from hpc_trainer.runs.monitoring.moves import CAUSES, read_move
from hpc_trainer.runs.monitoring.warnings import read_warnings
from hpc_trainer.runs.reading import Faults, exists, is_number, list_folder
from hpc_trainer.runs.spec import RunSpec
from hpc_trainer.runs.states import CANCEL, DONE, NOT_FINITE, OUT_OF_MEMORY, RunState
from hpc_trainer.slurm.commands import has_slurm
from hpc_trainer.slurm.queue import find_by_uuid
from hpc_trainer.slurm.reasons import explain_reason
from hpc_trainer.slurm.states import NOT_BEGUN, PENDING
from hpc_trainer.state.ask import ask_slurm, decide_now
from hpc_trainer.state.journal import Attempt
from hpc_trainer.state.known_ends import record_ends
from hpc_trainer.state.last_words import words_before_the_worker, words_of_death
from hpc_trainer.state.lost import (
    LOST_SPEC,
    NO_SUBMISSION,
    LostJobs,
    find_lost_jobs,
    known_specs,
    lost_notes,
    told_few,
)
from hpc_trainer.state.run_folder import RunFolder, read_folder, unstarted_folder
from hpc_trainer.state.run_state import End, SchedulerView, decide, ended_before_it_began
from hpc_trainer.state.submissions import Ledger, Submission, latest_of_each_run, read_ledger


@dataclass(slots=True, kw_only=True)  # not frozen: 10,000 of them would take 45 ms more
class RunStatus:
    """One run, as `status` shows it. `step` is the newest one known; `age_s` how old that knowledge is."""

    spec: RunSpec
    state: RunState
    step: int
    attempts: list[Attempt]
    job_id: str | None
    cause: str | None
    node: str | None
    metrics: Mapping[str, Any]
    steps_per_s: float | None
    eta_s: float | None
    age_s: float | None
    num_steps: int
    """Of the whole run; 0 if nobody knows."""
    speed: Mapping[str, float] = field(default_factory=dict)
    """The newest figures of `runs.metrics_log.SPEED`, of a run that works or is complete."""
    remarks: Sequence[str] = ()
    """What its newest attempt says that a person should know, while it works: a rank that holds up the others."""
    failure: Mapping[str, Any] = field(default_factory=dict)
    stop_s: float | None = None
    """How long this run needs to stop: a step and a save, the slowest 1 % of both, as it measured itself."""
    submission: Submission | None = None
    """The newest: an array of the sweep's, or a successor job."""
    waits_in_sweep: bool = False
    """PENDING in the sweep's own queue: no scheduler has it yet."""
    own_job: str | None = None
    """The id of its Slurm job, if that is surely its own: only then may it get a signal, and others wait for it."""
    waiting_job: str | None = None
    """The id of its Slurm job, if the queue shows that it has not begun."""
    elsewhere: str | None = None
    """Words after "it was": why its job may be on another cluster than this one (`SchedulerView.elsewhere`)."""
    device_warning: str | None = None
    """What is wrong with a GPU of a run at work: too hot, or failing (`runs/monitoring/warnings.py`); of one that
    waits to go on without that node, why (`runs/monitoring/moves.py`)."""
    pending_reason: str | None = None
    """Slurm's own word for why its job waits; None if none of its jobs does."""

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.spec.run_id

    @property
    def progress(self) -> str:
        """Steps as a table shows them: `120/200`; of a program that has not said how many there are `120`, or `-`."""
        return f"{self.step}/{self.num_steps}" if self.num_steps else str(self.step or "-")

    @property
    def error(self) -> Mapping[str, Any]:
        """The first error that it recorded: `type`, `message`, `exit_code`, `traceback`, ...; {} if none."""
        return self.failure or (self.attempts[-1].error if self.attempts else {})

    @property
    def reason(self) -> str | None:
        """Why the run is not complete, in a line; None if nothing tells that.

        The first error that it recorded, else the cause and what its job waits for.
        """
        if self._failure_text is not None:
            return self._failure_text.splitlines()[0]
        word = self.pending_reason
        waits = None if word is None else f"{word}: {explain_reason(word).says}"
        return "; ".join(each for each in (self.cause, waits) if each is not None) or None

    @property
    def warning(self) -> str | None:
        """What is wrong with a run that works, or is complete: a GPU, or metrics that are no finite number."""
        if self.device_warning is not None:
            return self.device_warning
        if self.cause != NOT_FINITE:
            return None
        numbers = ((key, value) for key, value in self.metrics.items() if isinstance(value, float))
        bad = [f"{key}={value}" for key, value in numbers if not math.isfinite(value)]
        return f"complete, but not finite: {', '.join(bad)}"

    @property
    def whole_reason(self) -> str | None:
        """As `reason`; of a configuration that cannot be (exit 78) every line: the last one says what to do."""
        return self._failure_text if self.error.get("exit_code") == ExitCode.CONFIG else self.reason

    @property
    def _failure_text(self) -> str | None:
        kind, message = self.error.get("type"), str(self.error.get("message", "")).strip()
        if self.state not in (RunState.FAILED, RunState.OUT_OF_MEMORY) or not message:
            return None
        return f"{kind}: {message}" if kind else f"{self.cause}: {message}"


@dataclass(frozen=True, kw_only=True)
class SweepStatus:
    """Every run of a sweep, in order of submission. Folders of runs that are done are read when somebody asks."""

    sweep: SweepPaths
    specs: Mapping[str, RunSpec]
    """Run id -> spec, in order of submission."""
    open_runs: Mapping[str, RunStatus]
    """Run id -> the run, of those that are not done."""
    read_done: Callable[[str], RunStatus]
    """Reads the folder of a run that is done."""
    remarks: Sequence[str] = ()
    """What could not be asked, and what a person has to know."""
    ledger: Ledger = field(default_factory=Ledger)
    top_up_job: str | None = None
    """The job in the queue that will submit what waits, if there is one that has not begun."""
    tending_job: str | None = None
    """As `top_up_job`, or one that is at work; None if nobody will submit what waits."""
    silence: str | None = None
    """What Slurm did not answer, if it was asked and did not."""
    faults: Faults = field(default_factory=Faults)
    """What cannot be read of the sweep's files and its runs', as far as they were read; `notes` begins with it."""
    lost: LostJobs = field(default_factory=LostJobs)
    """What waits or works for this sweep and stands in none of its files."""
    queue_error: str | None = None
    """Why nobody knows which jobs are these runs': squeue did not answer, or submissions.jsonl was not to be read."""
    left_alone: list[str] = field(default_factory=list)
    """The notes, among `notes`, about runs that another cluster has, or may have, or a job of which no line is left."""

    @functools.cached_property
    def runs(self) -> list[RunStatus]:
        """All runs."""
        return [self.run(run_id) for run_id in self.specs]

    def run(self, run_id: str) -> RunStatus:
        """One run."""
        found = self.open_runs.get(run_id)
        return self.read_done(run_id) if found is None else found

    def open_among(self, run_ids: Iterable[str]) -> list[RunStatus]:
        """Those of these runs that are not done."""
        return [self.open_runs[run_id] for run_id in run_ids if run_id in self.open_runs]

    @property
    def notes(self) -> list[str]:
        """What cannot be read, the first few, then the remarks."""
        return [*told_few(self.faults), *self.remarks]

    @property
    def counts(self) -> dict[str, int]:
        """State -> number of runs."""
        return dict(Counter(state.value for state in self.states.values()))

    @functools.cached_property
    def states(self) -> dict[str, RunState]:
        """Run id -> state."""
        done = RunState.COMPLETED
        return {run_id: run.state if (run := self.open_runs.get(run_id)) else done for run_id in self.specs}

    @property
    def waiting(self) -> list[RunStatus]:
        """Runs in the sweep's own queue."""
        return [run for run in self.open_runs.values() if run.waits_in_sweep]

    @property
    def has_active(self) -> bool:
        """True while anything waits or works."""
        return any(run.state.is_active for run in self.open_runs.values())


def read_status(sweep: SweepPaths, *, is_look: bool = False) -> SweepStatus:
    """Reads a sweep: its folders, at most one squeue, at most one sacct.

    A run goes on while it is looked at: the folders of those that a scheduler no longer has are read once more after
    its answer. Where neither squeue nor sacct knows a job, one scontrol asks which cluster this is.

    Args:
        is_look: nobody acts on what it says: Slurm is not asked about a sweep of which every end is known.

    Raises:
        RunStateError: there is no such sweep.
    """
    ledger = read_ledger(sweep, may_fail=True)
    faults = Faults()
    listed = list_folder(sweep.folder, faults)
    specs = known_specs(sweep, ledger, listed or (), faults)
    if not specs and not sweep.folder.is_dir():
        raise RunStateError(_no_sweep(sweep))
    submissions = latest_of_each_run(ledger.submissions)
    jobs = {each.job_id for each in ledger.submissions if each.job_id is not None}

    def read(run_id: str) -> RunFolder:
        return read_folder(sweep.run(run_id), submissions.get(run_id), ledger.waiting.get(run_id), jobs)

    notes: list[str] = []
    folders = _first_look(sweep, specs, listed, read, submissions, ledger)
    # A batch script tells that this sweep was given to Slurm, whatever is left of submissions.jsonl.
    is_told = not ledger.damage and ledger != Ledger()
    may_live = [each for each in folders.values() if not (is_look and CANCEL in each.markers)]
    may_hide = bool(may_live) or not is_look or not specs
    is_torn = (may_hide and not is_told) or any(each.submission is None for each in may_live)
    untold = [specs[each.paths.run_id] for each in may_live if each.submission is None]
    was_on_slurm = is_torn and (exists(sweep.scripts, faults) is not False or any(map(_may_be_on_slurm, untold)))
    view = ask_slurm(
        sweep, folders, read, notes, faults, must_ask=was_on_slurm or bool(may_live and ledger.waiting), is_look=is_look
    )
    decided = {run_id: decide_now(run_id, folders, view, read) for run_id in folders}
    record_ends(sweep, view, ((folders[run_id], end) for run_id, end in decided.items()))

    def status_of(run_id: str, folder: RunFolder, end: End) -> RunStatus:
        return _status_of(specs[run_id], folder, view, end, ledger.refused.get(run_id), faults)

    @functools.cache  # asked for once more, it neither reads again nor tells its faults twice
    def read_done(run_id: str) -> RunStatus:
        folder = read(run_id)
        faults.extend(folder.faults)
        return status_of(run_id, folder, decide(folder, view))

    runs = [status_of(run_id, folder, decided[run_id]) for run_id, folder in folders.items()]
    lost = find_lost_jobs(
        sweep, ledger, [run.submission for run in runs if run.submission], view.queue, faults,
        needs_submit=not is_told or any(run.state.needs_submit for run in runs),
    )  # fmt: skip
    if not is_told and was_on_slurm and view.queue is None:
        lost = dataclasses.replace(lost, unseen=_unseen(ledger))
    faults += [*ledger.damage, *(each for folder in folders.values() for each in folder.faults)]
    elsewhere = [
        f"{count} run(s) were {words}."
        for words, count in Counter(run.elsewhere for run in runs if run.elsewhere is not None).items()
    ]
    open_runs = {run.run_id: _doubted(run, lost) for run in runs}
    active = [run for run in open_runs.values() if run.state.is_active]
    causes = [run.cause for run in active if run.cause is not None and run.state is RunState.UNKNOWN]
    told = [run.own_job for run in active if run.own_job is not None and run.submission and not run.submission.uuid]
    left_alone = [*elsewhere, *lost_notes(causes, told)]
    status = SweepStatus(
        sweep=sweep, specs=specs, open_runs=open_runs, read_done=read_done,
        remarks=[*notes, *left_alone], ledger=ledger, top_up_job=_top_up_job(ledger, view), faults=faults,
        tending_job=_top_up_job(ledger, view, may_work=True), silence=notes[0] if notes else None,
        lost=lost, queue_error=notes[0] if view.queue is None else ledger.unread, left_alone=left_alone,
    )  # fmt: skip
    if status.waiting:
        return dataclasses.replace(status, remarks=[*status.remarks, _waiting_note(status, view)])
    return status


def _may_be_on_slurm(spec: RunSpec) -> bool:
    """True if a job of Slurm's may have a run of which no submission tells; of a lost spec nobody knows."""
    return has_slurm() if spec.is_lost else bool(spec.config["cluster"]["executor"] == Executor.slurm.value)


def _unseen(ledger: Ledger) -> str:
    return f"squeue did not answer, and a job may have it: {ledger.damage[0]}" if ledger.damage else NO_SUBMISSION


def _first_look(
    sweep: SweepPaths, run_ids: Iterable[str], listed: Iterable[str] | None, read: Callable[[str], RunFolder],
    submissions: Mapping[str, tuple[Submission, int]], ledger: Ledger,
) -> dict[str, RunFolder]:  # fmt: skip
    """The folders of runs that are not done. What was `listed` of the sweep's tells which runs have none yet."""
    present = set(run_ids if listed is None else listed)
    place = str(sweep.folder)
    return {
        run_id: read(run_id)
        if run_id in present
        else unstarted_folder(sweep.run(run_id), submissions.get(run_id), _reason(ledger, run_id))
        for run_id in run_ids
        if run_id not in present or not os.path.exists(f"{place}/{run_id}/{DONE}")  # noqa: PTH110
    }


def _doubted(run: RunStatus, lost: LostJobs) -> RunStatus:
    """The run, UNKNOWN if a job that no file tells of may have it, or if it would be submitted without its spec."""
    if run.state is RunState.COMPLETED or (run.state.is_active and not run.waits_in_sweep):
        job_id = lost.job_of(run.run_id) if run.state is RunState.UNKNOWN else None
        return run if job_id is None else dataclasses.replace(run, job_id=job_id, own_job=job_id)
    cause = None if run.state is RunState.CANCELLED else lost.cause(run.run_id)
    if cause is not None:
        found = lost.job_of(run.run_id)
        job_id, own_job = found or run.job_id, found or run.own_job
        return dataclasses.replace(
            run, state=RunState.UNKNOWN, cause=cause, job_id=job_id, own_job=own_job, waits_in_sweep=False
        )
    if run.spec.is_lost and run.state.needs_submit:
        return dataclasses.replace(run, state=RunState.UNKNOWN, cause=LOST_SPEC)
    return run


def _top_up_job(ledger: Ledger, view: SchedulerView, *, may_work: bool = False) -> str | None:
    entries = [entry for entry in (view.queue or {}).values() if may_work or entry.state == PENDING]
    found = (find_by_uuid(entries, each.uuid) for each in reversed(ledger.top_ups))
    return next((each for each in found if each is not None), None)


def _reason(ledger: Ledger, run_id: str) -> str | None:
    return ledger.waiting[run_id].reason if run_id in ledger.waiting else None


def _waiting_note(status: SweepStatus, view: SchedulerView) -> str:
    count = f"{len(status.waiting)} run(s) wait in the sweep's own queue"
    if view.queue is None:
        return f"{count}."
    if (job_id := status.top_up_job or status.tending_job) is not None:
        return f"{count}: job {job_id} submits them as runs end."
    return (
        f"{count}, and no top-up job is queued. The submit command brings them in, or: "
        f"hpc-trainer top-up {status.sweep.folder}"
    )


def _no_sweep(sweep: SweepPaths) -> str:
    parent = sweep.folder.parent
    known = sorted(each.name for each in parent.glob("*") if SweepPaths(each).exists)
    listed = f"Sweeps in {parent}: {', '.join(known)}." if known else f"{parent} holds no sweep."
    return f"there is no sweep {sweep.name}. {listed} $HPC_TRAINER_RUNS names another folder of sweeps."


def _status_of(
    spec: RunSpec, folder: RunFolder, view: SchedulerView, decided: End, refused: str | None, faults: Faults
) -> RunStatus:
    state, cause, node = decided
    newest = folder.newest
    failure: Mapping[str, Any] = {}
    if ended_before_it_began(folder, state):
        failure = words_before_the_worker(folder, _setup_of(spec), faults)
    elif state is RunState.FAILED and newest is not None:
        # Written by the first rank that failed: rank 0 may have been killed before it could tell.
        failure = read_failure(folder.paths.failure(newest.attempt), faults)
    if not failure and state in _DIED and folder.is_on_slurm and newest is not None and not newest.has_ended:
        failure = words_of_death(folder, faults)
    if failure.get("cause") == OUT_OF_MEMORY:  # Slurm, or the queue, saw no more than an exit code
        state, cause = RunState.OUT_OF_MEMORY, OUT_OF_MEMORY
    if refused is not None and not state.is_active and state is not RunState.COMPLETED:
        state, cause = RunState.FAILED, f"Slurm refused it: {refused}"
    beat = folder.heartbeat
    seen = beat.get("time") or (newest.end_time or newest.start_time if newest else None)
    entry = view.job_of(folder)
    waiting = entry if entry is not None and entry.state in NOT_BEGUN else None
    running = state is RunState.RUNNING and newest is not None and beat.get("attempt") == newest.attempt
    return RunStatus(
        spec=spec,
        state=state,
        # A loop of a person's own may finish before num_steps.
        step=folder.result.get("step", spec.num_steps) if state is RunState.COMPLETED else _step(folder),
        attempts=folder.attempts,
        job_id=None if folder.waits is not None else folder.job_id or (newest.job_id if newest else None),
        cause=cause,
        node=node or (newest.node if newest else None),
        metrics=folder.result.get("metrics") or beat.get("metrics") or {},
        steps_per_s=beat.get("steps_per_s") if running else None,
        eta_s=beat.get("eta_s") if running else None,
        speed=_speed({**beat, **beat.get("metrics", {})}) if running or state is RunState.COMPLETED else {},
        remarks=tuple(beat.get("remarks", {}).values()) if running else (),
        age_s=None if seen is None else max(0.0, time.time() - seen),
        num_steps=spec.num_steps or int(beat.get("num_steps", 0)),
        stop_s=beat["step_s"] + beat["save_s"] if {"step_s", "save_s"} <= beat.keys() else None,
        submission=folder.submission,
        waits_in_sweep=folder.waits is not None and state is RunState.PENDING,
        failure=failure,
        device_warning=_device_warning(folder, newest, state, faults),
        own_job=view.own_job(folder) if state.is_active or state is RunState.CANCELLED else None,
        waiting_job=waiting.job_id if waiting is not None else None,
        pending_reason=waiting.reason or None if waiting is not None and state in _WAITS else None,
        elsewhere=view.elsewhere(folder) if state.is_active else None,
    )


def _device_warning(folder: RunFolder, newest: Attempt | None, state: RunState, faults: Faults) -> str | None:
    if newest is not None and newest.cause in CAUSES and state is RunState.REQUEUED:
        move = read_move(folder.paths, newest.attempt, faults)
        return None if move is None else move.text
    if newest is None or newest.has_ended or state is not RunState.RUNNING:  # the next one has not begun
        return None
    found = read_warnings(folder.paths, newest.attempt, faults)
    more = f" (and {len(found) - 1} more: hpc-trainer why)" if len(found) > 1 else ""
    return f"{found[0].text}{more}" if found else None


_DIED = (RunState.FAILED, RunState.OUT_OF_MEMORY)


def _setup_of(spec: RunSpec) -> Sequence[str]:
    return () if spec.is_lost else spec.config["cluster"]["setup"]


# With a job that has not begun; one that was cancelled may have one too, and waits for nothing.
_WAITS = (RunState.PENDING, RunState.REQUEUED, RunState.HELD)


def _speed(found: Mapping[str, Any]) -> Mapping[str, float]:
    return {key: found[key] for key in SPEED if is_number(found.get(key))}


def _step(folder: RunFolder) -> int:
    beat: int = folder.heartbeat.get("step", 0)
    newest = folder.newest
    if newest is not None and newest.saved_step is not None:
        return newest.saved_step
    if newest is None or newest.attempt != folder.heartbeat.get("attempt"):
        # The heartbeat is of an attempt before: only what was saved counts.
        known = ((attempt.saved_step, attempt.resumed_step) for attempt in reversed(folder.attempts))
        return next((step for steps in known for step in steps if step is not None), beat)
    return beat


def gpu_hours(run: RunStatus) -> float:
    """GPU-hours that all attempts of a run held, up to the last sign of life."""
    gpus = run.spec.shape.num_nodes * run.spec.shape.gpus_per_node
    # An attempt that was killed told no end: it ended before the next one began, or with the last sign of life.
    ends = [*(attempt.start_time for attempt in run.attempts[1:]), time.time() - (run.age_s or 0.0)]
    seconds = ((a.end_time or end) - a.start_time for a, end in zip(run.attempts, ends, strict=False))
    return gpus * sum(max(0.0, each) for each in seconds) / 3600
