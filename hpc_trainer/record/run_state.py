"""State of a run: from what the run wrote itself, then from what Slurm says or once said, never a guess.

`decide` combines the run's own files (`run_folder.py`) with Slurm's answers (`slurm_answers.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from hpc_trainer.record import doubts
from hpc_trainer.record.doubts import Doubt
from hpc_trainer.record.journal import Attempt
from hpc_trainer.record.processes import is_alive
from hpc_trainer.record.run_folder import RunFolder, journal_settles, last_sign
from hpc_trainer.record.slurm_answers import SchedulerView
from hpc_trainer.record.states import AFTER_CANCELLED, AFTER_HELD, CANCEL, DONE, ENDS, HOLD, UNEXPLAINED, End, RunState
from hpc_trainer.record.submissions import SUCCESSOR
from hpc_trainer.record.turns import pool_job
from hpc_trainer.slurm import terms
from hpc_trainer.slurm.queue import AccountingEntry, QueueEntry, array_of
from hpc_trainer.slurm.terms import says_held


def decide(folder: RunFolder, view: SchedulerView) -> End:
    """Return the state, cause and node of one run."""
    if folder.removed is not None:
        return RunState.GONE, folder.removed, None
    if DONE in folder.markers:
        return RunState.COMPLETED, str(folder.result.get("cause", "done")), None
    if folder.waits is not None:
        if CANCEL in folder.markers:
            return RunState.CANCELLED, "cancelled", None
        if folder.held is not None:
            return RunState.HELD, folder.held, None
        return RunState.PENDING, folder.waits, None
    if folder.is_in_pool:
        state, cause, node = _decide_pool(folder, view)
    elif folder.is_on_slurm:
        state, cause, node = _decide_slurm(folder, view)
    else:
        (state, cause), node = _decide_local(folder), None
    if folder.doubt is not None and not (state.is_active and _is_seen_alive(folder, view)):
        # A silent squeue comes first: if the job is in the queue, the doubt is resolved.
        is_silent = folder.is_on_slurm and view.queue is None
        state, cause = RunState.UNKNOWN, doubts.silent("squeue") if is_silent else folder.doubt
    if CANCEL in folder.markers and state is not RunState.RUNNING:
        return (
            RunState.CANCELLED,
            folder.waits_for if folder.decision.get("decision") == AFTER_CANCELLED else "cancelled",
            node,
        )
    if _is_held(folder, state, cause):
        return RunState.HELD, folder.held, node
    canaries = folder.submission.canaries if folder.submission is not None else ()
    if state is RunState.HELD and canaries:
        return state, f"waits until its canary has trained and saved: {', '.join(canaries)}", node
    if state is RunState.HELD and _left_for_a_hold(folder) and view.job_of(folder) is None:  # which is no more
        return RunState.PREEMPTED, "released", node
    if state is RunState.COMPLETED:  # by the journal, but DONE is missing: a restart from the last checkpoint makes it
        end_time = folder.current.end_time if folder.current is not None else None
        unseen = _unseen_result("COMPLETED", "0:0", end_time, view)
        return (RunState.PREEMPTED, "DONE is missing", node) if unseen is None else (RunState.UNKNOWN, unseen, node)
    return state, cause, node


def _cause_by_slurm(state: str, exit_code: str) -> str:
    """Return the cause of an end that only Slurm has reported."""
    return f"Slurm: {state} ({exit_code})"


_LEFT_AT_ONCE = _cause_by_slurm(terms.COMPLETED, "0:0")


def _is_held(folder: RunFolder, state: RunState, cause: str | None) -> bool:
    """Return True if a hold keeps the run from starting. The hold of a sweep counts for runs that wait only."""
    if folder.held is None:
        return False
    if state in (RunState.PENDING, RunState.REQUEUED, RunState.HELD):
        return True
    if HOLD not in folder.markers:
        return False
    # A job that began in spite of the hold has left without a word.
    return state.needs_submit or (state is RunState.FAILED and cause == _LEFT_AT_ONCE)


def _left_for_a_hold(folder: RunFolder) -> bool:
    return folder.current is not None and folder.current.state is RunState.HELD


def _unseen_result(state: str, exit_code: str, end_time: float | None, view: SchedulerView) -> Doubt | None:
    """Return the doubt about an end whose files this machine may not show yet; None if there is none.

    Args:
        state: Slurm's term for the end of the job.
        exit_code: the exit code as sacct prints it.
        end_time: end of the job, in seconds since the epoch by Slurm's or the node's clock; None if unknown.
        view: Slurm's answers, and for how long this machine may show old names.
    """
    if not view.cache_age_s or end_time is None:
        return None
    ended_s, late_s = view.asked_time - end_time, view.cache_age_s + CLOCKS_APART_S
    return doubts.unseen_result(state, exit_code, ended_s, late_s) if ended_s < late_s else None


def _is_seen_alive(folder: RunFolder, view: SchedulerView) -> bool:
    """Return True if Slurm has the run's job, or the run's own local process is alive.

    A living local queue is not enough, because it may be done with this run.
    """
    if folder.is_on_slurm:
        return view.is_in_queue(folder)
    return folder.current is not None and bool(is_alive(folder.current.process))


def _decide_pool(folder: RunFolder, view: SchedulerView) -> End:
    """Return the state of a run of a pool: by its own end, then by the slot that has it, then by the other slots."""
    current, submission = folder.current, folder.submission
    assert submission is not None
    is_over = current is not None and current.has_ended and not (current.state is None or current.state.needs_submit)
    if current is not None and is_over and not _left_for_a_hold(folder):
        return current.state or RunState.UNKNOWN, current.cause, None
    if submission.job_id is None:
        return RunState.UNKNOWN, doubts.interrupted(), None
    if not folder.is_on_slurm:
        return _decide_local_pool(folder, view)
    elsewhere = view.elsewhere(folder)
    if elsewhere:
        return RunState.UNKNOWN, doubts.other_cluster(elsewhere), None
    if view.queue is None:
        return RunState.UNKNOWN, doubts.silent("squeue"), None
    slots = view.slots_of(folder)
    own = next((entry for entry in slots if entry.job_id == folder.job_id), None)
    if own is not None and own.state in terms.HAS_NODES and folder.turn is not None:
        return RunState.RUNNING, None, own.node or None
    if slots:
        held = all(entry.state in terms.HELD or says_held(entry.reason) for entry in slots)
        waits = RunState.PENDING if current is None else RunState.REQUEUED
        return RunState.HELD if held else waits, _words_of_slots(slots), None
    # An attempt that has ended shows that Slurm knew the pool: its slots are not too new for squeue, they are gone.
    was_there = current is not None and current.has_ended and current.start_time < view.asked_time
    if view.is_young(folder) and not was_there:
        return RunState.PENDING, None, None
    return _decide_without_slots(folder, view)


def _words_of_slots(slots: Sequence[QueueEntry]) -> str:
    """Return the reason why a run waits in its pool, as text."""
    num_at_work = sum(entry.state in terms.HAS_NODES for entry in slots)
    if num_at_work:
        return f"waits in the pool of job {array_of(slots[0].job_id)}: {num_at_work} of {len(slots)} slot(s) at work"
    return f"waits in the pool of job {array_of(slots[0].job_id)}, whose {len(slots)} slot(s) have not begun"


def _decide_without_slots(folder: RunFolder, view: SchedulerView) -> End:
    """Return the state of a run of a pool that has no slot in the queue any more."""
    current = folder.current
    if view.accounting is None:
        return RunState.UNKNOWN, doubts.silent("sacct"), None
    rows = view.rows_of_array(folder)
    ended_time = max((row.end_time for row in rows if row.end_time is not None), default=None)
    unseen = _unseen_result(terms.COMPLETED, "0:0", ended_time, view)
    if unseen is not None:
        return RunState.UNKNOWN, unseen, None
    if current is None:
        return (RunState.PREEMPTED if folder.attempts else RunState.NEW), view.slot_failure(folder), None
    if current.has_ended:
        return current.state or RunState.PREEMPTED, current.cause, None
    row = view.row_of(folder)
    if row is None or row.state in terms.NOT_ENDED:
        quiet_s = view.asked_time - last_sign(folder)
        if quiet_s < _ALIVE_S + (view.cache_age_s and view.cache_age_s + CLOCKS_APART_S):
            return RunState.UNKNOWN, doubts.alive_without_job(quiet_s), None
        return RunState.NODE_FAIL, "its slot is gone without a recorded end", None
    ended = ENDS.get(row.state)
    state = ended if ended is not None and ended.is_interrupted else RunState.PREEMPTED
    return state, f"its slot ended: {row.state} ({row.exit_code})", row.node


def _decide_local_pool(folder: RunFolder, view: SchedulerView) -> End:
    current, submission = folder.current, folder.submission
    assert submission is not None
    if folder.turn is not None:
        signs = [is_alive(name) for name in (folder.turn.holder.process, current.process if current else None) if name]
        if any(signs):
            return RunState.RUNNING, None, folder.turn.holder.node
        if None in signs:
            return RunState.UNKNOWN, doubts.other_host(), None
    living = view.has_living_slot(folder)
    if living:
        text = f"waits in the pool {pool_job(submission)}"
        return (RunState.PENDING if current is None else RunState.REQUEUED), text, None
    if living is None:
        return RunState.UNKNOWN, doubts.other_host(), None
    if current is None:
        return (RunState.PREEMPTED if folder.attempts else RunState.NEW), view.slot_failure(folder), None
    if current.has_ended:
        return current.state or RunState.PREEMPTED, current.cause, None
    return RunState.NODE_FAIL, "its processes are gone without a recorded end", None


def _decide_local(folder: RunFolder) -> tuple[RunState, str | None]:
    current = folder.current
    if current is not None and current.has_ended:
        return current.state or RunState.UNKNOWN, current.cause
    # The run may outlive its queue if that was killed; the queue is alive before the run has recorded its process.
    signs = [is_alive(name) for name in (folder.job_id, current.process if current else None) if name]
    if any(signs):
        if current is None and folder.waits_for is not None:
            is_held = folder.decision.get("decision") == AFTER_HELD
            return RunState.HELD if is_held else RunState.PENDING, folder.waits_for
        return (RunState.PENDING if current is None else RunState.RUNNING), None
    if folder.submission is not None and folder.job_id is None:
        return RunState.UNKNOWN, doubts.interrupted()  # its queue may be alive nevertheless
    if None in signs:
        return RunState.UNKNOWN, doubts.other_host()
    if current is None:
        # It never started, and the queue that would have started it is gone: submit it again.
        return (RunState.PREEMPTED if folder.attempts else RunState.NEW), None
    # A queue records a death that the run could not record itself. A missing record means that the machine went down.
    return RunState.NODE_FAIL, "its processes are gone without a recorded end"


# slurmctld keeps records that slurmdbd does not accept at once, and sends them later. After this time, in seconds, a
# row without an end is what sacctmgr calls a runaway job.
_ACCOUNTING_LAG_S = 600.0

# Seconds after which a silent run no longer counts as alive; heartbeats come every few seconds.
_ALIVE_S = 60.0
CLOCKS_APART_S = 90.0
"""Largest assumed difference between the clocks of the controller, the nodes and this machine, in seconds."""


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
        waits_for = folder.waits_for if state in (RunState.HELD, RunState.PENDING) else None
        return state, cause if current and current.has_ended else waits_for, entry.node or None
    if journal_settles(current):
        assert current is not None
        return current.state or RunState.UNKNOWN, cause, None
    if elsewhere:  # this cluster's Slurm need not know the job
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
        if told_time > last_sign(folder):  # otherwise a user has requeued the job since
            return end
    if current is not None and current.cause == UNEXPLAINED and current.state is not None:
        # The run saved and exited without learning whether a user had cancelled it. Slurm's final state decides.
        is_cancelled = account is not None and account.state == terms.CANCELLED
        return (RunState.CANCELLED, "cancelled", None) if is_cancelled else (current.state, cause, None)
    if account is not None and account.state == terms.COMPLETED and folder.is_empty:
        # A worker creates the folder before all else, and a job without a worker does not exit with 0.
        return RunState.GONE, "its folder was deleted after it had ended", account.node
    if account is not None and (ended := _ended_by_accounting(account, current)):
        own_cause = None if ended_before_it_began(folder, ended) else cause
        return ended, own_cause or _cause_by_slurm(account.state, account.exit_code), account.node
    if view.is_young(folder):
        return RunState.PENDING, None, None
    return _decide_absent(folder, view)


_ENDED = frozenset({terms.COMPLETED, *ENDS})


def _decide_absent(folder: RunFolder, view: SchedulerView) -> End:
    """Return the state of a run whose job is not in the queue and whose end is not known."""
    quiet_s = view.asked_time - last_sign(folder)
    account = view.row_of(folder) or _row_before_it_began(folder, view)
    if account is not None and account.state in terms.NOT_ENDED and (
        quiet_s < _ACCOUNTING_LAG_S or account.state == terms.PENDING
    ):  # fmt: skip
        return RunState.UNKNOWN, doubts.accounting_behind(account.state), account.node
    if view.is_cancelled_unbegun(folder):
        return RunState.CANCELLED, "cancelled before it began", None
    if quiet_s < _ALIVE_S + (view.cache_age_s and view.cache_age_s + CLOCKS_APART_S):
        return RunState.UNKNOWN, doubts.alive_without_job(quiet_s), None
    unread = folder.unread or view.unread
    if unread is not None:
        return RunState.UNKNOWN, doubts.unreadable(unread), None
    # The run is over but has no DONE. Without accounting nobody can tell a crash from a cancellation while it waited,
    # so the run is not restarted automatically: --retry-failed does it.
    cause = "gone from the queue without a recorded end, and sacct does not know the job"
    if view.has_foreign_job(folder):
        cause += f" (the id belongs to another job now: {folder.job_id})"
    return RunState.FAILED, cause, None


def _row_before_it_began(folder: RunFolder, view: SchedulerView) -> AccountingEntry | None:
    """Return the accounting's row for waiting elements of the run's array if the run may be among them, else None."""
    if folder.current is not None:
        return None
    covering = (row for row in view.rows_of_array(folder) if row.may_cover(folder.element))
    return next((row for row in covering if row.state in terms.NOT_ENDED), None)


def _ended_by_accounting(account: AccountingEntry, current: Attempt | None) -> RunState | None:
    if account.state == terms.COMPLETED:
        # The run exited in the grace period after a save that the journal records, or its own code called exit(0).
        return RunState.PREEMPTED if current is not None and current.has_ended else RunState.FAILED
    if account.state == terms.FAILED and _was_interrupted(account.exit_code, current):
        return RunState.PREEMPTED
    return ENDS.get(account.state)


def _was_interrupted(exit_code: str, current: Attempt | None) -> bool:
    """Return True if Slurm's FAILED does not mean that the run itself failed; the next submit then restarts the run."""
    if exit_code in _SHELL_KILLED:
        return True
    if current is None:
        return exit_code in _STOP_EXIT_CODES  # stopped before Python had its handlers: nothing ran, nothing failed
    # The run saved, and then could not be requeued. Another code is from a later start that ended before its worker
    # began.
    return current.state is RunState.REQUEUED and exit_code in (_LEFT_EXIT_CODES | _STOP_EXIT_CODES)


