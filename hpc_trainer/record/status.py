"""Status of all runs of a sweep: `read_status` reads their files, asks Slurm about doubtful ones, and never guesses.

Slurm is asked once for all runs about which their files leave a doubt, and once for the ledger of each attempt. Runs
and jobs whose lines are lost are found by their folders, the queue, batch scripts and processes.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from hpc_trainer.config.environment import setup_of
from hpc_trainer.config.schema.cluster import ClusterConfig, Executor
from hpc_trainer.domains import contributions
from hpc_trainer.errors import ExitCode, RunStateError, SlurmError, did_you_mean
from hpc_trainer.record import doubts
from hpc_trainer.record.doubts import Doubt, DoubtKind, kind_of_doubt
from hpc_trainer.record.holds import Hold, read_hold
from hpc_trainer.record.journal import MOVE_CAUSES, Attempt, read_failure, read_move
from hpc_trainer.record.last_words import words_before_the_worker, words_of_death
from hpc_trainer.record.layout import OLD_JOURNAL, OTHER_FOLDER, TRASH, SweepPaths, is_run_id
from hpc_trainer.record.ledger import (
    RunLedger,
    keep_allocations,
    ledger_of,
    match,
    most_timeouts,
    newest_timeouts,
    read_allocations,
    read_spent,
    timed_out_words,
)
from hpc_trainer.record.metrics import SPEED, newest_metrics_in, read_metrics
from hpc_trainer.record.reading import (
    Faults,
    FaultsOf,
    exists,
    is_number,
    is_there,
    list_folder,
    look_anew,
    read_bytes,
    read_json,
    told_few,
)
from hpc_trainer.record.run_state import (
    End,
    RunFolder,
    SchedulerView,
    ask_slurm,
    decide,
    decide_now,
    ended_before_it_began,
    read_finished,
    read_folder,
    record_ends,
    record_finished,
    unstarted_folder,
    went_away,
)
from hpc_trainer.record.spec import NAMELESS, WRITE_AGAIN, RunSpec, lost_spec, read_specs
from hpc_trainer.record.states import CANCEL, DONE, KILLED, NOT_FINITE, OUT_OF_MEMORY, RunState
from hpc_trainer.record.submissions import (
    Job,
    Ledger,
    Removed,
    Submission,
    latest_of_each_run,
    read_ledger,
    read_removed,
    read_removed_sweep,
    rivals_of_each_run,
)
from hpc_trainer.record.summaries import Summaries
from hpc_trainer.record.turns import (
    Stuck,
    Turn,
    Turns,
    is_slot,
    living_slots,
    may_have_slots,
    pool_job,
    read_turn,
    slot_name,
)
from hpc_trainer.slurm.commands import has_slurm
from hpc_trainer.slurm.jobs import show_scripts
from hpc_trainer.slurm.queue import Allocation, QueueEntry, array_of, ask_allocations, find_by_uuid
from hpc_trainer.slurm.terms import NOT_BEGUN, PENDING, explain_reason

# Status of one run, as every command shows it: from its folder and from the scheduler's answer about its job.


@dataclass(slots=True, kw_only=True)  # not frozen: 10,000 instances would take 45 ms more
class RunStatus:
    """Status of one run, as `status` shows it. `step` is the newest known step, `age_s` the age of that knowledge."""

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
    """Steps of the whole run; 0 if the number is not known."""
    speed: Mapping[str, float] = field(default_factory=dict)
    """The newest values of `record.metrics.SPEED`, for a run that works or is complete."""
    remarks: Sequence[str] = ()
    """Remarks of the running attempt for the user, such as a rank that delays the others."""
    failure: Mapping[str, Any] = field(default_factory=dict)
    stop_s: float | None = None
    """Seconds that the run needs to stop: a step and a save, each by its slowest 1 %, as the run measured them."""
    submission: Submission | None = None
    """The newest submission: an array of the sweep, or a successor job."""
    waits_in_sweep: bool = False
    """True if the run is PENDING in the sweep's own queue, so that no scheduler has it yet."""
    own_job: str | None = None
    """Id of the run's Slurm job, if the job is certainly its own. Only then may it be signalled or waited for."""
    waiting_job: str | None = None
    """Id of the run's Slurm job, if the queue shows that the job has not begun."""
    rivals: Sequence[tuple[Submission, str]] = ()
    """The run's jobs on other hardware that are in the queue (`hardware=first:a,b`), each with its submission."""
    is_claimed: bool = False
    """True if one of several jobs has started the run, so that `rivals` are not needed any more."""
    elsewhere: str | None = None
    """Reason why the run's job may be on another cluster, as words after "it was" (`SchedulerView.elsewhere`)."""
    device_warning: str | None = None
    """Problem of a running run that a domain found, such as a GPU that is too hot or fails.

    For a run that waits to restart without a node, the reason (`record/journal.py`, `Move`).
    """
    limit_warning: str | None = None
    """Warning that the time limit leaves too little for training, for an active run."""
    pending_reason: str | None = None
    """Slurm's term for the reason why the run's job waits; None if no job of the run waits."""
    waits_for: str | None = None
    """Runs that the run follows and that are not complete, as its newest look saw them; None if it has not looked."""
    turn: Turn | None = None
    """The slot of a pool that has the run; None if no slot has it."""

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.spec.run_id

    @property
    def has_slurm_job(self) -> bool:
        """True if the newest job is a Slurm job; ids of the local queue begin with a host's name."""
        return self.job_id is not None and self.job_id[:1].isdecimal()

    @property
    def progress(self) -> str:
        """Steps as a table shows them: `120/200`, or `120` or `-` if a program has not logged the number of steps."""
        return f"{self.step}/{self.num_steps}" if self.num_steps else str(self.step or "-")

    @property
    def error(self) -> Mapping[str, Any]:
        """The first error that the run recorded: `type`, `message`, `exit_code`, `traceback`, ...; {} if none."""
        return self.failure or (self.attempts[-1].error if self.attempts else {})

    @property
    def reason(self) -> str | None:
        """Reason why the run is not complete, in one line; None if it is not known.

        The reason is the first recorded error, or else the cause and what the job is waiting for.
        """
        if self._failure_text is not None:
            return self._failure_text.splitlines()[0]
        word = self.pending_reason
        waits = None if word is None else f"{word}: {explain_reason(word).says}"
        return "; ".join(part for part in (self.cause, waits) if part is not None) or None

    @property
    def warning(self) -> str | None:
        """Problem of a run that works, waits or is complete: a GPU, the time limit, or metrics that are not finite."""
        if self.device_warning is not None or self.limit_warning is not None:
            return self.device_warning or self.limit_warning
        if self.cause != NOT_FINITE:
            return None
        numbers = ((key, value) for key, value in self.metrics.items() if isinstance(value, float))
        bad = [f"{key}={value}" for key, value in numbers if not math.isfinite(value)]
        return f"complete, but not finite: {', '.join(bad)}"

    @property
    def whole_reason(self) -> str | None:
        """Like `reason`, but with every line for an invalid configuration (exit 78): the last line says what to do."""
        return self._failure_text if self.error.get("exit_code") == ExitCode.CONFIG else self.reason

    @property
    def _failure_text(self) -> str | None:
        kind, message = self.error.get("type"), str(self.error.get("message", "")).strip()
        if not self.state.has_failed or not message:
            return None
        return f"{kind}: {message}" if kind else f"{self.cause}: {message}"


