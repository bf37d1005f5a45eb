"""The state of one run: from what it wrote itself, then from what Slurm says, never a guess."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from hpc_trainer.runs.local_process import is_alive
from hpc_trainer.runs.states import CANCEL, DONE, RunState
from hpc_trainer.runtime.decide import UNEXPLAINED
from hpc_trainer.slurm import states
from hpc_trainer.slurm.accounting import AccountingEntry
from hpc_trainer.slurm.queue import JobRow, QueueEntry, array_of, is_of
from hpc_trainer.slurm.reasons import says_held
from hpc_trainer.state import doubts
from hpc_trainer.state.doubts import Doubt
from hpc_trainer.state.journal import Attempt
from hpc_trainer.state.run_folder import RunFolder, journal_settles
from hpc_trainer.state.submissions import SUCCESSOR

End = tuple[RunState, str | None, str | None]
"""State, cause and node of a run."""


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """What the queue and the accounting said, asked once for all runs. None: no answer.

    Ids come again, so a job or a row counts as a run's only if its comment or name says so too.
    """

    queue: Mapping[str, QueueEntry] | None
    accounting: Mapping[str, AccountingEntry] | None
    remembered: Mapping[tuple[str, str], tuple[End, float]] = field(default_factory=dict)
    """(uuid, job id) -> what the accounting said of the job before, and when: it may have forgotten it."""
    unread: str | None = None
    """Why `remembered` was not to be read just now."""
    asked_time: float = field(default_factory=time.time)
    """Seconds since the epoch before the first question: what is younger may not show in the answers."""
    cluster: str | None = None
    """What the cluster that answered calls itself; None if nobody had to know, or it did not say."""
    unnamed: str | None = None
    """Why it did not say, if it was asked and did not."""
    cache_age_s: float = 0.0
    """For how long this machine may show what was in the sweep's folder before (`shared_folder.cache_age_s`)."""
    _arrays: dict[str, list[AccountingEntry]] = field(init=False, default_factory=dict)
    _own: dict[tuple[str, str], list[AccountingEntry]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for row in (self.accounting or {}).values():
            self._arrays.setdefault(array_of(row.job_id), []).append(row)

    def job_of(self, folder: RunFolder) -> QueueEntry | None:
        """The run's job in the queue."""
        if not self.queue:
            return None
        entry = self.queue.get(folder.job_id or "")
        return entry if entry is not None and _is_its(entry, folder) else None

    def has_foreign_job(self, folder: RunFolder) -> bool:
        """True if the id of the run's job is that of another job in the queue."""
        return (folder.job_id or "") in (self.queue or {}) and self.job_of(folder) is None

    def row_of(self, folder: RunFolder) -> AccountingEntry | None:
        """What the accounting says of the run's job."""
        row = (self.accounting or {}).get(folder.job_id or "")
        return row if row is not None and _is_its(row, folder) else None

    def rows_of_array(self, folder: RunFolder) -> list[AccountingEntry]:
        """Everything that the accounting says of the run's array."""
        key = (array_of(folder.job_id or ""), folder.uuid)
        if key not in self._own:
            self._own[key] = [row for row in self._arrays.get(key[0], []) if _is_its(row, folder)]
        return self._own[key]

    def knows(self, folder: RunFolder) -> bool:
        """True if the queue or the accounting has the run's job, or others of its array."""
        return self.job_of(folder) is not None or bool(self.rows_of_array(folder))

    def elsewhere(self, folder: RunFolder) -> str | None:
        """Words after "it was": why the run's job may be on another cluster; None if it is none of another's."""
        there = folder.submission.cluster if folder.submission and folder.waits is None else None
        if there in (None, self.cluster) or self.knows(folder):
            return None
        if self.cluster is not None:
            return f"submitted on the cluster {there}, and this is {self.cluster}: ask there"
        return f"submitted on the cluster {there}, and {self.unnamed}: ask again, or there" if self.unnamed else None

    def is_young(self, folder: RunFolder) -> bool:
        """True if the run's job may be too young to show."""
        return folder.submission is not None and self.asked_time - folder.submission.time < _LAG_S

    def own_job(self, folder: RunFolder) -> str | None:
        """The id of the run's job, if it is surely its own: only such a job may get a signal."""
        if self.queue is None or folder.waits is not None or not folder.is_on_slurm:
            return None
        if self.job_of(folder) is not None:
            return folder.job_id
        untold = self.queue.get(folder.untold_job or "")
        if untold is not None and _is_of_sweep(untold, folder):
            return folder.untold_job
        # This cluster's sbatch has named it moments ago: nobody else can have it.
        is_here = folder.submission is not None and folder.submission.cluster == self.cluster is not None
        return folder.job_id if is_here and self.is_young(folder) and not self.has_foreign_job(folder) else None


def _is_its(entry: JobRow, folder: RunFolder) -> bool:
    """True if a job with the run's id is the run's job."""
    if folder.submission is not None and not folder.uuid:  # the line is lost that had it: by the sweep in its name
        return _is_of_sweep(entry, folder)
    return is_of(entry, folder.uuid)


def _is_of_sweep(entry: JobRow, folder: RunFolder) -> bool:
    """True if the job's name is one that this run's sweep gives (`slurm.queue.job_name`)."""
    return re.fullmatch(rf"{re.escape(folder.paths.folder.parent.name)}-[0-9a-f]{{8}}", entry.name) is not None


def decide(folder: RunFolder, view: SchedulerView) -> End:
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
    if folder.doubt is not None and not (state.is_active and _is_seen_alive(folder, view)):
        # A silent squeue first: the job may be in the queue, and that would settle it.
        is_silent = folder.is_on_slurm and view.queue is None
        state, cause = RunState.UNKNOWN, doubts.silent("squeue") if is_silent else folder.doubt
    if CANCEL in folder.markers and state is not RunState.RUNNING:
        return RunState.CANCELLED, "cancelled", node
    if state is RunState.COMPLETED:  # by the journal, and DONE is gone: the last step's checkpoint will bring it back
        end_time = folder.current.end_time if folder.current is not None else None
        unseen = _unseen_result("COMPLETED", "0:0", end_time, view)
        return (RunState.PREEMPTED, "DONE is missing", node) if unseen is None else (RunState.UNKNOWN, unseen, node)
    return state, cause, node


def _unseen_result(state: str, exit_code: str, end_time: float | None, view: SchedulerView) -> Doubt | None:
    """Return the doubt about an end whose files may be younger than what this machine shows; None if there is none.

    Args:
        state: how the job ended, in Slurm's word.
        exit_code: as sacct prints it.
        end_time: when, seconds since the epoch by Slurm's clock or the node's; None if nobody says.
        view: what was asked, and for how long this machine may show old names.
    """
    if not view.cache_age_s or end_time is None:
        return None
    ended_s, late_s = view.asked_time - end_time, view.cache_age_s + CLOCKS_APART_S
    return doubts.unseen_result(state, exit_code, ended_s, late_s) if ended_s < late_s else None


def _is_seen_alive(folder: RunFolder, view: SchedulerView) -> bool:
    """True if Slurm has the run's job, or its own process lives: a queue that lives may be done with this run."""
    if folder.is_on_slurm:
        return view.job_of(folder) is not None
    return folder.current is not None and bool(is_alive(folder.current.process))


def _decide_local(folder: RunFolder) -> tuple[RunState, str | None]:
    current = folder.current
    if current is not None and current.has_ended:
        return current.state or RunState.UNKNOWN, current.cause
    # The run itself may outlive its queue (that one was killed), and a queue the run's first moments.
    signs = [is_alive(name) for name in (folder.job_id, current.process if current else None) if name]
    if any(signs):
        return (RunState.PENDING if current is None else RunState.RUNNING), None
    if folder.submission is not None and folder.job_id is None:
        return RunState.UNKNOWN, doubts.interrupted()  # its queue may live all the same
    if None in signs:
        return RunState.UNKNOWN, doubts.other_host()
    if current is None:
        # Never started, and the queue that would have started it is gone: submit it again.
        return (RunState.PREEMPTED if folder.attempts else RunState.NEW), None
    # A queue records a death that the run could not record itself; without it nobody will: the machine went down.
    return RunState.NODE_FAIL, "its processes are gone without a word"


# A fresh job may not show in squeue or sacct yet.
_LAG_S = 30.0
# slurmctld keeps what it cannot tell slurmdbd at once, and tells it later. After this a row that does not end is one
# that sacctmgr calls a runaway job.
_ACCOUNTING_LAG_S = 600.0
# Heartbeats come every few seconds.
_ALIVE_S = 60.0
CLOCKS_APART_S = 90.0
"""By so much the clocks of the controller, the nodes and this machine may differ where a moment is compared with
now."""


def _decide_slurm(folder: RunFolder, view: SchedulerView) -> End:
    elsewhere = view.elsewhere(folder)
    if folder.job_id is None:
        # An intent without an answer, and no job in the queue carries its uuid (yet).
        return RunState.UNKNOWN, doubts.other_cluster(elsewhere) if elsewhere else doubts.interrupted(), None
    current = folder.current
    is_successor = folder.submission is not None and folder.submission.kind == SUCCESSOR
    cause = current.cause if current else None
    entry = view.job_of(folder)
    if entry is not None:
        state = _state_in_queue(entry, current, is_successor=is_successor)
        if state is RunState.UNKNOWN:
            return state, doubts.new_word("squeue", entry.state), entry.node or None
        return state, cause if current and current.has_ended else None, entry.node or None
    if journal_settles(current):
        assert current is not None
        return current.state or RunState.UNKNOWN, cause, None
    if elsewhere:  # what Slurm does not know here says nothing
        return RunState.UNKNOWN, doubts.other_cluster(elsewhere), None
    if view.queue is None or view.accounting is None:
        return RunState.UNKNOWN, doubts.silent("squeue" if view.queue is None else "sacct"), None
    account = view.row_of(folder)
    if account is not None and account.state in _ENDED:
        unseen = _unseen_result(account.state, f"({account.exit_code})", account.end_time, view)
        if unseen is not None:
            return RunState.UNKNOWN, unseen, account.node or None
    if account is None and folder.job_key in view.remembered:
        end, told_time = view.remembered[folder.job_key]
        if told_time > last_sign(folder):  # else somebody has requeued it since
            return end
    if current is not None and current.cause == UNEXPLAINED and current.state is not None:
        # It saved and left, and did not hear whether somebody had cancelled it. Slurm's last word counts.
        is_cancelled = account is not None and account.state == states.CANCELLED
        return (RunState.CANCELLED, "cancelled", None) if is_cancelled else (current.state, cause, None)
    if account is not None and account.state == states.COMPLETED and folder.is_empty:
        # A worker makes the folder before all else, and a job without a worker does not end with 0.
        return RunState.GONE, "its folder was deleted after it had ended", account.node
    if account is not None and (ended := _ended_by_accounting(account, current)):
        told = None if ended_before_it_began(folder, ended) else cause
        return ended, told or f"Slurm: {account.state} ({account.exit_code})", account.node
    if view.is_young(folder):
        return RunState.PENDING, None, None
    return _decide_absent(folder, view)


_ENDED = frozenset({states.COMPLETED, *states.ENDS})


def _decide_absent(folder: RunFolder, view: SchedulerView) -> End:
    """The state of a run whose job is not in the queue, and of whose end nobody knows."""
    quiet_s = view.asked_time - last_sign(folder)
    account = view.row_of(folder) or _row_before_it_began(folder, view)
    if account is not None and account.state in states.NOT_ENDED and (
        quiet_s < _ACCOUNTING_LAG_S or account.state == states.PENDING
    ):  # fmt: skip
        return RunState.UNKNOWN, doubts.accounting_behind(account.state), account.node
    if folder.current is None and view.rows_of_array(folder) and view.row_of(folder) is None:
        # An element has a row of its own once it begins. Cancelled before, it has none, or the array has one for it:
        # `7` or `7_[0-4%2]` (22.05).
        return RunState.CANCELLED, "cancelled before it began", None
    if quiet_s < _ALIVE_S + (view.cache_age_s and view.cache_age_s + CLOCKS_APART_S):
        return RunState.UNKNOWN, doubts.alive_without_job(quiet_s), None
    unread = folder.unread or view.unread
    if unread is not None:
        return RunState.UNKNOWN, doubts.unreadable(unread), None
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
    covering = (row for row in view.rows_of_array(folder) if row.may_cover(folder.element))
    return next((row for row in covering if row.state in states.NOT_ENDED), None)


def last_sign(folder: RunFolder) -> float:
    """When the run last wrote anything, seconds since the epoch; 0.0 if it never did."""
    beat = folder.heartbeat.get("time", 0.0)
    return float(max(beat, folder.current.start_time if folder.current else 0.0))


def _ended_by_accounting(account: AccountingEntry, current: Attempt | None) -> RunState | None:
    if account.state == states.COMPLETED:
        # Left within the grace period after a save that the journal has; or some code said exit(0) for itself.
        return RunState.PREEMPTED if current is not None and current.has_ended else RunState.FAILED
    if account.state == states.FAILED and _was_interrupted(account.exit_code, current):
        return RunState.PREEMPTED
    return states.ENDS.get(account.state)


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
    current = folder.current
    return folder.is_on_slurm and state is RunState.FAILED and (current is None or current.state is RunState.REQUEUED)


def _state_in_queue(entry: QueueEntry, current: Attempt | None, *, is_successor: bool) -> RunState:
    if entry.state == states.PENDING:
        if says_held(entry.reason):
            return RunState.HELD
        return RunState.PENDING if current is None and not is_successor else RunState.REQUEUED
    if entry.state in states.HELD:
        return RunState.HELD
    if entry.state in states.TAKEN_BACK:
        return RunState.REQUEUED
    if entry.state in states.HAS_NODES:
        settled = current is not None and journal_settles(current) and entry.state == states.COMPLETING
        return (current.state or RunState.RUNNING) if settled and current else RunState.RUNNING
    return states.ENDS.get(entry.state, RunState.UNKNOWN)
