"""The state of one run: from what it wrote itself, then from what Slurm says, never a guess."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpc_trainer.runs.files import read_json
from hpc_trainer.runs.journal import Attempt, Journal
from hpc_trainer.runs.layout import RunPaths
from hpc_trainer.runs.local_process import is_alive
from hpc_trainer.runs.states import CANCEL, DONE, HOLD, RunState
from hpc_trainer.runs.submissions import SUCCESSOR, Submission, newest_of_run
from hpc_trainer.slurm.queue import AccountingEntry, QueueEntry, array_of, is_of


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """What the queue and the accounting said, asked once for all runs. None: no answer.

    Ids come again, so a job or a row counts as a run's only if its comment or name says so too.
    """

    queue: Mapping[str, QueueEntry] | None
    accounting: Mapping[str, AccountingEntry] | None
    asked_time: float = field(default_factory=time.time)
    """Seconds since the epoch before the first question: what is younger may not show in the answers."""
    cluster: str | None = None
    """What the cluster that answered calls itself; None if nobody had to know, or it did not say."""
    _arrays: dict[str, list[AccountingEntry]] = field(init=False, default_factory=dict)
    _own: dict[tuple[str, str], list[AccountingEntry]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for row in (self.accounting or {}).values():
            self._arrays.setdefault(array_of(row.job_id), []).append(row)

    def job_of(self, folder: RunFolder) -> QueueEntry | None:
        """The run's job in the queue."""
        entry = self._with_its_id(folder)
        return entry if entry is not None and is_of(entry, folder.uuid) else None

    def has_foreign_job(self, folder: RunFolder) -> bool:
        """True if the id of the run's job is that of another job in the queue."""
        return self._with_its_id(folder) is not None and self.job_of(folder) is None

    def _with_its_id(self, folder: RunFolder) -> QueueEntry | None:
        return (self.queue or {}).get(folder.job_id or "")

    def row_of(self, folder: RunFolder) -> AccountingEntry | None:
        """What the accounting says of the run's job."""
        row = (self.accounting or {}).get(folder.job_id or "")
        return row if row is not None and is_of(row, folder.uuid) else None

    def rows_of_array(self, folder: RunFolder) -> list[AccountingEntry]:
        """Everything that the accounting says of the run's array."""
        key = (array_of(folder.job_id or ""), folder.uuid)
        if key not in self._own:
            self._own[key] = [row for row in self._arrays.get(key[0], []) if is_of(row, folder.uuid)]
        return self._own[key]

    def knows(self, folder: RunFolder) -> bool:
        """True if the queue or the accounting has the run's job, or others of its array."""
        return self.job_of(folder) is not None or bool(self.rows_of_array(folder))

    def elsewhere(self, folder: RunFolder) -> str | None:
        """The cluster that the run's job was given to, if that is not this one."""
        there = folder.submission.cluster if folder.submission else None
        return there if None not in (there, self.cluster) and there != self.cluster and not self.knows(folder) else None

    def is_young(self, folder: RunFolder) -> bool:
        """True if the run's job may be too young to show."""
        return folder.submission is not None and self.asked_time - folder.submission.time < _LAG_S

    def own_job(self, folder: RunFolder) -> str | None:
        """The id of the run's job, if it is surely its own: only such a job may get a signal."""
        if self.queue is None or folder.waits is not None or not folder.is_on_slurm:
            return None
        if self.job_of(folder) is not None:
            return folder.job_id
        # sbatch has named it moments ago: nobody else can have it.
        is_new = self.is_young(folder) and not self.has_foreign_job(folder) and self.elsewhere(folder) is None
        return folder.job_id if is_new else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """What one run's own files say."""

    paths: RunPaths
    submission: Submission | None
    """The newest: an array of the sweep's, or a successor job that an attempt submitted."""
    element: int
    """The run's index in it."""
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
        if self.is_on_slurm:
            is_its = newest.job_id == self.job_id and newest.start_time > self.submission.time - _CLOCKS_S
            return newest if is_its else None
        if newest.start_time < self.submission.time:
            return None
        return newest

    @property
    def uuid(self) -> str:
        """What its job carries; "" if it was never submitted."""
        return self.submission.uuid if self.submission is not None else ""

    @property
    def is_on_slurm(self) -> bool:
        """True if it was given to Slurm last."""
        return self.submission is not None and self.submission.executor == "slurm"

    @property
    def needs_scheduler(self) -> bool:
        """True if only Slurm knows whether this run lives."""
        return self.is_on_slurm and DONE not in self.markers and self.waits is None

    @property
    def is_settled(self) -> bool:
        """True if its files tell its end, whatever a scheduler says."""
        return DONE in self.markers or journal_settles(self.current)