def status_of(
    spec: RunSpec, folder: RunFolder, view: SchedulerView, decided: End, refused: str | None, faults: Faults
) -> RunStatus:
    """Return the status of a run, with the state, cause and node of `decided`.

    `refused` is Slurm's message if it refused the run's job.
    """
    state, cause, node = decided
    newest = folder.newest
    failure: Mapping[str, Any] = {}
    if ended_before_it_began(folder, state):
        setup, num_of_environment = ((), 0) if spec.is_lost else setup_of(spec.config["cluster"])
        failure = words_before_the_worker(folder, setup, num_of_environment, FaultsOf(spec.run_id, faults))
    elif state is RunState.FAILED and newest is not None:
        # Written by the first rank that failed: rank 0 may have been killed before it could record the failure.
        failure = read_failure(folder.paths.failure(newest.attempt), FaultsOf(spec.run_id, faults))
    if not failure and state.has_failed and folder.is_on_slurm and newest is not None and not newest.has_ended:
        failure = words_of_death(folder, FaultsOf(spec.run_id, faults))
    elif cause == KILLED and state is RunState.FAILED and folder.is_on_slurm and not folder.is_in_pool:
        failure = _with_words_of_slurm(folder, failure, faults)
    if failure.get("cause") == OUT_OF_MEMORY:  # Slurm, or the queue, saw only an exit code
        state, cause = RunState.OUT_OF_MEMORY, OUT_OF_MEMORY
    if refused is not None and not state.is_active and state is not RunState.COMPLETED:
        state, cause = RunState.FAILED, f"Slurm refused it: {refused}"
    beat = folder.heartbeat
    seen = beat.get("time")
    if newest is not None and (seen is None or beat.get("attempt") != newest.attempt):
        seen = newest.end_time or newest.start_time  # a heartbeat of the previous attempt says nothing about this one
    entry = _waiting_slot(folder, view) if folder.is_in_pool else view.job_of(folder)
    waiting = entry if entry is not None and entry.state in NOT_BEGUN else None
    running = state is RunState.RUNNING and newest is not None and beat.get("attempt") == newest.attempt
    return RunStatus(
        spec=spec,
        state=state,
        # A user's own loop may finish before num_steps.
        step=folder.result.get("step", spec.num_steps) if state is RunState.COMPLETED else _step(folder),
        attempts=folder.attempts,
        job_id=None if folder.waits is not None else _shown_job(folder, state),
        cause=cause,
        node=node or (newest.node if newest else None),
        metrics=folder.result.get("metrics") or beat.get("metrics") or {},
        steps_per_s=beat.get("steps_per_s") if running else None,
        eta_s=beat.get("eta_s") if running else None,
        speed=_speed({**beat, **beat.get("metrics", {})}) if beat and (running or state is RunState.COMPLETED) else {},
        remarks=tuple(beat.get("remarks", {}).values()) if running else (),
        age_s=None if seen is None else max(0.0, time.time() - seen),
        num_steps=spec.num_steps or int(beat.get("num_steps", 0)),
        stop_s=beat["step_s"] + beat["save_s"] if {"step_s", "save_s"} <= beat.keys() else None,
        submission=folder.submission,
        waits_in_sweep=folder.waits is not None and state is RunState.PENDING,
        failure=failure,
        device_warning=_device_warning(folder, newest, state, faults),
        limit_warning=_limit_warning(spec, folder, faults) if state.is_active else None,
        own_job=view.own_job(folder) if state.is_active or state is RunState.CANCELLED else None,
        waiting_job=waiting.job_id if waiting is not None and not folder.is_in_pool else None,
        pending_reason=_pending_reason(waiting, folder, state),
        elsewhere=view.elsewhere(folder) if state.is_active else None,
        rivals=view.rival_jobs(folder) if folder.rivals else (),
        is_claimed=folder.is_claimed,
        waits_for=folder.waits_for if state.is_active else None,
        turn=folder.turn if state.is_active else None,
    )


def _with_words_of_slurm(folder: RunFolder, failure: Mapping[str, Any], faults: Faults) -> Mapping[str, Any]:
    """Return the error of a program that was killed; its output ends with that of the job, which may tell by whom."""
    told = failure or (folder.newest.error if folder.newest is not None else {})
    said = [told.get("output", ""), words_of_death(folder, FaultsOf(folder.paths.run_id, faults)).get("output", "")]
    return {**told, "output": "\n".join(text for text in said if text)}


def _pending_reason(waiting: QueueEntry | None, folder: RunFolder, state: RunState) -> str | None:
    """Return Slurm's reason why a job waits; None for a run that a user or a failed run holds: its cause says more."""
    is_ours = state is RunState.HELD and (folder.held is not None or folder.waits_for is not None)
    if waiting is None or state not in _WAITS or is_ours:
        return None
    return waiting.reason or None


def _shown_job(folder: RunFolder, state: RunState) -> str | None:
    """Return the run's own job or its slot's; for a run that waits in a pool that of all slots."""
    if folder.is_in_pool and folder.job_id is None and state.is_active and folder.submission is not None:
        return pool_job(folder.submission)
    return folder.job_id or (folder.newest.job_id if folder.newest else None)


def _waiting_slot(folder: RunFolder, view: SchedulerView) -> QueueEntry | None:
    """Return the first waiting slot of a run's pool if no slot works, for the reason why the run waits."""
    slots = view.slots_of(folder)
    return None if any(entry.state not in NOT_BEGUN for entry in slots) else next(iter(slots), None)


def _device_warning(folder: RunFolder, newest: Attempt | None, state: RunState, faults: Faults) -> str | None:
    if newest is not None and newest.cause in MOVE_CAUSES and state is RunState.REQUEUED:
        move = read_move(folder.paths, newest.attempt, FaultsOf(folder.paths.run_id, faults))
        return None if move is None else move.text
    if newest is None or newest.has_ended or state is not RunState.RUNNING:  # the next attempt has not begun
        return None
    own_faults = FaultsOf(folder.paths.run_id, faults)
    lines: Iterator[str | None] = (find(folder.paths, newest.attempt, own_faults) for find in contributions("warnings"))
    return next((line for line in lines if line is not None), None)


