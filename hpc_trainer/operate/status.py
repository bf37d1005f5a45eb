"""The state of every run of a sweep: what the run wrote, then what Slurm says, never a guess."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hpc_trainer.errors import RunStateError, SlurmError
from hpc_trainer.runs.files import read_json
from hpc_trainer.runs.journal import Attempt, Journal
from hpc_trainer.runs.layout import RunPaths, SweepPaths
from hpc_trainer.runs.local_process import is_alive
from hpc_trainer.runs.spec import RunSpec, read_specs
from hpc_trainer.runs.states import CANCEL, DONE, HOLD, RunState
from hpc_trainer.runs.submissions import Ledger, Submission, latest_of_each_run, read_ledger
from hpc_trainer.slurm.queue import AccountingEntry, QueueEntry, array_of, find_by_uuid, read_accounting, read_queue


@dataclass(frozen=True, slots=True, kw_only=True)
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
    failure: Mapping[str, Any] = field(default_factory=dict)
    waits_in_sweep: bool = False
    """PENDING in the sweep's own queue: no scheduler has it yet."""

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.spec.run_id

    @property
    def reason(self) -> str | None:
        """Why the run is not complete, in a line: the first error that it recorded, else the cause; None if neither."""
        error = (self.attempts[-1].error if self.attempts else {}) or self.failure
        kind, message = error.get("type"), str(error.get("message", "")).strip()
        if self.state is RunState.FAILED and message:
            return (f"{kind}: {message}" if kind else f"{self.cause}: {message}").splitlines()[0]
        return self.cause


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepStatus:
    """Every run of a sweep, in order of submission. `notes` says what could not be asked."""

    sweep: SweepPaths
    runs: list[RunStatus]
    notes: list[str] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)

    @property
    def counts(self) -> dict[str, int]:
        """State -> number of runs."""
        return dict(Counter(run.state.value for run in self.runs))

    @property
    def states(self) -> dict[str, RunState]:
        """Run id -> state."""
        return {run.run_id: run.state for run in self.runs}

    @property
    def waiting(self) -> list[RunStatus]:
        """Runs in the sweep's own queue."""
        return [run for run in self.runs if run.waits_in_sweep]

    @property
    def has_active(self) -> bool:
        """True while anything waits or works."""
        return any(run.state.is_active for run in self.runs)


@dataclass(frozen=True, slots=True)
class _SchedulerView:
    """What the queue and the accounting said, asked once for all runs. None: no answer."""

    queue: Mapping[str, QueueEntry] | None
    accounting: Mapping[str, AccountingEntry] | None


def read_status(sweep: SweepPaths) -> SweepStatus:
    """Reads a sweep: its folders, at most one squeue, at most one sacct.

    Raises:
        RunStateError: there is no such sweep.
    """
    specs = read_specs(sweep)
    if not specs and not sweep.folder.is_dir():
        raise RunStateError(_no_sweep(sweep))
    ledger = read_ledger(sweep)
    submissions = latest_of_each_run(ledger.submissions)
    notes: list[str] = []
    folders = {
        run_id: _read_folder(sweep.run(run_id), submissions.get(run_id), ledger.waiting.get(run_id)) for run_id in specs
    }
    asked = [folder for folder in folders.values() if folder.needs_scheduler]
    view = _ask_slurm(asked, notes, must_ask=bool(ledger.waiting))
    runs = [_status_of(specs[run_id], folder, view) for run_id, folder in folders.items()]
    status = SweepStatus(sweep=sweep, runs=runs, notes=notes, ledger=ledger)
    if status.waiting:
        notes.append(_waiting_note(status, view))
    return status


def _waiting_note(status: SweepStatus, view: _SchedulerView) -> str:
    count = f"{len(status.waiting)} run(s) wait in the sweep's own queue"
    if view.queue is None:
        return f"{count}."
    entries = list(view.queue.values())
    found = (find_by_uuid(entries, status.sweep.name, each.uuid) for each in reversed(status.ledger.top_ups))
    job_id = next((each for each in found if each is not None), None)
    if job_id is not None:
        return f"{count}: job {job_id} submits them as runs end."
    return (
        f"{count}, and no top-up job is queued. The submit command brings them in, or: "
        f"hpc-trainer top-up {status.sweep.folder}"
    )