def read_folder(paths: RunPaths, latest: tuple[Submission, int] | None, waits: str | None) -> RunFolder:
    """What the run has written up to now.

    Args:
        latest: the newest submission of the sweep that holds it, and its index in there.
        waits: why it waits in the sweep's own queue; None if it does not.
    """
    submission, index = newest_of_run(paths, latest) or (None, 0)
    markers = frozenset(name for name in (DONE, CANCEL, HOLD) if paths.marker(name).exists())
    return RunFolder(
        paths=paths,
        submission=submission,
        element=index,
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


def journal_settles(attempt: Attempt | None) -> bool:
    return attempt is not None and attempt.has_ended and attempt.state is not RunState.REQUEUED


def decide(folder: RunFolder, view: SchedulerView) -> tuple[RunState, str | None, str | None]:
    """(state, cause, node) of one run."""
    if DONE in folder.markers:
        return RunState.COMPLETED, str(folder.result.get("cause", "done")), None
    if folder.waits is not None:
        if CANCEL in folder.markers:
            return RunState.CANCELLED, "cancelled", None
        return RunState.PENDING, folder.waits, None
    if folder.is_on_slurm:
        state, cause, node = _decide_slurm(folder, view)
    else:
        (state, cause), node = _decide_local(folder), None
    if CANCEL in folder.markers and state is not RunState.RUNNING:
        return RunState.CANCELLED, "cancelled", node
    if state is RunState.COMPLETED:  # by the journal, and DONE is gone: the last step's checkpoint will bring it back
        return RunState.PREEMPTED, "DONE is missing", node
    return state, cause, node


def _decide_local(folder: RunFolder) -> tuple[RunState, str | None]:
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
# slurmctld keeps what it cannot tell slurmdbd at once, and tells it later. After this a row that does not end is one
# that sacctmgr calls a runaway job.
_ACCOUNTING_LAG_S = 600.0
# By this much clocks of login nodes and nodes may differ; no controller comes to the same id again as soon.
_CLOCKS_S = 600.0
# Heartbeats come every few seconds, and a network filesystem may show them a minute late.
_ALIVE_S = 60.0
# sacct's words for a job that it believes to be alive.
_NOT_ENDED = {*_AT_WORK, "PENDING", "REQUEUED"}


def _decide_slurm(folder: RunFolder, view: SchedulerView) -> tuple[RunState, str | None, str | None]:
    there = view.elsewhere(folder)
    elsewhere = f"it was submitted on the cluster {there}, and this is {view.cluster}: ask there"
    if folder.job_id is None:
        # An intent without an answer, and no job in the queue carries its uuid (yet).
        lost = "its submission was interrupted; the next submit finds out what became of it"
        return RunState.UNKNOWN, elsewhere if there else lost, None
    current = folder.current
    is_successor = folder.submission is not None and folder.submission.kind == SUCCESSOR
    cause = current.cause if current else None
    entry = view.job_of(folder)
    if entry is not None:
        return (
            _state_in_queue(entry, current, is_successor=is_successor),
            cause if current and current.has_ended else None,
            entry.node or None,
        )
    if journal_settles(current):
        assert current is not None
        return current.state or RunState.UNKNOWN, cause, None
    if view.queue is None or view.accounting is None:
        return RunState.UNKNOWN, f"{'squeue' if view.queue is None else 'sacct'} did not answer", None
    account = view.row_of(folder)
    if account is not None and (ended := _ended_by_accounting(account, current)):
        return ended, cause or f"Slurm: {account.state} ({account.exit_code})", account.node
    if there:
        return RunState.UNKNOWN, elsewhere, None
    if view.is_young(folder):
        return RunState.PENDING, None, None
    return _decide_absent(folder, view)


def _decide_absent(folder: RunFolder, view: SchedulerView) -> tuple[RunState, str | None, str | None]:
    """The state of a run whose job is not in the queue, and of whose end nobody knows."""
    quiet_s = view.asked_time - _last_sign(folder)
    account = view.row_of(folder) or _row_before_it_began(folder, view)
    if account is not None and account.state in _NOT_ENDED and (
        quiet_s < _ACCOUNTING_LAG_S or account.state == "PENDING"
    ):  # fmt: skip
        return RunState.UNKNOWN, f"it has left the queue, and sacct still says {account.state}: ask again", account.node
    if folder.current is None and view.rows_of_array(folder) and view.row_of(folder) is None:
        # An element has a row of its own once it begins. Cancelled before, it has none, or the array has one for it:
        # `7` or `7_[0-4%2]` (22.05).
        return RunState.CANCELLED, "cancelled before it began", None
    if quiet_s < _ALIVE_S:
        said = f"{max(0.0, quiet_s):.0f} s ago it gave a sign of life, and Slurm does not know its job: ask again"
        return RunState.UNKNOWN, said, None
    # Over, and not by DONE. Without accounting nobody can say whether it crashed or was cancelled while it waited,
    # so nothing brings it back unasked: --retry-failed does.
    cause = "gone from the queue without a word, and sacct does not know the job"
    if view.has_foreign_job(folder):
        cause += f" (the id belongs to another job now: {folder.job_id})"
    return RunState.FAILED, cause, None


def _row_before_it_began(folder: RunFolder, view: SchedulerView) -> AccountingEntry | None:
    """The row that the accounting has for elements of its array that wait, if the run may be among them."""
    if folder.current is not None:
        return None
    rows = (row for row in view.rows_of_array(folder) if row.may_cover(folder.element) and row.state in _NOT_ENDED)
    return next(rows, None)


def _last_sign(folder: RunFolder) -> float:
    """When the run last wrote anything, seconds since the epoch; 0.0 if it never did."""
    beat = folder.heartbeat.get("time", 0.0)
    return float(max(beat, folder.current.start_time if folder.current else 0.0))


def _ended_by_accounting(account: AccountingEntry, current: Attempt | None) -> RunState | None:
    if account.state == "COMPLETED":
        # Left within the grace period after a save that the journal has; or some code said exit(0) for itself.
        return RunState.PREEMPTED if current is not None and current.has_ended else RunState.FAILED
    if account.state == "FAILED" and current is not None and current.state is RunState.REQUEUED:
        return RunState.PREEMPTED  # saved, and then nobody could requeue it: the next submit brings it back
    if account.state == "FAILED" and current is None and account.exit_code in _STOP_EXIT_CODES:
        return RunState.PREEMPTED  # stopped before Python had its handlers: nothing ran, nothing failed
    return _ENDED.get(account.state)


# SIGTERM and SIGUSR2 as Slurm shows them: the batch shell's signal, a shell's code, or srun's own way (seen: 15:0).
_STOP_EXIT_CODES = {"0:15", "143:0", "15:0", "0:12", "140:0", "12:0"}


def _state_in_queue(entry: QueueEntry, current: Attempt | None, *, is_successor: bool) -> RunState:
    if entry.state == "PENDING":
        if "held" in entry.reason.lower():
            return RunState.HELD
        return RunState.PENDING if current is None and not is_successor else RunState.REQUEUED
    if entry.state.startswith("REQUEUE"):
        return RunState.HELD if entry.state == "REQUEUE_HOLD" else RunState.REQUEUED
    if entry.state == "SPECIAL_EXIT":
        return RunState.HELD
    if entry.state in _AT_WORK:
        settled = current is not None and journal_settles(current) and entry.state == "COMPLETING"
        return (current.state or RunState.RUNNING) if settled and current else RunState.RUNNING
    return _ENDED.get(entry.state, RunState.UNKNOWN)