def _limit_warning(spec: RunSpec, folder: RunFolder, faults: Faults) -> str | None:
    if len(folder.attempts) < _FEWEST_TIMEOUTS:
        return None
    least = 0.0 if spec.is_lost else spec.config["cluster"].get("min_goodput", _MIN_GOODPUT)
    own_faults = FaultsOf(spec.run_id, faults)
    timed_out = newest_timeouts(
        folder.paths, folder.attempts, most_timeouts(0), least=_FEWEST_TIMEOUTS, faults=own_faults
    )
    if timed_out is None or timed_out.share >= least:
        return None
    return f"{timed_out_words(timed_out, spec.shape.time_limit_min)}; it is stopped for good if that stays so"


# So many timeouts are a reason for a warning, before the run is stopped because of them.
_FEWEST_TIMEOUTS = 2
_MIN_GOODPUT = ClusterConfig().min_goodput  # specs of older versions lack the key

# States with a job that has not begun; a cancelled run may have such a job too, but waits for nothing.
_WAITS = (RunState.PENDING, RunState.REQUEUED, RunState.HELD)


def _speed(heartbeat: Mapping[str, Any]) -> Mapping[str, float]:
    if _SPEEDS.isdisjoint(heartbeat):
        return {}
    return {key: heartbeat[key] for key in SPEED if is_number(heartbeat.get(key))}


_SPEEDS = frozenset(SPEED)


def _step(folder: RunFolder) -> int:
    beat: int = folder.heartbeat.get("step", 0)
    newest = folder.newest
    if newest is not None and newest.saved_step is not None:
        return newest.saved_step
    if newest is None or newest.attempt != folder.heartbeat.get("attempt"):
        # The heartbeat is of an earlier attempt, so only saved steps count.
        pairs = ((attempt.saved_step, attempt.resumed_step) for attempt in reversed(folder.attempts))
        return next((step for steps in pairs for step in steps if step is not None), beat)
    return beat


def gpu_hours(run: RunStatus) -> float:
    """Return the GPU-hours that all attempts of a run held, up to the last sign of life."""
    return run.spec.shape.num_nodes * run.spec.shape.gpus_per_node * wall_s(run) / 3600


def wall_s(run: RunStatus) -> float:
    """Return for how many seconds all attempts of a run worked, up to the last sign of life."""
    seconds = (end - attempt.start_time for attempt, end in zip(run.attempts, _ends(run), strict=True))
    return sum(max(0.0, duration) for duration in seconds)


def _ends(run: RunStatus) -> list[float]:
    """Return when each attempt ended, in seconds since the epoch.

    The journal has no end of a killed attempt: it ended before the next one began, or at the last sign of life.
    """
    if not run.attempts:
        return []
    if len(run.attempts) == 1 and run.attempts[0].end_time is not None:
        return [run.attempts[0].end_time]  # most of 10,000 runs
    later = [*(attempt.start_time for attempt in run.attempts[1:]), time.time() - (run.age_s or 0.0)]
    return [attempt.end_time or end for attempt, end in zip(run.attempts, later, strict=True)]


def submit_times(ledger: Ledger) -> dict[str, list[float]]:
    """Return run id -> when each of the run's submissions was made, in order, in seconds since the epoch."""
    times: dict[str, list[float]] = {}
    for submission in sorted(ledger.submissions, key=lambda submission: submission.time):
        for run_id in submission.run_ids:
            times.setdefault(run_id, []).append(submission.time)
    return times


def queue_s(run: RunStatus, submitted: Sequence[float]) -> float | None:
    """Return for how many seconds a run waited in the queue: before its first attempt, between attempts, and now.

    Between an end and a later submission it did not wait. None if it was never submitted.

    Args:
        run: the run.
        submitted: when each of its submissions was made, from `submit_times`.
    """
    if not submitted:
        return None
    waited, begin = 0.0, submitted[0]
    for attempt, end in zip(run.attempts, _ends(run), strict=True):
        again = [time_ for time_ in submitted if begin < time_ <= attempt.start_time]
        waited += max(0.0, attempt.start_time - (again[-1] if again else begin))
        begin = end
    since = waits_since(run, submitted)
    return waited if since is None else waited + max(0.0, time.time() - since)


def waits_since(run: RunStatus, submitted: Sequence[float]) -> float | None:
    """Return when a waiting run began to wait, in seconds since the epoch; None if unknown, or if it does not wait."""
    if run.state not in _WAITS or run.waits_in_sweep:
        return None
    return max([*submitted[-1:], *_ends(run)[-1:]], default=None)


_UUID = re.compile(r"[0-9a-f]{32}")
_HEAD = re.compile(r"-([0-9a-f]{8})\Z")  # of a uuid, at the end of a job's name
_OF_ONE_RUN = re.compile(rb"--run[ =]'?([A-Za-z0-9._-]+)")
_ENDS_AS_A_RUN = re.compile(r"-[0-9a-f]{10}\Z")


def known_specs(sweep: SweepPaths, ledger: Ledger, present: Iterable[str], faults: Faults) -> dict[str, RunSpec]:
    """Return every run of the sweep in the order that all commands show.

    Runs of specs.jsonl come first, then runs known only from submissions.jsonl, sweep.json or their folders. If the
    newest grid has all of the runs, its order is used instead.

    Args:
        sweep: the sweep.
        ledger: the content of submissions.jsonl.
        present: the names in the sweep's folder. List the folder before the call: a run's spec is written before its
            folder is created.
        faults: gets the faults of damaged and lost lines.
    """
    damage = Faults()
    specs = read_specs(sweep, damage)
    hardware = {run_id: submission.hardware for submission in ledger.submissions for run_id in submission.run_ids}
    hardware_names = {**hardware, **dict.fromkeys((*ledger.waiting, *ledger.refused), "?")}
    lost = {run_id: name for run_id, name in hardware_names.items() if run_id not in specs}
    listed = (read_json(sweep.sweep, Faults()) or {}).get("run_ids")
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    lost |= {name: lost.get(name, "?") for name in names if name not in specs and is_run_id(name)}
    lost |= dict.fromkeys(_run_folders(sweep, present, specs.keys() | lost.keys(), damage), "?")
    if lost and not damage:
        damage.append(f"specs.jsonl has lost {len(lost)} run(s). {WRITE_AGAIN}")
    # A damaged line may no longer name its run. If every run has its spec, the damaged line was written again.
    faults += damage if lost else [fault for fault in damage if not fault.endswith(NAMELESS)]
    faults.refusal = faults.refusal or damage.refusal
    return _as_in_the_grid(specs | {run_id: lost_spec(run_id, name) for run_id, name in lost.items()}, names)