def _no_sweep(sweep: SweepPaths) -> str:
    parent = sweep.folder.parent
    known = sorted(each.parent.name for each in parent.glob("*/specs.jsonl"))
    listed = f"Sweeps in {parent}: {', '.join(known)}." if known else f"{parent} holds no sweep."
    return f"there is no sweep {sweep.name}. {listed} $HPC_TRAINER_RUNS names another folder of sweeps."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Folder:
    """What one run's own files say."""

    paths: RunPaths
    submission: Submission | None
    job_id: str | None
    attempts: list[Attempt]
    heartbeat: Mapping[str, Any]
    result: Mapping[str, Any]
    markers: frozenset[str]
    waits: str | None
    """Why the run waits in the sweep's own queue; None if it does not."""

    @property
    def current(self) -> Attempt | None:
        """The newest attempt, if it belongs to the newest submission (or the run was never submitted)."""
        newest = self.attempts[-1] if self.attempts else None
        if newest is None or self.submission is None:
            return newest
        if self.submission.executor == "slurm":
            return newest if newest.job_id == self.job_id else None
        if newest.start_time < self.submission.time:
            return None
        return newest

    @property
    def needs_scheduler(self) -> bool:
        """True if only Slurm knows whether this run lives."""
        on_slurm = self.submission is not None and self.submission.executor == "slurm" and self.job_id is not None
        return on_slurm and DONE not in self.markers and self.waits is None


def _read_folder(paths: RunPaths, latest: tuple[Submission, int] | None, waits: str | None) -> _Folder:
    submission, index = latest or (None, 0)
    markers = frozenset(name for name in (DONE, CANCEL, HOLD) if paths.marker(name).exists())
    return _Folder(
        paths=paths,
        submission=submission,
        job_id=submission.element_id(index) if submission else None,
        attempts=Journal(paths).read(),
        heartbeat=_numbers_only(read_json(paths.heartbeat) or {}),
        result=(read_json(paths.result) or {}) if DONE in markers else {},
        markers=markers,
        waits=waits,
    )


def _numbers_only(beat: Mapping[str, Any]) -> dict[str, Any]:
    """A heartbeat without what no worker writes: a damaged file must not hide the other runs."""
    numbers = {key: value for key, value in beat.items() if isinstance(value, (int, float))}
    return {**numbers, "metrics": beat["metrics"]} if isinstance(beat.get("metrics"), dict) else numbers


def _ask_slurm(folders: list[_Folder], notes: list[str], *, must_ask: bool = False) -> _SchedulerView:
    if not folders and not must_ask:
        return _SchedulerView({}, {})
    try:
        queue = read_queue()
    except SlurmError as error:
        notes.append(f"squeue did not answer ({error}): states are from the run folders alone.")
        return _SchedulerView(None, {})
    unsettled = (folder for folder in folders if folder.job_id not in queue and not _journal_settles(folder.current))
    ids = [array_of(str(folder.job_id)) for folder in unsettled]
    try:
        return _SchedulerView(queue, read_accounting(ids))
    except SlurmError as error:
        notes.append(f"sacct did not answer ({error}): runs that left the queue are UNKNOWN until it does.")
        return _SchedulerView(queue, None)


def _journal_settles(attempt: Attempt | None) -> bool:
    return attempt is not None and attempt.has_ended and attempt.state is not RunState.REQUEUED


def _status_of(spec: RunSpec, folder: _Folder, view: _SchedulerView) -> RunStatus:
    state, cause, node = _decide(folder, view)
    beat, newest = folder.heartbeat, folder.attempts[-1] if folder.attempts else None
    seen = beat.get("time") or (newest.end_time or newest.start_time if newest else None)
    running = state is RunState.RUNNING and newest is not None and beat.get("attempt") == newest.attempt
    return RunStatus(
        spec=spec,
        state=state,
        step=spec.num_steps if state is RunState.COMPLETED else _step(folder),
        attempts=folder.attempts,
        job_id=None if folder.waits is not None else folder.job_id or (newest.job_id if newest else None),
        cause=cause,
        node=node or (newest.node if newest else None),
        metrics=_metrics(folder.result) or _metrics(beat),
        steps_per_s=beat.get("steps_per_s") if running else None,
        eta_s=beat.get("eta_s") if running else None,
        age_s=None if seen is None else max(0.0, time.time() - seen),
        # Written by the first rank that failed: rank 0 may have been killed before it could tell.
        waits_in_sweep=folder.waits is not None and state is RunState.PENDING,
        failure=(read_json(folder.paths.failure(newest.attempt)) or {}) if newest and state is RunState.FAILED else {},
    )


