"""The state of one run: from what it wrote itself, then from what Slurm says, never a guess."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from hpc_trainer.errors import UntrustedFileError
from hpc_trainer.operate.lost import is_of_unknown_job, submission_told_by
from hpc_trainer.runs.beat import read_heartbeat, read_result
from hpc_trainer.runs.journal import Attempt, Journal
from hpc_trainer.runs.layout import RunPaths
from hpc_trainer.runs.local_process import is_alive
from hpc_trainer.runs.reading import Faults
from hpc_trainer.runs.states import CANCEL, DONE, RunState
from hpc_trainer.runs.submissions import SUCCESSOR, Ledger, Submission, newest_in, read_ledger
from hpc_trainer.runtime.decide import UNEXPLAINED
from hpc_trainer.slurm.queue import AccountingEntry, QueueEntry, array_of

End = tuple[RunState, str | None, str | None]
"""State, cause and node of a run."""


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """What the queue and the accounting said, asked once for all runs. None: no answer."""

    queue: Mapping[str, QueueEntry] | None
    accounting: Mapping[str, AccountingEntry] | None
    remembered: Mapping[str, End] = field(default_factory=dict)
    """What the accounting said of jobs before: it may have forgotten them."""
    accounted: frozenset[str] = field(init=False)
    """Jobs and arrays of which the accounting has any row."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "accounted", frozenset(map(array_of, self.accounting or ())))


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
    faults: tuple[str, ...] = ()
    """What of its files cannot be read."""
    doubt: str | None = None
    """What is lost that may tell of a later attempt or a later end than what was read."""

    @property
    def current(self) -> Attempt | None:
        """The newest attempt, if it belongs to the newest submission (or the run was never submitted)."""
        newest = self.attempts[-1] if self.attempts else None
        if newest is None or self.submission is None:
            return newest
        if self.submission.executor == "slurm":
            return newest if newest.job_id == self.job_id else None
        if self.element < len(self.submission.num_attempts):  # not by time: clocks of login nodes differ
            is_its = len(self.attempts) > self.submission.num_attempts[self.element]
        else:
            is_its = newest.start_time >= self.submission.time
        return newest if is_its else None

    @property
    def needs_scheduler(self) -> bool:
        """True if only Slurm knows whether this run lives."""
        on_slurm = self.submission is not None and self.submission.executor == "slurm"
        return on_slurm and DONE not in self.markers and self.waits is None


def read_folder(
    paths: RunPaths, latest: tuple[Submission, int] | None, waits: str | None, jobs: Collection[str] = ()
) -> RunFolder:
    """What lies in the folder of a run; what is damaged is told in `faults`.

    Args:
        latest: the run's newest submission among the sweep's, and its index in there.
        jobs: ids of all arrays that the sweep's submissions tell of.
    """
    faults, journal_faults = Faults(), Faults()
    heartbeat = read_heartbeat(paths.heartbeat, faults)
    book = _read_book(paths)
    story = Journal(paths).read_story(journal_faults)
    lost = _lost_attempt(paths, story.attempts, heartbeat)
    faults += [*book.damage, *journal_faults, *lost]
    doubts = [*book.damage, *(() if story.is_whole else journal_faults), *lost]
    submission, index = newest_in(book, latest) or (None, 0)
    own_jobs = {each.job_id for each in book.submissions}
    if (
        submission is not None
        and not doubts
        and is_of_unknown_job(story.attempts, submission, {*jobs, *filter(None, own_jobs)})
    ):
        doubts = [f"its newest attempt is of job {story.attempts[-1].job_id}, of which submissions.jsonl has no line"]
    told = submission_told_by(story.attempts, submission, {*jobs, *filter(None, own_jobs)})
    submission, index = (told, 0) if told is not None else (submission, index)
    markers = frozenset(name for name in (DONE, CANCEL) if paths.marker(name).exists())
    return RunFolder(
        paths=paths,
        submission=submission,
        element=index,
        job_id=submission.element_id(index) if submission else None,
        attempts=story.attempts,
        heartbeat=heartbeat,
        result=read_result(paths.result, faults) if DONE in markers else {},
        markers=markers,
        waits=waits,
        faults=tuple(f"{paths.run_id}: {each}" for each in faults),
        doubt=doubts[0] if doubts else None,
    )


def _read_book(paths: RunPaths) -> Ledger:
    """The run's own submissions.jsonl; one that others may have changed costs this run only."""
    try:
        return read_ledger(paths)
    except UntrustedFileError as error:
        return Ledger(damage=(str(error),))


def _lost_attempt(paths: RunPaths, attempts: list[Attempt], heartbeat: Mapping[str, Any]) -> Faults:
    """An attempt that has left a sign of life or an error, and no line in the journal."""
    number = attempts[-1].attempt + 1 if attempts else 0
    if heartbeat.get("attempt", -1) >= number:
        return [f"attempts.jsonl has lost attempt {heartbeat['attempt']}"]
    return ["attempts.jsonl has lost attempt 0"] if not attempts and paths.failure(0).exists() else []


def journal_settles(attempt: Attempt | None) -> bool:
    if attempt is None or not attempt.has_ended or attempt.cause == UNEXPLAINED:
        return False
    return attempt.state is not RunState.REQUEUED