def known_by_files(sweep: SweepPaths) -> tuple[Ledger, dict[str, RunSpec]]:
    """Return submissions.jsonl and every run of the sweep, without asking a scheduler or reporting a fault.

    Raises:
        UntrustedFileError: others may have changed a file.
    """
    ledger = read_ledger(sweep, may_fail=True)
    listed = list_folder(sweep.folder, Faults()) or ()  # before the specs, as `known_specs` requires
    return ledger, known_specs(sweep, ledger, listed, Faults())


def _as_in_the_grid(specs: dict[str, RunSpec], names: Sequence[str]) -> dict[str, RunSpec]:
    """Sort specs by the newest grid if it has all runs, because a grid that grew has later runs between the others.

    Otherwise they stay in order of submission: a `submit` of some of the runs must not move any.
    """
    is_whole = len(names) >= len(specs) and specs.keys() <= set(names)
    return {name: specs[name] for name in names if name in specs} if is_whole else specs


def _run_folders(sweep: SweepPaths, present: Iterable[str], listed: Collection[str], faults: Faults) -> list[str]:
    names = [name for name in present if name not in listed]
    runs = (sweep.run(name) for name in names if _ENDS_AS_A_RUN.search(name))
    signs = ((run.run_id, (run.journal(0), run.at(OLD_JOURNAL), run.heartbeat, run.logs)) for run in runs)
    return [run_id for run_id, paths in signs if any(exists(path, faults) is not False for path in paths)]


class Holder(NamedTuple):
    """Holder of a run that no submission names: its name in a sentence, and the job id if it is a Slurm job."""

    name: str
    job_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LostJobs:
    """Jobs and processes that wait or work for a sweep but that none of its files names."""

    arrays: tuple[str, ...] = ()
    """Ids of jobs whose runs are not known."""
    runs: Mapping[str, Holder] = field(default_factory=dict)
    """Run id -> the job or local queue process that has the run."""
    unseen: Doubt | None = None
    """Reason why it is not known whether there are such jobs."""

    def cause(self, run_id: str) -> Doubt | None:
        """Return why a run may wait or work although no file says so; None if there is no sign of it."""
        if run_id in self.runs:
            return doubts.taken(self.runs[run_id].name)
        return doubts.maybe_taken(self.arrays) if self.arrays else self.unseen

    def job_of(self, run_id: str) -> str | None:
        """Return the id of the job in Slurm that has a run, if it is known."""
        holder = self.runs.get(run_id)
        return None if holder is None else holder.job_id


def find_lost_jobs(
    sweep: SweepPaths, ledger: Ledger, submissions: Sequence[Submission], queue: Mapping[str, QueueEntry] | None,
    faults: Faults, *, needs_submit: bool,
) -> LostJobs:  # fmt: skip
    """Find lost jobs in squeue's answer and, if a run would be submitted, among this machine's processes.

    Args:
        sweep: the sweep.
        ledger: the content of submissions.jsonl.
        submissions: the newest submission of each run.
        queue: squeue's answer; None if there was none.
        faults: gets a fault for each folder that cannot be listed.
        needs_submit: True if a run would be submitted.
    """
    if ledger.unread is not None:
        return LostJobs(unseen=doubts.unreadable(ledger.unread))
    in_queue = _jobs_in_queue(sweep, ledger, submissions, (queue or {}).values(), faults, needs_submit=needs_submit)
    if needs_submit and exists(sweep.local_logs, faults) is not False:
        return replace(in_queue, runs={**_runs_of_queues(sweep, ledger), **in_queue.runs})
    return in_queue


def _jobs_in_queue(
    sweep: SweepPaths, ledger: Ledger, more: Iterable[Submission], queue: Iterable[QueueEntry], faults: Faults, *,
    needs_submit: bool,
) -> LostJobs:  # fmt: skip
    """Return the jobs in the queue that carry the uuid of one of this sweep's batch scripts but of no submission.

    A job may have the sweep's name but no script here, because another sweep may have the same name. If a run may be
    submitted, Slurm is asked for that job's script.
    """
    submissions = {submission.uuid[:8]: submission for submission in (*ledger.submissions, *ledger.top_ups, *more)}
    arrays: dict[str, None] = {}
    runs: dict[str, Holder] = {}
    named: dict[str, str] = {}
    scripts: dict[str, Path] | None = None
    for entry in queue:
        job_id = array_of(entry.job_id)
        head = entry.comment[:8] if _UUID.fullmatch(entry.comment) else _head_of(entry.name, sweep)
        if head is None or job_id in arrays or _is_told(entry, submissions.get(head)):
            continue
        if scripts is None:  # one listing only: the queue may show 10,000 jobs of other sweeps
            scripts = {name[:8]: sweep.scripts / name for name in list_folder(sweep.scripts, faults) or ()}
            if faults.refusal is not None:
                return LostJobs(unseen=doubts.unreadable(faults[-1]))
        script = scripts.get(head)
        if script is None:
            if head == _head_of(entry.name, sweep):
                named[job_id] = head
        elif "_" in entry.job_id:
            arrays[job_id] = None
        elif match := _OF_ONE_RUN.search(read_bytes(script, Faults()) or b""):
            runs[match[1].decode()] = Holder(f"job {job_id}", job_id)
    if not (needs_submit and named):
        return LostJobs(arrays=tuple(arrays), runs=runs)
    try:
        paths = show_scripts(named)
    except SlurmError as error:
        return LostJobs(arrays=tuple(arrays), runs=runs, unseen=doubts.silent_about([*named], error))
    here = os.path.realpath(sweep.scripts)
    silent = [job_id for job_id in named if job_id not in paths]
    own = [job_id for job_id, path in paths.items() if os.path.realpath(os.path.dirname(path)) == here]  # noqa: PTH120
    unseen = doubts.silent_about(silent, "Slurm does not say what its script was") if silent else None
    return LostJobs(arrays=(*arrays, *own), runs=runs, unseen=unseen)


def _is_told(entry: QueueEntry, submission: Submission | None) -> bool:
    """Return True if the entry may be of the submission, which has the entry's job (or is unconfirmed) and element."""
    if submission is None or submission.job_id not in (None, array_of(entry.job_id), entry.job_id):
        return False
    _, _, element = entry.job_id.partition("_")
    return not element.isdecimal() or int(element) < submission.num_elements


def _head_of(name: str, sweep: SweepPaths) -> str | None:
    match = _HEAD.search(name) if name.startswith(f"{sweep.name}-") else None
    return match[1] if match else None