def _metrics(record: Mapping[str, Any]) -> Mapping[str, Any]:
    metrics = record.get("metrics")
    return metrics if isinstance(metrics, dict) else {}


def _step(folder: _Folder) -> int:
    beat = int(folder.heartbeat.get("step") or 0)
    newest = folder.attempts[-1] if folder.attempts else None
    if newest is not None and newest.saved_step is not None:
        return newest.saved_step
    if newest is None or newest.attempt != folder.heartbeat.get("attempt"):
        # The heartbeat is of an attempt before: only what was saved counts.
        known = ((attempt.saved_step, attempt.resumed_step) for attempt in reversed(folder.attempts))
        return next((step for steps in known for step in steps if step is not None), beat)
    return beat


def _decide(folder: _Folder, view: _SchedulerView) -> tuple[RunState, str | None, str | None]:
    """(state, cause, node) of one run."""
    if DONE in folder.markers:
        return RunState.COMPLETED, "done", None
    if folder.waits is not None:
        if CANCEL in folder.markers:
            return RunState.CANCELLED, "cancelled", None
        return RunState.PENDING, folder.waits, None
    if folder.submission is not None and folder.submission.executor == "slurm":
        state, cause, node = _decide_slurm(folder, view)
    else:
        (state, cause), node = _decide_local(folder), None
    if CANCEL in folder.markers and state is not RunState.RUNNING:
        return RunState.CANCELLED, "cancelled", node
    if state is RunState.COMPLETED:  # by the journal, and DONE is gone: the last step's checkpoint will bring it back
        return RunState.PREEMPTED, "DONE is missing", node
    return state, cause, node


def _decide_local(folder: _Folder) -> tuple[RunState, str | None]:
    current = folder.current
    if current is not None and current.has_ended:
        return current.state or RunState.UNKNOWN, current.cause
    # The run itself may outlive its queue (that one was killed), and a queue the run's first moments.
    signs = [is_alive(name) for name in (folder.job_id, current.process if current else None) if name]
    if any(signs):
        return (RunState.PENDING if current is None else RunState.RUNNING), None
    if None in signs:
        return RunState.UNKNOWN, "it was started on another host (or under another name of this one): ask there"
    if current is None:
        # Never started, and the queue that would have started it is gone: submit it again.
        return (RunState.PREEMPTED if folder.attempts else RunState.NEW), None
    # A queue records a death that the run could not record itself; without it nobody will: the machine went down.
    return RunState.NODE_FAIL, "its processes are gone without a word"


# squeue's words for "has nodes".
_AT_WORK = {
    "RUNNING",
    "COMPLETING",
    "CONFIGURING",
    "STAGE_OUT",
    "SIGNALING",
    "SUSPENDED",
    "STOPPED",
    "RESIZING",
}
# sacct's words -> ours. COMPLETED is not among them: without DONE it is no success (see _ended_by_accounting).
_ENDED = {
    "FAILED": RunState.FAILED,
    "TIMEOUT": RunState.TIMEOUT,
    "DEADLINE": RunState.TIMEOUT,
    "NODE_FAIL": RunState.NODE_FAIL,
    "BOOT_FAIL": RunState.NODE_FAIL,
    "OUT_OF_MEMORY": RunState.OUT_OF_MEMORY,
    "OUT_OF_ME": RunState.OUT_OF_MEMORY,
    "PREEMPTED": RunState.PREEMPTED,
    "CANCELLED": RunState.CANCELLED,
}
# A fresh job may not show in squeue or sacct yet.
_LAG_S = 30.0