def decide(folder: RunFolder, view: SchedulerView) -> tuple[RunState, str | None, str | None]:
    """(state, cause, node) of one run."""
    if DONE in folder.markers:
        return RunState.COMPLETED, str(folder.result.get("cause", "done")), None
    if folder.waits is not None:
        if CANCEL in folder.markers:
            return RunState.CANCELLED, "cancelled", None
        return RunState.PENDING, folder.waits, None
    if folder.submission is not None and folder.submission.executor == "slurm":
        state, cause, node = _decide_slurm(folder, view)
    else:
        (state, cause), node = _decide_local(folder), None
    if folder.doubt is not None and not (state.is_active and _is_seen_alive(folder, view)):
        state, cause = RunState.UNKNOWN, folder.doubt
    if CANCEL in folder.markers and state is not RunState.RUNNING:
        return RunState.CANCELLED, "cancelled", node
    if state is RunState.COMPLETED:  # by the journal, and DONE is gone: the last step's checkpoint will bring it back
        return RunState.PREEMPTED, "DONE is missing", node
    return state, cause, node


def _is_seen_alive(folder: RunFolder, view: SchedulerView) -> bool:
    """True if Slurm has the run's job, or its own process lives: a queue that lives may be done with this run."""
    if folder.submission is not None and folder.submission.executor == "slurm":
        return view.queue is not None and folder.job_id in view.queue
    return folder.current is not None and bool(is_alive(folder.current.process))


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
# sacct's words for a job that it believes to be alive.
_NOT_ENDED = {*_AT_WORK, "PENDING", "REQUEUED"}


def _decide_slurm(folder: RunFolder, view: SchedulerView) -> tuple[RunState, str | None, str | None]:
    if folder.job_id is None:
        # An intent without an answer, and no job in the queue carries its uuid (yet).
        return RunState.UNKNOWN, "its submission was interrupted; the next submit finds out what became of it", None
    current, job_id = folder.current, folder.job_id
    is_successor = folder.submission is not None and folder.submission.kind == SUCCESSOR
    cause = current.cause if current else None
    entry = view.queue.get(job_id) if view.queue is not None and job_id is not None else None
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
    account = view.accounting.get(job_id or "")
    if account is None and job_id in view.remembered:
        return view.remembered[job_id]
    if current is not None and current.cause == UNEXPLAINED and current.state is not None:
        # It saved and left, and did not hear whether somebody had cancelled it. Slurm's last word counts.
        is_cancelled = account is not None and account.state == "CANCELLED"
        return (RunState.CANCELLED, "cancelled", None) if is_cancelled else (current.state, cause, None)
    if account is not None and (ended := _ended_by_accounting(account, current)):
        told = None if ended_before_it_began(folder, ended) else cause
        return ended, told or f"Slurm: {account.state} ({account.exit_code})", account.node
    assert folder.submission is not None
    if time.time() - folder.submission.time < _LAG_S:
        return RunState.PENDING, None, None
    if account is not None and account.state in _NOT_ENDED and time.time() - _last_sign(folder) < _ACCOUNTING_LAG_S:
        return RunState.UNKNOWN, f"it has left the queue, and sacct still says {account.state}: ask again", account.node
    if account is None and current is None and array_of(job_id) in view.accounted:
        # An element has a row of its own once it begins. Cancelled before, it has none, or the array has one for it:
        # `7` or `7_[0-4%2]` (22.05).
        return RunState.CANCELLED, "cancelled before it began", None
    # Over, and not by DONE. Without accounting nobody can say whether it crashed or was cancelled while it waited,
    # so nothing brings it back unasked: --retry-failed does.
    return RunState.FAILED, "gone from the queue without a word, and sacct does not know the job", None


def _last_sign(folder: RunFolder) -> float:
    """When the run last wrote anything, seconds since the epoch; 0.0 if it never did."""
    beat = folder.heartbeat.get("time", 0.0)
    return float(max(beat, folder.current.start_time if folder.current else 0.0))


def _ended_by_accounting(account: AccountingEntry, current: Attempt | None) -> RunState | None:
    if account.state == "COMPLETED":
        # Left within the grace period after a save that the journal has; or some code said exit(0) for itself.
        return RunState.PREEMPTED if current is not None and current.has_ended else RunState.FAILED
    if account.state == "FAILED" and _was_interrupted(account.exit_code, current):
        return RunState.PREEMPTED
    return _ENDED.get(account.state)


def _was_interrupted(exit_code: str, current: Attempt | None) -> bool:
    """True if what Slurm calls FAILED says nothing against the run: the next submit brings it back."""
    if exit_code in _SHELL_KILLED:
        return True
    if current is None:
        return exit_code in _STOP_EXIT_CODES  # stopped before Python had its handlers: nothing ran, nothing failed
    # Saved, and then nobody could requeue it. Another code is of a later start, that ended before its worker began.
    return current.state is RunState.REQUEUED and exit_code in (_LEFT_EXIT_CODES | _STOP_EXIT_CODES)


# A signal of the batch shell itself, by `scancel --batch`, `--full`, an epilog or a killer: it is not the run's doing.
_SHELL_KILLED = {"0:9", "0:12", "0:15"}
# SIGTERM and SIGUSR2 as Slurm shows them: the batch shell's signal, a shell's code, or srun's own way (seen: 15:0).
_STOP_EXIT_CODES = {"0:15", "143:0", "15:0", "0:12", "140:0", "12:0"}
# What a worker leaves with that has saved, also under the codes that replace ours (launch/plan.py), and what srun says
# when it ended the other ranks.
_LEFT_EXIT_CODES = {f"{code}:0" for code in (74, 75, *range(79, 126), 137, 9)}


def ended_before_it_began(folder: RunFolder, state: RunState) -> bool:
    """True if a job failed whose worker wrote nothing: its set-up lines, the environment, or the frozen code."""
    on_slurm = folder.submission is not None and folder.submission.executor == "slurm"
    current = folder.current
    return on_slurm and state is RunState.FAILED and (current is None or current.state is RunState.REQUEUED)


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