def _runs_of_queues(sweep: SweepPaths, ledger: Ledger) -> dict[str, Holder]:
    """Return the runs of this machine's local queues that work for this sweep and that no submission names."""
    import psutil  # takes 20 ms, which most commands avoid

    uuids = {submission.uuid for submission in ledger.submissions}
    runs: dict[str, Holder] = {}
    for process in psutil.process_iter(["cmdline"]):
        arguments = process.info["cmdline"] or ()
        pairs = list(itertools.pairwise(arguments))
        intents = {argument for before, argument in pairs if before == "--intent"}
        if intents and not intents <= uuids and ("--sweep-dir", str(sweep.folder)) in pairs:
            runs |= dict.fromkeys(arguments, Holder(f"the queue of process {process.pid}", None))
    return runs


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """Slots of one pool that wait or work: their jobs (without Slurm their processes), and the places at work."""

    submission: Submission
    at_work: tuple[str, ...]
    waiting: tuple[str, ...] = ()
    reason: str | None = None
    """Slurm's term for the reason why the first waiting slot waits."""
    busy: int = 0
    """Places that have a run."""

    @property
    def places(self) -> int:
        """Places of the slots at work."""
        return len(self.at_work) * max(1, self.submission.per_node)

    @property
    def words(self) -> str:
        """State of the pool in a line."""
        slots = f"{len(self.at_work)} of {self.submission.slots} slot(s) at work"
        idle = self.places - self.busy
        parts = [slots, f"{self.busy} of {self.places} place(s) have a run"] if self.at_work else [slots]
        parts += [f"{idle} idle"] if idle > 0 else []
        if self.waiting:
            why = "" if self.reason is None else f" ({self.reason}: {explain_reason(self.reason).says})"
            parts.append(f"{len(self.waiting)} wait(s) in the queue{why}")
        return f"Pool {pool_job(self.submission)}: {', '.join(parts)}"


_SWEEPS_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class SweepStatus:
    """Status of every run of a sweep, in order of submission. Folders of done runs are read only on demand."""

    sweep: SweepPaths
    specs: Mapping[str, RunSpec]
    """Run id -> spec, in order of submission."""
    open_runs: Mapping[str, RunStatus]
    """Run id -> status of each run that is not done."""
    read_done: Callable[[str], RunStatus]
    """Function that reads the folder of a run that is done, or its summary."""
    summaries: Summaries | None = None
    """Summaries of completed runs; None if a command acts on the status."""
    remarks: Sequence[str] = ()
    """Questions that were not answered, and other remarks for the user."""
    ledger: Ledger = field(default_factory=Ledger)
    top_up_job: str | None = None
    """The job in the queue that will submit the waiting runs, if there is one that has not begun."""
    tending_job: str | None = None
    """Like `top_up_job`, or such a job that is running; None if no job will submit the waiting runs."""
    silence: str | None = None
    """Note on the question that Slurm did not answer; None if it answered, or was not asked."""
    is_queue_silent: bool = False
    """True if squeue was asked and did not answer."""
    is_away: bool = False
    """True if the sweep's folder could not be read just now; everything is then as of the last successful read."""
    faults: Faults = field(default_factory=Faults)
    """Faults of the files of the sweep and its runs that were read; `notes` begins with them."""
    lost: LostJobs = field(default_factory=LostJobs)
    """Jobs that wait or work for this sweep but are in none of its files."""
    queue_error: str | None = None
    """Reason why the runs' jobs are not known: squeue did not answer, or submissions.jsonl could not be read."""
    hold: Hold | None = None
    """Hold of the whole sweep; None if there is none."""
    removed: Mapping[str, Removed] = field(default_factory=dict)
    """Run id -> removal of each run that `rm` removed and that was not submitted since; its state is GONE."""
    pools: tuple[PoolStatus, ...] = ()
    """Pools that have a slot in the queue or at work, in order of submission."""
    stuck: Mapping[str, Stuck] = field(default_factory=dict)
    """Run id -> the claim because of which no slot of a pool takes the run."""
    left_alone: list[str] = field(default_factory=list)
    """Notes about runs that another cluster has or may have, and about jobs without a record; a part of `notes`."""

    @functools.cached_property
    def runs(self) -> list[RunStatus]:
        """Status of every run."""
        runs = [self.run(run_id) for run_id in self.specs]
        if self.summaries is not None:
            self.summaries.save()
        return runs

    def run(self, run_id: str) -> RunStatus:
        """Return the status of one run."""
        status = self.open_runs.get(run_id)
        return self.read_done(run_id) if status is None else status

    def faults_of(self, run_id: str) -> Faults:
        """Return the faults of one run, which become notes with the run's name."""
        return FaultsOf(run_id, self.faults)

    def open_among(self, run_ids: Iterable[str]) -> list[RunStatus]:
        """Return the runs with these ids that are not done."""
        return [self.open_runs[run_id] for run_id in run_ids if run_id in self.open_runs]

    @property
    def notes(self) -> list[str]:
        """The first few faults, then the remarks."""
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
        """True while any run waits or works."""
        return any(run.state.is_active for run in self.open_runs.values())