def _decide_slurm(folder: _Folder, view: _SchedulerView) -> tuple[RunState, str | None, str | None]:
    current, job_id = folder.current, folder.job_id
    cause = current.cause if current else None
    entry = view.queue.get(job_id) if view.queue is not None and job_id is not None else None
    if entry is not None:
        return (
            _state_in_queue(entry, current),
            cause if current and current.has_ended else None,
            entry.node or None,
        )
    if _journal_settles(current):
        assert current is not None
        return current.state or RunState.UNKNOWN, cause, None
    if view.queue is None or view.accounting is None:
        return RunState.UNKNOWN, f"{'squeue' if view.queue is None else 'sacct'} did not answer", None
    account = view.accounting.get(job_id or "")
    if account is not None and (ended := _ended_by_accounting(account, current)):
        return ended, cause or f"Slurm: {account.state} ({account.exit_code})", account.node
    assert folder.submission is not None
    if time.time() - folder.submission.time < _LAG_S:
        return RunState.PENDING, None, None
    # Over, and not by DONE. Without accounting nobody can say whether it crashed or was cancelled while it waited,
    # so nothing brings it back unasked: --retry-failed does.
    return RunState.FAILED, "gone from the queue without a word, and sacct does not know the job", None


def _ended_by_accounting(account: AccountingEntry, current: Attempt | None) -> RunState | None:
    if account.state == "COMPLETED":
        # Left within the grace period after a save that the journal has; or some code said exit(0) for itself.
        return RunState.PREEMPTED if current is not None and current.has_ended else RunState.FAILED
    if account.state == "FAILED" and current is None and account.exit_code in _STOP_EXIT_CODES:
        return RunState.PREEMPTED  # stopped before Python had its handlers: nothing ran, nothing failed
    return _ENDED.get(account.state)


# SIGTERM and SIGUSR2 as Slurm shows them: the batch shell's signal, a shell's code, or srun's own way (seen: 15:0).
_STOP_EXIT_CODES = {"0:15", "143:0", "15:0", "0:12", "140:0", "12:0"}


def _state_in_queue(entry: QueueEntry, current: Attempt | None) -> RunState:
    if entry.state == "PENDING":
        if "held" in entry.reason.lower():
            return RunState.HELD
        return RunState.PENDING if current is None else RunState.REQUEUED
    if entry.state.startswith("REQUEUE"):
        return RunState.HELD if entry.state == "REQUEUE_HOLD" else RunState.REQUEUED
    if entry.state == "SPECIAL_EXIT":
        return RunState.HELD
    if entry.state in _AT_WORK:
        settled = current is not None and _journal_settles(current) and entry.state == "COMPLETING"
        return (current.state or RunState.RUNNING) if settled and current else RunState.RUNNING
    return _ENDED.get(entry.state, RunState.UNKNOWN)


def gpu_hours(run: RunStatus) -> float:
    """GPU-hours that all attempts of a run held, up to the last sign of life."""
    gpus = run.spec.shape.num_nodes * run.spec.shape.gpus_per_node
    # An attempt that was killed told no end: it ended before the next one began, or with the last sign of life.
    ends = [*(attempt.start_time for attempt in run.attempts[1:]), time.time() - (run.age_s or 0.0)]
    seconds = ((a.end_time or end) - a.start_time for a, end in zip(run.attempts, ends, strict=False))
    return gpus * sum(max(0.0, each) for each in seconds) / 3600


def fits(run_id: str, name: str) -> bool:
    """True if a person may mean this run by `name`: the whole id, its beginning, or its end."""
    return bool(name) and (run_id.startswith(name) or run_id.endswith(name))


def find_runs(status: SweepStatus, names: Iterable[str]) -> list[RunStatus]:
    """The runs whose id is, or else begins or ends with, one of `names`; all runs if there are none.

    Raises:
        RunStateError: a name fits no run.
    """
    wanted = list(names)
    if not wanted:
        return status.runs
    found: dict[str, RunStatus] = {}
    for name in wanted:
        exact = [run for run in status.runs if run.run_id == name]
        chosen = exact or [run for run in status.runs if fits(run.run_id, name)]
        if not chosen:
            listed = ", ".join(run.run_id for run in status.runs[:10]) or "none"
            raise RunStateError(f"no run of {status.sweep.name} is named {name!r}. Runs: {listed}.")
        found.update({run.run_id: run for run in chosen})
    return list(found.values())