# Signals to the batch shell itself, from `scancel --batch`, `--full`, an epilog or a killer: not caused by the run.
_SHELL_KILLED = {"0:9", "0:12", "0:15"}

# SIGTERM and SIGUSR2 as Slurm shows them: the batch shell's signal, a shell's code, or srun's own form (seen: 15:0).
_STOP_EXIT_CODES = {"0:15", "143:0", "15:0", "0:12", "140:0", "12:0"}

# Exit codes of a worker that has saved, including codes that replace ours (launch/plan.py), and of srun after it ended
# the other ranks.
_LEFT_EXIT_CODES = {f"{code}:0" for code in (74, 75, *range(79, 126), 137, 9)}


def ended_before_it_began(folder: RunFolder, state: RunState) -> bool:
    """Return True if a job failed before its worker wrote anything: by its set-up lines, environment or frozen code."""
    current = folder.current
    return folder.is_on_slurm and state is RunState.FAILED and (current is None or current.state is RunState.REQUEUED)


def _state_in_queue(entry: QueueEntry, current: Attempt | None, *, is_successor: bool) -> RunState:
    if entry.state == terms.PENDING:
        if says_held(entry.reason):
            return RunState.HELD
        return RunState.PENDING if current is None and not is_successor else RunState.REQUEUED
    if entry.state in terms.HELD:
        return RunState.HELD
    if entry.state in terms.TAKEN_BACK:
        return RunState.REQUEUED
    if entry.state in terms.HAS_NODES:
        settled = current is not None and journal_settles(current) and entry.state == terms.COMPLETING
        return (current.state or RunState.RUNNING) if settled and current else RunState.RUNNING
    return ENDS.get(entry.state, RunState.UNKNOWN)