def read_status(sweep: SweepPaths, *, is_look: bool = False) -> SweepStatus:
    """Read the status of a sweep: its folders, at most one squeue, and at most one sacct.

    Runs continue while they are read, so the folders of runs that the scheduler no longer has are read again after its
    answer. If neither squeue nor sacct knows a job, one scontrol asks for the name of this cluster. An element that
    counts as cancelled only because sacct has no row for it makes `ask_slurm` ask both once more.

    Args:
        is_look: True if no command acts on the status. Slurm is then not asked if every end is known.

    Raises:
        RunStateError: there is no such sweep, or its folder disappeared in the meantime.
    """
    faults = Faults()
    try:
        look_anew(sweep.folder)  # another login node may have submitted it a moment ago
    except OSError as error:
        faults.refuse(sweep.folder, error)
    ledger = read_ledger(sweep, may_fail=True)
    listed = list_folder(sweep.folder, faults)
    specs = known_specs(sweep, ledger, listed or (), faults)
    whole = read_removed_sweep(sweep.folder) if not specs else None
    if whole is not None or (not specs and not sweep.folder.is_dir()):
        raise RunStateError(_no_sweep(sweep, whole))
    if specs and listed == []:
        raise went_away(sweep)  # else its runs would look as if they had not begun
    began = frozenset(listed or ())
    submissions = latest_of_each_run(ledger.submissions)
    rivals = rivals_of_each_run(ledger.submissions)
    removed = _still_removed(read_removed(sweep, began, faults), submissions)
    jobs = {submission.job_id for submission in ledger.submissions if submission.job_id is not None}
    hold = read_hold(sweep.hold, faults) if sweep.hold.name in began else None
    held = None if hold is None else hold.words
    turns, stuck = _open_turns(sweep, ledger, listed or (), submissions, faults)

    def read(run_id: str, names: Sequence[str] | None = None) -> RunFolder:
        return read_folder(
            sweep.run(run_id), submissions.get(run_id), ledger.waiting.get(run_id), jobs, names,
            is_listed=run_id in began, rivals=rivals.get(run_id, ()), turn=turns.get(run_id), held=held,
        )  # fmt: skip

    notes: list[str] = []
    finished = read_finished(sweep) if is_look else {}
    folders = _first_look(sweep, specs, listed, read, submissions, rivals, ledger, finished, turns, removed, held)
    # A batch script proves that this sweep was given to Slurm, even if submissions.jsonl is lost or damaged.
    is_told = not ledger.damage and ledger != Ledger()
    may_live = [folder for folder in folders.values() if not (is_look and CANCEL in folder.markers)]
    may_hide = bool(may_live) or not is_look or not specs
    is_torn = (may_hide and not is_told) or any(folder.submission is None for folder in may_live)
    untold = [specs[folder.paths.run_id] for folder in may_live if folder.submission is None]
    was_on_slurm = is_torn and (exists(sweep.scripts, faults) is not False or any(map(_may_be_on_slurm, untold)))
    # Slots of a search may wait or work although no run does.
    searches = [pool for pool in ledger.submissions if pool.source is not None and pool.executor == "slurm"]
    may_draw = any(not is_look or may_have_slots(sweep, pool) for pool in searches)
    view = ask_slurm(
        sweep, folders, read, notes, faults, is_look=is_look,
        must_ask=was_on_slurm or may_draw or bool(may_live and ledger.waiting),
    )  # fmt: skip
    decided = {run_id: decide_now(run_id, folders, view, read) for run_id in folders}
    record_ends(sweep, view, ((folders[run_id], end) for run_id, end in decided.items()))

    def run_status(run_id: str, folder: RunFolder, end: End) -> RunStatus:
        spec = specs[run_id]
        choice = folder.submission.choice if folder.submission is not None and folder.is_claimed else None
        if choice is not None and choice <= len(spec.others):  # the hardware on which the run has started
            spec = spec.on(choice)
        return status_of(spec, folder, view, end, ledger.refused.get(run_id), faults)

    summaries = Summaries(sweep) if is_look else None

    @functools.cache  # a second call neither reads the folder again nor reports its faults twice
    def read_done(run_id: str) -> RunStatus:
        latest = submissions.get(run_id)
        if summaries is None or latest is None or run_id in rivals:
            folder = read(run_id)
        else:
            folder = summaries.read(sweep.run(run_id), latest, read)
        faults.extend(folder.faults)
        return run_status(run_id, folder, decide(folder, view))

    runs = [run_status(run_id, folder, decided[run_id]) for run_id, folder in folders.items()]
    lost = find_lost_jobs(
        sweep, ledger, [run.submission for run in runs if run.submission], view.queue, faults,
        needs_submit=not is_told or any(run.state.needs_submit for run in runs),
    )  # fmt: skip
    if not is_told and was_on_slurm and view.queue is None:
        lost = replace(lost, unseen=doubts.silent_after_damage(next(iter(ledger.damage), None)))
    faults += [*ledger.damage, *(fault for folder in folders.values() for fault in folder.faults)]
    open_runs = {run.run_id: _doubted(run, lost) for run in runs}
    left_alone = [*_elsewhere_notes(runs), *_lost_notes(open_runs.values())]
    silence = notes[0] if notes else None
    pools = tuple(_pools(sweep, ledger, view, turns))
    notes += [f"{pool.words}." for pool in pools]
    status = SweepStatus(
        sweep=sweep, specs=specs, open_runs=open_runs, read_done=read_done, summaries=summaries,
        remarks=[*notes, *left_alone], ledger=ledger, top_up_job=_top_up_job(ledger, view), faults=faults,
        tending_job=_top_up_job(ledger, view, may_work=True), silence=silence,
        is_queue_silent=view.queue is None,
        lost=lost, queue_error=notes[0] if view.queue is None else ledger.unread, left_alone=left_alone,
        removed=removed, hold=hold, pools=pools, stuck=stuck,
    )  # fmt: skip
    if status.waiting:
        return replace(status, remarks=[*status.remarks, _waiting_note(status, view)])
    return status


def _open_turns(
    sweep: SweepPaths, ledger: Ledger, listed: Collection[str], submissions: dict[str, Job], faults: Faults
) -> tuple[dict[str, Turn], dict[str, Stuck]]:
    """Return the turn of each run that a slot of a pool has now, and the claims because of which no slot takes a run.

    Runs that a pool drew itself join `submissions`.
    """
    pools = {submission.uuid: submission for submission in ledger.submissions if submission.is_pool}
    if not pools:
        return {}, {}
    turns = Turns(sweep)
    turns.look([name for name in listed if is_slot(name)])
    faults += turns.faults
    open_turns: dict[str, Turn] = {}
    stuck: dict[str, Stuck] = {}
    for run_id, number in turns.newest.items():
        end = turns.end_of(run_id)
        turn = read_turn(sweep, run_id, number, faults) if end is None else None
        is_known = end is not None or (turn is not None and turn.holder.uuid in pools)
        if not is_known and not is_there(sweep.run(run_id).marker(DONE)):
            stuck[run_id] = Stuck(path=turns.path(run_id), holder=None if turn is None else turn.holder)
            faults.append(stuck[run_id].note(run_id))
        uuid = end.uuid if end is not None else turn.holder.uuid if turn is not None else ""
        if run_id not in submissions and uuid in pools:
            submissions[run_id] = pools[uuid], 0
        if turn is not None and run_id in submissions and submissions[run_id][0].uuid == uuid:
            open_turns[run_id] = turn
    return open_turns, stuck


def _pools(sweep: SweepPaths, ledger: Ledger, view: SchedulerView, turns: Mapping[str, Turn]) -> Iterator[PoolStatus]:
    """Yield the pools that have a slot in the queue or at work."""
    busy = Counter(turn.holder.slot for turn in turns.values())
    for pool in ledger.submissions:
        if not (turns or view.queue or pool.source is not None) or not pool.is_pool:
            continue
        entries = [] if pool.executor != "slurm" else view.slots_of_pool(pool)
        waiting = [entry for entry in entries if entry.state in NOT_BEGUN]
        if pool.executor == "slurm":
            at_work = [entry.job_id for entry in entries if entry.state not in NOT_BEGUN]
        else:
            at_work = living_slots(sweep, pool)
        if at_work or waiting:
            own = [slot_name(pool.uuid, element) for element in range(pool.slots)]
            yield PoolStatus(
                submission=pool, at_work=tuple(at_work), waiting=tuple(entry.job_id for entry in waiting),
                reason=waiting[0].reason or None if waiting else None, busy=sum(busy[slot] for slot in own),
            )  # fmt: skip


def _elsewhere_notes(runs: Iterable[RunStatus]) -> list[str]:
    counts = Counter(run.elsewhere for run in runs if run.elsewhere is not None)
    return [f"{count} run(s) were {place}." for place, count in counts.items()]


_LOST_LINE = (DoubtKind.taken, DoubtKind.maybe_taken, DoubtKind.untold_job)


def _lost_notes(runs: Iterable[RunStatus]) -> Iterator[str]:
    """Yield notes on jobs that have runs of the sweep although submissions.jsonl has lost the line that says so."""
    active = [run for run in runs if run.state.is_active]
    causes = [run.cause for run in active if run.cause is not None and run.state is RunState.UNKNOWN]
    for cause, count in Counter(cause for cause in causes if kind_of_doubt(cause) in _LOST_LINE).items():
        yield f"{count} run(s) are left alone: {cause}."
    jobs = [run.own_job for run in active if run.own_job is not None and run.submission and not run.submission.uuid]
    for job_id, count in Counter(map(array_of, jobs)).items():
        yield (
            f"{count} run(s) are left alone: their own files say that job {job_id} has them, but submissions.jsonl has "
            "lost the line of that job."
        )


def _may_be_on_slurm(spec: RunSpec) -> bool:
    """Return True if a Slurm job may have a run that no submission names; for a lost spec, if Slurm is installed."""
    return has_slurm() if spec.is_lost else bool(spec.config["cluster"]["executor"] == Executor.slurm.value)


def _first_look(
    sweep: SweepPaths, run_ids: Iterable[str], listed: Iterable[str] | None, read: Callable[..., RunFolder],
    submissions: Mapping[str, Job], rivals: Mapping[str, Sequence[Job]], ledger: Ledger, finished: Mapping[str, str],
    turns: Mapping[str, Turn], removed: Mapping[str, Removed], held: str | None,
) -> dict[str, RunFolder]:  # fmt: skip
    """Return the folders of runs that are not done.

    A run that is done costs one listing, or nothing if `finished` names it. Any other run costs the listing and two
    files.

    Args:
        sweep: the sweep.
        run_ids: all of its runs.
        listed: the names in the sweep's folder, which show which runs have no folder yet; None if it was not listed.
        read: reads the folder of a run, given its id and the names in it.
        submissions: the newest submission of each run, and the run's index in it.
        rivals: all jobs of each run whose newest submission went to several shapes.
        ledger: the content of submissions.jsonl.
        finished: the result of `read_finished`; {} if the caller acts on the status.
        turns: the slot that has each run of a pool.
        removed: the removed runs; remains of their folders do not count.
        held: who holds the whole sweep.
    """
    present = set(run_ids if listed is None else listed)
    place = str(sweep.folder)
    folders: dict[str, RunFolder] = {}
    done: dict[str, str] = {}
    for run_id in run_ids:
        latest = submissions.get(run_id)
        uuid = latest[0].uuid if latest is not None else ""
        if run_id in removed:
            folders[run_id] = unstarted_folder(sweep.run(run_id), latest, None, removed=removed[run_id].words)
        elif run_id not in present:
            waits, jobs = _reason(ledger, run_id), rivals.get(run_id, ())
            turn = turns.get(run_id)
            folders[run_id] = unstarted_folder(sweep.run(run_id), latest, waits, jobs, turn, held=held)
        elif (uuid and finished.get(run_id) == uuid) or DONE in (names := _names_of(f"{place}/{run_id}")):
            done[run_id] = uuid
        else:
            folders[run_id] = read(run_id, names or None)
    record_finished(sweep, finished, done)
    return folders


def _names_of(folder: str) -> list[str]:
    """Return the names in a run's folder; [] if it cannot be listed, because the later read reports the reason."""
    try:
        return os.listdir(folder)  # noqa: PTH208  (10,000 of them)
    except OSError:
        return []


def _doubted(run: RunStatus, lost: LostJobs) -> RunStatus:
    """Return the run, as UNKNOWN if a job that no file names may have it, or if a submit would need its lost spec."""
    if run.state is RunState.COMPLETED or (run.state.is_active and not run.waits_in_sweep):
        job_id = lost.job_of(run.run_id) if run.state is RunState.UNKNOWN else None
        return run if job_id is None else replace(run, job_id=job_id, own_job=job_id)
    cause = None if run.state is RunState.CANCELLED else lost.cause(run.run_id)
    if cause is not None:
        lost_job = lost.job_of(run.run_id)
        job_id, own_job = lost_job or run.job_id, lost_job or run.own_job
        return replace(run, state=RunState.UNKNOWN, cause=cause, job_id=job_id, own_job=own_job, waits_in_sweep=False)
    if run.spec.is_lost and run.state.needs_submit:
        return replace(run, state=RunState.UNKNOWN, cause=doubts.lost_spec(WRITE_AGAIN))
    return run


def _top_up_job(ledger: Ledger, view: SchedulerView, *, may_work: bool = False) -> str | None:
    entries = [entry for entry in (view.queue or {}).values() if may_work or entry.state == PENDING]
    jobs = (find_by_uuid(entries, top_up.uuid) for top_up in reversed(ledger.top_ups))
    return next((job_id for job_id in jobs if job_id is not None), None)


def _reason(ledger: Ledger, run_id: str) -> str | None:
    return ledger.waiting[run_id].reason if run_id in ledger.waiting else None


def _waiting_note(status: SweepStatus, view: SchedulerView) -> str:
    count = f"{len(status.waiting)} run(s) wait in the sweep's own queue"
    if view.queue is None:
        return f"{count}."
    if (job_id := status.top_up_job or status.tending_job) is not None:
        return f"{count}: job {job_id} submits them as runs end."
    return (
        f"{count}, and no top-up job is queued. The submit command submits them, and so does: "
        f"hpc-trainer top-up {status.sweep.folder}"
    )


def _still_removed(removed: Mapping[str, Removed], submissions: Mapping[str, Job]) -> dict[str, Removed]:
    """Return the removals of runs that were not submitted since."""
    newest = {run_id: submissions[run_id][0].uuid if run_id in submissions else "" for run_id in removed}
    return {run_id: removal for run_id, removal in removed.items() if removal.uuid == newest[run_id]}


def _no_sweep(sweep: SweepPaths, removed: Removed | None) -> str:
    if removed is not None:
        return f"the sweep {sweep.name} was {removed.words}. A submit with this name begins a new sweep."
    parent = sweep.folder.parent
    names = sorted(
        folder.name for folder in parent.glob("*") if not folder.name.startswith(TRASH) and SweepPaths(folder).exists
    )
    few = ", ".join(names[:_SWEEPS_SHOWN]) + (" .." if len(names) > _SWEEPS_SHOWN else "")
    missing = "" if parent.is_dir() else ": there is no such folder"
    listed = f"Sweeps in {parent}: {few}." if names else f"{parent} holds no sweep{missing}."
    return f"there is no sweep {sweep.name}. {did_you_mean(sweep.name, names)}{listed} {OTHER_FOLDER}"