def decide_now(
    run_id: str, folders: dict[str, RunFolder], view: SchedulerView, read: Callable[[str], RunFolder]
) -> End:
    """Return the state of a run; if a run on this machine seems to be over, its folder is read again first."""
    folder = folders[run_id]
    if not folder.is_on_slurm and not folder.is_settled and not decide(folder, view)[0].is_active:
        folders[run_id] = read(run_id)
    return decide(folders[run_id], view)


def told_by_slurm(view: SchedulerView, decided: Iterable[tuple[RunFolder, End]]) -> Iterator[tuple[RunFolder, End]]:
    """Yield the ends that only the accounting has reported, and that were not recorded before."""
    for folder, end in decided:
        if _is_told_by_slurm(folder, end, view) and view.remembered.get(folder.job_key, (None,))[0] != end:
            yield folder, end


def _is_told_by_slurm(folder: RunFolder, end: End, view: SchedulerView) -> bool:
    state, cause, _ = end
    is_over = not state.is_active and state not in (RunState.NEW, RunState.COMPLETED)
    if not is_over or cause is None or folder.job_id is None or view.queue is None or view.accounting is None:
        return False
    if folder.is_in_pool or folder.waits is not None or CANCEL in folder.markers or journal_settles(folder.current):
        return False
    # A job that neither the queue nor the accounting knows is FAILED too, but is not recorded.
    return view.job_of(folder) is None and (state is not RunState.FAILED or view.row_of(folder) is not None)