_MOST = 200
_FEW = 20
"""Largest number of array elements about which sacct is asked one by one; above it, about whole arrays."""


def ledger_of_run(status: SweepStatus, run: RunStatus, allocations: Sequence[Allocation] = ()) -> RunLedger | None:
    """Return the ledger of one run, or None, from its files and `allocations`, the accounting's new answer."""
    shape = run.spec.shape
    return ledger_of(
        status.sweep.run(run.run_id), run.attempts, num_gpus=shape.num_nodes * shape.gpus_per_node,
        allocations=allocations, faults=status.faults_of(run.run_id),
    )  # fmt: skip


def goodputs(status: SweepStatus, runs: Sequence[RunStatus]) -> dict[str, float]:
    """Return run id -> goodput, from files alone, for runs that have a ledger; {} for more than 200 runs.

    A ledger is two small files, which a command about 10,000 runs must not read.
    """
    if len(runs) > _MOST:
        return {}
    ledgers = {run.run_id: ledger_of_run(status, run) for run in runs if run.attempts}
    return {
        run_id: round(ledger.goodput, 4)
        for run_id, ledger in ledgers.items()
        if ledger is not None and ledger.goodput is not None
    }


def ask_ledgers(status: SweepStatus, runs: Iterable[RunStatus], notes: list[str]) -> dict[str, RunLedger]:
    """Return run id -> ledger for the runs that have one.

    At most one sacct is called for all runs, and none if the Elapsed of every attempt is known from earlier. Its answer
    is kept beside the runs' ledgers, because the accounting forgets.

    Args:
        status: status of the sweep.
        runs: the runs.
        notes: gets a note if sacct did not answer.
    """
    runs = list(runs)
    unknown = [attempt for run in runs for attempt in _unknown(status, run)]
    allocations: list[Allocation] = []
    if unknown and status.silence is None:
        try:
            allocations = ask_allocations(_ids(unknown), min(attempt.start_time for attempt in unknown))
        except SlurmError as error:
            notes.append(f"sacct did not answer ({error}): where the time went is from the run folders alone.")
    for run in runs if allocations else ():
        jobs = {attempt.job_id for attempt in run.attempts}
        keep_allocations(
            status.sweep.run(run.run_id), [allocation for allocation in allocations if allocation.job_id in jobs]
        )
    ledgers = {run.run_id: ledger_of_run(status, run, allocations) for run in runs}
    return {run_id: ledger for run_id, ledger in ledgers.items() if ledger is not None}


def _unknown(status: SweepStatus, run: RunStatus) -> list[Attempt]:
    """Return the ended attempts on Slurm whose allocation is not recorded; [] if the run has no ledger."""
    ended = run.attempts if run.state is not RunState.RUNNING else run.attempts[:-1]
    on_slurm = [attempt for attempt in ended if attempt.executor == "slurm"]
    if not on_slurm:
        return []
    paths = status.sweep.run(run.run_id)
    allocated = match(run.attempts, read_allocations(paths, Faults()))
    return [attempt for attempt in on_slurm if attempt.attempt not in allocated] if read_spent(paths, Faults()) else []


def _ids(attempts: Sequence[Attempt]) -> set[str]:
    ids = {attempt.job_id for attempt in attempts}
    return ids if len(ids) <= _FEW else {array_of(job_id) for job_id in ids}


_MOST_RUNS = 200

# Metrics of one moment of training; a table of results shows the outcome.
_PASSING = ("lr", "grad_norm", "loss", *SPEED)


def newest_metrics(
    status: SweepStatus, run: RunStatus, records: Iterable[Mapping[str, Any]] | None = None
) -> tuple[dict[str, Any], int | None]:
    """Return the metrics of the outcome, and their step; None if the step is not known.

    For a run that has stopped, these are the newest in its metrics.jsonl up to its step: its heartbeat may be older.

    Args:
        records: the records of the run's metrics.jsonl, if the caller has read them.
    """
    if run.state is RunState.COMPLETED or not run.attempts:
        return outcome_metrics(run), run.step if run.state is RunState.COMPLETED else None
    if records is None:
        records = read_metrics(status.sweep.run(run.run_id).metrics, status.faults_of(run.run_id))
    newest, _ = _up_to(run.step, records)
    metrics = outcome_metrics(run, {key: value for key, (value, _) in newest.items()})
    return (metrics, max(newest[key][1] for key in metrics)) if metrics else (outcome_metrics(run), None)


def _up_to(last: int, records: Iterable[Mapping[str, Any]]) -> tuple[dict[str, tuple[Any, int]], frozenset[str]]:
    """Return each metric's newest (value, step) up to step `last`, and the names of metrics logged after `last`."""
    newest: dict[str, tuple[Any, int]] = {}
    later = set[str]()
    for record in records:
        step = record["step"]
        values = {key: value for key, value in record.items() if key not in ("step", "time")}
        if step > last:
            later |= values.keys()
        else:
            newest |= {key: (value, step) for key, value in values.items()}
    return newest, frozenset(later)


def outcome_metrics(run: RunStatus, metrics: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the metrics of the outcome among the run's metrics, or `metrics`; for a program all except speed."""
    passing = _PASSING if run.spec.num_steps else SPEED  # 0: a program, whose loss may be its only metric
    return {key: value for key, value in (run.metrics if metrics is None else metrics).items() if key not in passing}


def metrics_now(status: SweepStatus, runs: Sequence[RunStatus]) -> dict[str, tuple[dict[str, Any], int | None]]:
    """Return for each run id its newest metrics, and the step of its outcome if that differs from the run's step.

    A stopped run is at the step that it saved, while its metrics come from its last heartbeat, at another step. So the
    end of its metrics.jsonl is read, but not with more than 200 runs: a look at 10,000 runs must not read such files.
    """
    stopped = (run for run in runs if run.attempts and run.state not in (RunState.RUNNING, RunState.COMPLETED))
    by_run = {} if len(runs) > _MOST_RUNS else {run.run_id: _where_it_stopped(status, run) for run in stopped}
    return {run.run_id: by_run.get(run.run_id) or (dict(run.metrics), None) for run in runs}


def _where_it_stopped(status: SweepStatus, run: RunStatus) -> tuple[dict[str, Any], int | None]:
    records = newest_metrics_in(status.sweep.run(run.run_id).metrics, status.faults_of(run.run_id))
    newest, later = _up_to(run.step, records)
    of_heartbeat = {key: value for key, value in run.metrics.items() if key in newest or key not in later}
    metrics = of_heartbeat | {key: value for key, (value, _) in newest.items()}
    telling = outcome_metrics(run, metrics) or metrics.keys() & {"loss"}
    step = max((newest[key][1] for key in telling if key in newest), default=None)
    return metrics, None if step == run.step else step
