"""State of a run: from what the run wrote itself, then from what Slurm says or once said, never a guess.

`read_folder` reads the run's own files, and `ask_slurm` asks once for all runs of a sweep; `decide` combines both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpc_trainer.errors import HpcTrainerError, RunStateError, SlurmError, UntrustedFileError
from hpc_trainer.record import doubts
from hpc_trainer.record.doubts import Doubt
from hpc_trainer.record.doubts import untold_job as untold_job_doubt
from hpc_trainer.record.files import append_lines, make_folder, write_atomic
from hpc_trainer.record.holds import read_hold
from hpc_trainer.record.journal import Attempt, Journal, read_heartbeat, read_result
from hpc_trainer.record.layout import AFTER, HEARTBEAT, RESULT, SUBMISSIONS, RunPaths, SweepPaths, journals_in
from hpc_trainer.record.processes import is_alive
from hpc_trainer.record.reading import (
    Faults,
    Kinds,
    as_text,
    as_time,
    cache_age_s,
    check_place,
    check_trusted,
    exists,
    is_ours,
    is_there,
    list_folder,
    look_anew,
    parsed_lines,
    read_json,
    seal,
    typed,
)
from hpc_trainer.record.states import AFTER_CANCELLED, AFTER_HELD, CANCEL, DONE, ENDS, HOLD, POOL, UNEXPLAINED, RunState
from hpc_trainer.record.submissions import (
    SUCCESSOR,
    Job,
    Ledger,
    Submission,
    Waiting,
    newest_in,
    read_ledger,
    winner_of,
)
from hpc_trainer.record.turns import Turn, pool_is_alive, pool_job, slot_failure
from hpc_trainer.slurm import terms
from hpc_trainer.slurm.commands import cluster_name
from hpc_trainer.slurm.queue import (
    CLOCKS_S,
    LATE_ROW_S,
    AccountingEntry,
    JobRow,
    QueueEntry,
    array_of,
    find_by_uuid,
    is_of,
    read_accounting,
    read_queue,
)
from hpc_trainer.slurm.terms import says_held


@dataclass(slots=True, kw_only=True)  # not frozen: 10,000 instances would take 25 ms more
class RunFolder:
    """Content of one run's own files. Treat it as read-only."""

    paths: RunPaths
    submission: Submission | None
    """The newest submission: an array of the sweep, or a successor job that an attempt submitted."""
    element: int
    """The run's index in `submission`."""
    job_id: str | None
    attempts: list[Attempt]
    heartbeat: Mapping[str, Any]
    result: Mapping[str, Any]
    markers: frozenset[str]
    waits: str | None
    """Reason why the run waits in the sweep's own queue; None if it does not wait there."""
    faults: tuple[str, ...] = ()
    """Faults of the run's files that cannot be read."""
    doubt: str | None = None
    """Reason to suspect a later attempt or a later end than those that were read: lost or unreadable records."""
    unread: str | None = None
    """Reason why the heartbeat could not be read just now; the run may be alive."""
    is_empty: bool = False
    """True if the run has no folder, or the folder is empty."""
    untold_job: str | None = None
    """The job of the newest attempt, if it is newer than `submission` and no submission records it."""
    rivals: tuple[Job, ...] = ()
    """The run's jobs on other hardware, which were submitted together with `submission` (`hardware=first:a,b`)."""
    is_claimed: bool = False
    """True if the job of `submission` has claimed the run, so that `rivals` end without starting it."""
    removed: str | None = None
    """Removal of the run in words, if `rm` removed it and it was not submitted since (record/submissions.py)."""
    held: str | None = None
    """Hold of the run or its sweep in words: by whom, since when and why (record/holds.py); None if there is none."""
    turn: Turn | None = None
    """The slot of a pool that has the run; `job_id` is the slot's job. None if no slot has it, or it is in no pool."""
    decision: Mapping[str, Any] = field(default_factory=dict)
    """Decision of a run that follows others and has not begun (`record/chain.py`); {} if it has made none."""

    @property
    def waits_for(self) -> str | None:
        """Reason why a run that follows others has not begun; None if there is none."""
        if self.attempts or not self.decision.get("reason"):
            return None
        is_taken_back = self.decision.get("decision") == AFTER_CANCELLED and CANCEL not in self.markers  # by `retry`
        return None if is_taken_back else str(self.decision["reason"])

    @property
    def newest(self) -> Attempt | None:
        """The newest attempt."""
        return self.attempts[-1] if self.attempts else None

    @property
    def current(self) -> Attempt | None:
        """The newest attempt, if it belongs to the newest submission (or the run was never submitted)."""
        newest = self.newest
        if newest is None or self.submission is None:
            return newest
        if self.is_in_pool:
            is_its = newest.executor == POOL and array_of(newest.job_id) == pool_job(self.submission)
        elif self.is_on_slurm:
            is_its = newest.job_id == self.job_id and newest.start_time > self.submission.time - CLOCKS_S
        elif self.element < len(self.submission.num_attempts):  # not by time: clocks of login nodes differ
            is_its = len(self.attempts) > self.submission.num_attempts[self.element]
        else:
            is_its = newest.start_time >= self.submission.time
        return newest if is_its else None

    @property
    def uuid(self) -> str:
        """Identifier that the run's job carries; "" if the run was never submitted."""
        return self.submission.uuid if self.submission is not None else ""

    @property
    def job_key(self) -> tuple[str, str]:
        """Key that identifies the run's job; Slurm reuses ids, so the id alone does not."""
        return self.uuid, self.job_id or ""

    @property
    def is_on_slurm(self) -> bool:
        """True if the latest submission went to Slurm."""
        return self.submission is not None and self.submission.executor == "slurm"

    @property
    def is_in_pool(self) -> bool:
        """True if the latest submission is a pool, whose slots share the run's job with other runs."""
        return self.submission is not None and self.submission.is_pool

    @property
    def needs_scheduler(self) -> bool:
        """True if only Slurm knows whether this run is alive."""
        return self.is_on_slurm and DONE not in self.markers and self.waits is None and self.removed is None

    @property
    def is_settled(self) -> bool:
        """True if the run's files record its end, which no answer of a scheduler can change."""
        return DONE in self.markers or self.removed is not None or journal_settles(self.current)


def read_folder(
    paths: RunPaths, latest: tuple[Submission, int] | None, waiting: Waiting | None, jobs: Collection[str] = (),
    names: Collection[str] | None = None, *, is_listed: bool = False, rivals: Sequence[Job] = (),
    turn: Turn | None = None, held: str | None = None,
) -> RunFolder:  # fmt: skip
    """Read the folder of a run; damaged files are reported in `faults`.

    The folder is listed first, so that its names are those of the server and only existing files are opened.

    Args:
        paths: paths of the run.
        latest: the run's newest submission among the sweep's submissions, and the run's index in it.
        waiting: why and since when the run waits in the sweep's own queue; None if it does not.
        jobs: ids of all arrays in the sweep's submissions.
        names: the names in the folder, if it was listed just now.
        is_listed: True if a listing of the sweep's folder showed this folder a moment ago. If the folder is missing
            now, the state of the run is unknown.
        rivals: all jobs of the newest submission, if it went to several shapes.
        held: who holds the whole sweep.
        turn: the slot that has the run, if the newest submission is a pool.
    """
    faults, journal_faults, unseen = Faults(), Faults(), Faults()
    listed = list_folder(paths.place, unseen) if names is None else names
    if is_listed and listed == [] and not _is_still_there(paths, unseen):
        unseen.append("its folder was there a moment ago and is not now: ask again in a minute")
    present = _EVERYTHING if listed is None else listed
    heartbeat = read_heartbeat(paths.at(HEARTBEAT), faults) if HEARTBEAT in present else {}
    unread = faults[0] if faults.refusal is not None else None
    book = _read_book(paths) if SUBMISSIONS in present else Ledger()
    story = Journal(paths).read_story(journal_faults, listed)
    if listed is not None and DONE not in present and story.attempts and story.attempts[-1].has_ended:
        # DONE is written before the journal's end, and the folder was listed before the journal was read.
        present = list_folder(paths.place, unseen) or present
    markers = frozenset(name for name in _MARKERS if name in present)
    if listed is None:  # the folder may be entered but not listed
        markers = frozenset(name for name in markers if exists(paths.at(name), unseen))
    lost = _lost_attempt(paths, story.attempts, heartbeat, unseen)
    if listed and not journal_faults:
        lost += _not_seen_yet(paths, listed, story.attempts)
    doubts = [*book.damage, *(() if story.is_whole else journal_faults), *lost, *unseen]
    faults += [*book.damage, *journal_faults, *lost, *unseen]
    if latest is None and book.submissions:
        waiting = None  # the array that these successors follow took the run out of the queue, and its line is lost
    winner = winner_of(paths, rivals, {attempt.job_id for attempt in story.attempts}) if rivals else None
    latest = winner or latest
    submission, index = newest_in(book, latest) or (None, 0)
    own_jobs = {submission.job_id for submission in book.submissions if submission.job_id is not None}
    all_jobs = {*jobs, *own_jobs} if own_jobs else jobs  # copied only if there is something to add
    is_unknown = is_of_unknown_job(story.attempts, submission, all_jobs)
    if waiting is not None and (is_unknown or lost) and waiting.time < _last_life(paths, story.attempts, heartbeat):
        waiting = None  # the array that the attempt ran in also took the run out of the queue
    untold_job = None
    if is_unknown and submission is None:
        submission = submission_told_by(story.attempts[-1])
    elif is_unknown:
        untold_job = story.attempts[-1].job_id
        doubts = doubts or [untold_job_doubt(untold_job)]
    return RunFolder(
        paths=paths,
        submission=submission,
        element=index,
        job_id=job_of_run(submission, index, turn),
        attempts=story.attempts,
        heartbeat=heartbeat,
        result=read_result(paths.at(RESULT), faults) if DONE in markers else {},
        markers=markers,
        waits=None if waiting is None else waiting.reason,
        faults=tuple(f"{paths.run_id}: {fault}" for fault in faults),
        doubt=doubts[0] if doubts else None,
        unread=unread,
        is_empty=listed == [],
        untold_job=untold_job,
        rivals=tuple(rival for rival in rivals if latest is None or rival[0].uuid != latest[0].uuid),
        is_claimed=winner is not None,
        held=read_hold(paths.marker(HOLD), unseen).words if HOLD in markers else held,
        turn=turn,
        decision=(read_json(paths.at(AFTER), faults) or {}) if AFTER in present and not story.attempts else {},
    )


def job_of_run(submission: Submission | None, index: int, turn: Turn | None) -> str | None:
    """Return the id of a run's own job, or of the slot that has it; None if it has none (yet)."""
    if submission is None:
        return None
    if submission.is_pool:
        return None if turn is None else turn.holder.job_id
    return submission.element_id(index)


def _is_still_there(paths: RunPaths, faults: Faults) -> bool:
    """Return True if the run's folder exists; if the file system fails, add a fault and return True."""
    try:
        return is_there(paths.place)
    except OSError as error:
        faults.refuse(paths.place, error)
        return True


_MARKERS = (DONE, CANCEL, HOLD)
_EVERYTHING = (HEARTBEAT, SUBMISSIONS, AFTER, *_MARKERS)


def _not_seen_yet(paths: RunPaths, listed: Collection[str], attempts: list[Attempt]) -> list[str]:
    """Return why the journals may hold more: the folder lists a journal that this client has cached as missing."""
    number, name = max(journals_in(listed), default=(-1, ""))
    newest = attempts[-1].attempt if attempts else -2
    is_hidden = bool(name) and newest < number and exists(paths.at(name), Faults()) is False
    return [f"{name} is there, and cannot be opened here yet: ask again in a minute"] if is_hidden else []


def unstarted_folder(
    paths: RunPaths, latest: tuple[Submission, int] | None, waits: str | None, rivals: Sequence[Job] = (),
    turn: Turn | None = None, removed: str | None = None, held: str | None = None,
) -> RunFolder:  # fmt: skip
    """Return the RunFolder of a run that has no folder yet, or that is removed; arguments as for `read_folder`."""
    submission, index = latest or (None, 0)
    return RunFolder(
        paths=paths, submission=submission, element=index, job_id=job_of_run(submission, index, turn), turn=turn,
        attempts=[], heartbeat={}, result={}, markers=frozenset(), waits=waits, is_empty=True,
        rivals=tuple(rival for rival in rivals if rival[0] is not submission), removed=removed, held=held,
    )  # fmt: skip


def _read_book(paths: RunPaths) -> Ledger:
    """Read the run's own submissions.jsonl; a file that others may have changed affects this run only."""
    try:
        return read_ledger(paths, may_fail=True)
    except UntrustedFileError as error:
        return Ledger(damage=(str(error),))


def _lost_attempt(paths: RunPaths, attempts: list[Attempt], heartbeat: Mapping[str, Any], unseen: Faults) -> list[str]:
    """Describe an attempt that left a sign of life or an error but no journal line; return [] if there is none."""
    number = attempts[-1].attempt + 1 if attempts else 0
    if heartbeat.get("attempt", -1) >= number:
        return [_lost_journal(paths, heartbeat["attempt"])]
    return [_lost_journal(paths, 0)] if not attempts and exists(paths.failure(0), unseen) else []


def _lost_journal(paths: RunPaths, attempt: int) -> str:
    return f"{paths.journal(attempt).name} has lost attempt {attempt}"


def _last_life(paths: RunPaths, attempts: list[Attempt], heartbeat: Mapping[str, Any]) -> float:
    """Return a late estimate of the last sign of life, in seconds since the epoch, because clocks differ."""
    times = [attempt.start_time for attempt in attempts[-1:]]
    with contextlib.suppress(OSError):
        times.append(paths.failure(0).stat().st_mtime)
    return max([float(heartbeat.get("time", 0.0)), *times]) + CLOCKS_S


def journal_settles(attempt: Attempt | None) -> bool:
    if attempt is None or not attempt.has_ended or attempt.cause == UNEXPLAINED:
        return False
    return attempt.state is not RunState.REQUEUED


def is_of_unknown_job(attempts: list[Attempt], latest: Submission | None, jobs: Collection[str]) -> bool:
    """Return True if the newest attempt began after the newest submission, in a job that no submission names.

    Args:
        attempts: all attempts of the run, in order.
        latest: the run's newest submission; None if there is none.
        jobs: ids of the arrays and jobs that submissions name.
    """
    newest = attempts[-1] if attempts else None
    if newest is None or newest.executor != "slurm" or array_of(newest.job_id) in jobs:
        return False
    return latest is None or (latest.job_id is not None and latest.time <= newest.start_time)


def submission_told_by(attempt: Attempt) -> Submission:
    """Return a substitute for the lost submission of a job, from the attempt that names the job."""
    return Submission(
        uuid="", executor="slurm", hardware="?", run_ids=(), time=attempt.start_time, kind=SUCCESSOR,
        job_id=attempt.job_id,
    )  # fmt: skip


End = tuple[RunState, str | None, str | None]
"""State, cause and node of a run."""


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """Answers of the queue and of the accounting, asked once for all runs; None if there was no answer.

    Slurm reuses ids, so a job or a row counts as a run's only if its comment or name agrees.
    """

    queue: Mapping[str, QueueEntry] | None
    accounting: Mapping[str, AccountingEntry] | None
    remembered: Mapping[tuple[str, str], tuple[End, float]] = field(default_factory=dict)
    """(uuid, job id) -> end that the accounting reported before, and when: it may have forgotten the job since."""
    unread: str | None = None
    """Reason why `remembered` could not be read just now."""
    asked_time: float = field(default_factory=time.time)
    """Seconds since the epoch before the first question; anything later may be missing in the answers."""
    cluster: str | None = None
    """Name that the answering cluster gives itself; None if it was not asked for, or the cluster did not say."""
    unnamed: str | None = None
    """Reason why the cluster did not give its name, if it was asked."""
    cache_age_s: float = 0.0
    """Seconds for which this machine may show old content of the sweep's folder (`reading.cache_age_s`)."""
    _arrays: dict[str, list[AccountingEntry]] = field(init=False, default_factory=dict)
    _own: dict[tuple[str, str], list[AccountingEntry]] = field(init=False, default_factory=dict)
    _slots: dict[str, list[QueueEntry]] = field(init=False, default_factory=dict)
    _living: dict[str, bool | None] = field(init=False, default_factory=dict)
    _failures: dict[str, str | None] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for row in (self.accounting or {}).values():
            self._arrays.setdefault(array_of(row.job_id), []).append(row)

    def job_of(self, folder: RunFolder) -> QueueEntry | None:
        """Return the run's job in the queue; None if the queue has no such job."""
        if not self.queue:
            return None
        entry = self.queue.get(folder.job_id or "")
        return entry if entry is not None and _is_its(entry, folder) else None

    def has_foreign_job(self, folder: RunFolder) -> bool:
        """Return True if another job in the queue now has the id of the run's job."""
        return (folder.job_id or "") in (self.queue or {}) and self.job_of(folder) is None

    def row_of(self, folder: RunFolder) -> AccountingEntry | None:
        """Return the accounting's row for the run's job; None if there is none."""
        row = (self.accounting or {}).get(folder.job_id or "")
        return row if row is not None and _is_its(row, folder) else None

    def rows_of_array(self, folder: RunFolder) -> list[AccountingEntry]:
        """Return all rows that the accounting has for the run's array."""
        key = (array_of(folder.job_id or ""), folder.uuid)
        if key not in self._own:
            self._own[key] = [row for row in self._arrays.get(key[0], []) if _is_its(row, folder)]
        return self._own[key]

    def knows(self, folder: RunFolder) -> bool:
        """Return True if the queue has the run's job, or the accounting has rows of its array."""
        return self.job_of(folder) is not None or bool(self.rows_of_array(folder))

    def elsewhere(self, folder: RunFolder) -> str | None:
        """Return why the run's job may be on another cluster, as text after "it was"; None if it is not elsewhere."""
        there = folder.submission.cluster if folder.submission and folder.waits is None else None
        if there in (None, self.cluster) or self.knows(folder):
            return None
        if self.cluster is not None:
            return f"submitted on the cluster {there}, and this is {self.cluster}: ask there"
        return f"submitted on the cluster {there}, and {self.unnamed}: ask again, or there" if self.unnamed else None

    def is_young(self, folder: RunFolder) -> bool:
        """Return True if the run's job may be too young to show in Slurm's answers."""
        return folder.submission is not None and self.asked_time - folder.submission.time < _LAG_S

    def slots_of(self, folder: RunFolder) -> list[QueueEntry]:
        """Return the slots of the run's pool that are in the queue."""
        return [] if folder.submission is None else self.slots_of_pool(folder.submission)

    def slots_of_pool(self, pool: Submission) -> list[QueueEntry]:
        """Return the slots of a pool that are in the queue."""
        key = pool_job(pool)
        if key not in self._slots:
            entries = (entry for entry in (self.queue or {}).values() if array_of(entry.job_id) == key)
            self._slots[key] = [entry for entry in entries if is_of(entry, pool.uuid)]
        return self._slots[key]

    def has_living_slot(self, folder: RunFolder) -> bool | None:
        """Return True if the run's local pool has a living process; None if this machine cannot know."""
        if folder.uuid not in self._living and folder.submission is not None:
            sweep = SweepPaths(folder.paths.folder.parent)
            self._living[folder.uuid] = pool_is_alive(sweep, folder.submission)
        return self._living.get(folder.uuid)

    def slot_failure(self, folder: RunFolder) -> str | None:
        """Return why slots of the run's pool could not begin, as text; None if none failed."""
        if folder.uuid not in self._failures and folder.submission is not None:
            self._failures[folder.uuid] = slot_failure(SweepPaths(folder.paths.folder.parent), folder.submission)
        return self._failures.get(folder.uuid)

    def own_job(self, folder: RunFolder) -> str | None:
        """Return the id of the run's job if the job is certainly the run's: only such a job may get a signal."""
        if folder.is_in_pool:
            return None  # other runs are in the same job
        if self.queue is None or folder.waits is not None or not folder.is_on_slurm:
            return None
        if self.job_of(folder) is not None:
            return folder.job_id
        untold = self.queue.get(folder.untold_job or "")
        if untold is not None and _is_of_sweep(untold, folder):
            return folder.untold_job
        # This cluster's sbatch returned this id moments ago: no other job can have it.
        is_here = folder.submission is not None and folder.submission.cluster == self.cluster is not None
        return folder.job_id if is_here and self.is_young(folder) and not self.has_foreign_job(folder) else None

    def rival_jobs(self, folder: RunFolder) -> list[tuple[Submission, str]]:
        """Return the run's jobs on other hardware that the queue shows, each with its submission."""
        as_own = (_with_job(folder, rival, self.queue or {}) for rival in folder.rivals)
        jobs = ((folder.submission, self.own_job(folder)) for folder in as_own)
        return [(submission, job_id) for submission, job_id in jobs if submission is not None and job_id is not None]


def _is_its(entry: JobRow, folder: RunFolder) -> bool:
    """Return True if an entry with the id of the run's job belongs to the run's job."""
    if folder.submission is not None and not folder.uuid:  # the line with the uuid is lost: compare the sweep's name
        return _is_of_sweep(entry, folder)
    return is_of(entry, folder.uuid)


def _is_of_sweep(entry: JobRow, folder: RunFolder) -> bool:
    """Return True if the job's name is one that this run's sweep gives (`slurm.queue.job_name`)."""
    return re.fullmatch(rf"{re.escape(folder.paths.folder.parent.name)}-[0-9a-f]{{8}}", entry.name) is not None


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
        return _is_in_queue(folder, view)
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
        return current.state or RunState.PREEMPTED, view.slot_failure(folder) or current.cause, None
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
        return current.state or RunState.PREEMPTED, view.slot_failure(folder) or current.cause, None
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


# Seconds for which a new job may be missing in squeue and sacct.
_LAG_S = 30.0

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
    if _is_cancelled_unbegun(folder, view):
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


def _is_cancelled_unbegun(folder: RunFolder, view: SchedulerView) -> bool:
    """Return True if the run's job never began, its array is known to the accounting, and it has no row of its own.

    An element has its own row once it begins. If it is cancelled before, it has none, or the array has one row for it:
    `7` or `7_[0-4%2]` (22.05).
    """
    return folder.current is None and view.row_of(folder) is None and bool(view.rows_of_array(folder))


def _row_before_it_began(folder: RunFolder, view: SchedulerView) -> AccountingEntry | None:
    """Return the accounting's row for waiting elements of the run's array if the run may be among them, else None."""
    if folder.current is not None:
        return None
    covering = (row for row in view.rows_of_array(folder) if row.may_cover(folder.element))
    return next((row for row in covering if row.state in terms.NOT_ENDED), None)


def last_sign(folder: RunFolder) -> float:
    """Return when the run last gave a sign of life, in seconds since the epoch; 0.0 if it never did."""
    beat = folder.heartbeat.get("time", 0.0)
    return float(max(beat, folder.current.start_time if folder.current else 0.0))


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


# Ends that a sweep remembers: finished.json and ends.jsonl.
#
# finished.json names the runs that are done, so that a look at 10,000 of them need not open 10,000 folders. ends.jsonl
# keeps what Slurm's accounting once said of a run's end: accounting forgets jobs, and a cancelled run stays cancelled.

# With fewer runs, opening the folders is as cheap as keeping the file.
_LEAST_RUNS = 50

# The file is written when more than this share of it is new: 10,000 runs write it some 45 times.
_NEW_SHARE = 0.1


def read_finished(sweep: SweepPaths) -> Mapping[str, str]:
    """Return run id -> uuid of the submission that finished it; {} if there is no file that can be trusted."""
    try:
        record = read_json(sweep.finished, Faults()) if is_ours(sweep.finished, Faults()) else None
    except HpcTrainerError:
        return {}
    runs = (record or {}).get("runs")
    if not isinstance(runs, dict):
        return {}
    return {run_id: uuid for run_id, uuid in runs.items() if isinstance(uuid, str) and uuid}


def record_finished(sweep: SweepPaths, recorded: Mapping[str, str], finished: Mapping[str, str]) -> None:
    """Replace the file if enough runs have been found finished that it does not name.

    Never raises: after a failure, such as a full disk or a user who may only read, the next command takes longer.

    Args:
        sweep: the sweep.
        recorded: the result of `read_finished`.
        finished: run id -> uuid of the newest submission, for every run that was found to be done.
    """
    runs = {run_id: uuid for run_id, uuid in finished.items() if uuid}
    num_new = sum(recorded.get(run_id) != uuid for run_id, uuid in runs.items())
    if len(runs) < _LEAST_RUNS or num_new <= _NEW_SHARE * len(recorded):
        return
    with contextlib.suppress(OSError, HpcTrainerError):
        if sweep.folder.stat().st_uid != os.getuid():
            return
        check_place(sweep.folder)  # as every command does before it writes into a folder that others may write to
        write_atomic(sweep.finished, f"{seal(json.dumps({'runs': runs}))}\n", sync=False)
        sweep.finished.chmod(sweep.specs.stat().st_mode & 0o666)


_END: Kinds = {"uuid": as_text, "job_id": as_text, "state": RunState, "cause": as_text, "time": as_time}


def read_ends(sweep: SweepPaths, faults: Faults) -> Mapping[tuple[str, str], tuple[End, float]]:
    """Return `RunFolder.job_key` -> (the job's last known end, when it was recorded); {} if there is none.

    Unreadable lines and files become faults.
    """
    ends: dict[tuple[str, str], tuple[End, float]] = {}
    for path in [sweep.old_ends, *(sweep.ends / name for name in list_folder(sweep.ends, faults) or ())]:
        try:
            if path.suffix == ".jsonl" and is_ours(path, faults):
                for key, end in parsed_lines(path, _parse, faults):
                    if key not in ends or ends[key][1] <= end[1]:
                        ends[key] = end
        except HpcTrainerError as error:  # noqa: PERF203  (one file for each host)
            faults.append(f"{path.name} is not read: {error}")
    return ends


def _parse(record: Mapping[str, Any]) -> tuple[tuple[str, str], tuple[End, float]]:
    """Return the job key, the end and its time from one line.

    Raises:
        KeyError, ValueError: this module does not write such a record.
    """
    values = typed(record, _END, {"node": as_text})
    return (values["uuid"], values["job_id"]), ((values["state"], values["cause"], values.get("node")), values["time"])


def record_ends(sweep: SweepPaths, view: SchedulerView, decided: Iterable[tuple[RunFolder, End]]) -> None:
    """Record the ends that the accounting has just reported.

    Never raises: a full disk, missing rights, or something else in the file's place must not matter.
    """
    news: list[Mapping[str, Any]] = [
        {
            "uuid": folder.uuid,
            "job_id": folder.job_id,
            "state": state,
            "cause": cause,
            "node": node,
            "time": time.time(),
        }
        for folder, (state, cause, node) in decided
        if _is_told_by_slurm(folder, (state, cause, node), view)
        and view.remembered.get(folder.job_key, (None,))[0] != (state, cause, node)
    ]
    with contextlib.suppress(OSError, HpcTrainerError):
        if news and sweep.folder.stat().st_uid == os.getuid():
            check_place(sweep.folder)
            mode = sweep.specs.stat().st_mode
            path = sweep.ends_of_this_host
            is_new = not is_there(path)
            if is_new:
                make_folder(sweep.ends)
                sweep.ends.chmod(mode & 0o666 | (mode & 0o444) >> 2)  # users who may read may list
            for place in (sweep.ends, *([] if is_new else [path])):
                check_trusted(place)  # otherwise our line would make another user's file look like ours
            append_lines(path, news, sealed=True)
            if is_new:
                path.chmod(mode & 0o666)


def _is_told_by_slurm(folder: RunFolder, end: End, view: SchedulerView) -> bool:
    state, cause, _ = end
    is_over = not state.is_active and state not in (RunState.NEW, RunState.COMPLETED)
    if not is_over or cause is None or folder.job_id is None or view.queue is None or view.accounting is None:
        return False
    if folder.is_in_pool or folder.waits is not None or CANCEL in folder.markers or journal_settles(folder.current):
        return False
    # A job that neither the queue nor the accounting knows is FAILED too, but is not recorded.
    return view.job_of(folder) is None and (state is not RunState.FAILED or view.row_of(folder) is not None)


def ask_slurm(
    sweep: SweepPaths, folders: dict[str, RunFolder], read: Callable[[str], RunFolder], notes: list[str],
    faults: Faults, *, must_ask: bool, is_look: bool, is_second: bool = False,
) -> SchedulerView:  # fmt: skip
    """Return Slurm's answers about these folders; folders of runs that have left the queue are read again and replaced.

    Slurm is asked by one squeue, and by one sacct for runs that have left the queue. If neither knows a job, one
    scontrol asks for the cluster's name. If a missing row is the only sign that a waiting element was cancelled, squeue
    and sacct are asked once more after `LATE_ROW_S`, before the end is recorded.

    Args:
        read: function that reads the folder of a run again.
        notes: gets a note for each question that Slurm did not answer.
        faults: gets a fault for each unreadable record of an end that Slurm reported before.
        must_ask: True if Slurm must be asked for other reasons than these folders.
        is_look: True if no command acts on the answer. Slurm is then not asked if every end is known, because a Slurm
            that does not answer takes 30 s.
        is_second: True if Slurm was asked a moment ago, and some elements were in neither answer.

    Raises:
        RunStateError: the sweep's folder disappeared in the meantime.
    """
    asked = [run_id for run_id, folder in folders.items() if folder.needs_scheduler]
    begin, age_s = time.time(), cache_age_s(sweep.folder)
    damage = Faults()
    remembered = read_ends(sweep, damage) if asked else {}
    faults += () if is_second else damage
    are_over = is_look and all(_is_over(folders[run_id], remembered, begin) for run_id in asked)
    if not must_ask and (are_over or not asked):
        return SchedulerView({}, {}, remembered, cache_age_s=age_s)
    try:
        queue = read_queue()
    except SlurmError as error:
        notes.append(f"squeue did not answer ({error}): states are from the run folders alone.")
        # Markers are written nevertheless, except for runs that are certainly on another cluster.
        named = _with_cluster(
            SchedulerView(None, {}, asked_time=begin, cache_age_s=age_s), [folders[run_id] for run_id in asked]
        )
        return dataclasses.replace(named, unnamed=None)
    view = SchedulerView(queue, {}, asked_time=begin, cache_age_s=age_s)
    _take_rivals(folders, asked, queue)
    _take_found_jobs(folders, asked, queue)
    left = [run_id for run_id in asked if not _is_in_queue(folders[run_id], view) and not folders[run_id].is_settled]
    if left and not look_anew(sweep.folder):  # finds folders of runs that began since the last listing
        raise went_away(sweep)
    for run_id in left:
        folders[run_id] = read(run_id)  # now shows the files that the run wrote at its end
    _take_rivals(folders, left, queue)
    left = [run_id for run_id in left if not folders[run_id].is_settled and not _is_in_queue(folders[run_id], view)]
    try:
        gone = [(_asked_job(folder), folder.submission) for folder in map(folders.__getitem__, left)]
        jobs = {array_of(job_id): submission.time for job_id, submission in gone if job_id and submission}
        rows = read_accounting(jobs, min(jobs.values(), default=begin))
        view = SchedulerView(queue, rows, asked_time=begin, cache_age_s=age_s)
    except SlurmError as error:
        notes.append(f"sacct did not answer ({error}): runs that left the queue are UNKNOWN until it does.")
        view = SchedulerView(queue, None, asked_time=begin, cache_age_s=age_s)
    if left:
        view = dataclasses.replace(view, remembered=remembered, unread=damage[0] if damage.refusal else None)
    if not is_second and any(_rests_on_a_missing_row(folders[run_id], view) for run_id in left):
        time.sleep(LATE_ROW_S)
        return ask_slurm(
            sweep, folders, read, notes, faults, must_ask=must_ask, is_look=is_look, is_second=True
        )  # fmt: skip
    return _with_cluster(view, [folders[run_id] for run_id in left])


def _is_in_queue(folder: RunFolder, view: SchedulerView) -> bool:
    """Return True if the queue has the run's job, or a slot of its pool."""
    return bool(view.slots_of(folder)) if folder.is_in_pool else view.job_of(folder) is not None


def _asked_job(folder: RunFolder) -> str | None:
    """Return the job about which the accounting is asked; for a run of a pool the pool's array."""
    return folder.submission.job_id if folder.is_in_pool and folder.submission else folder.job_id


def _rests_on_a_missing_row(folder: RunFolder, view: SchedulerView) -> bool:
    """Return True if the run counts as cancelled for no other reason than that the accounting has no row for it."""
    if folder.is_in_pool or view.accounting is None or view.is_young(folder) or folder.job_key in view.remembered:
        return False
    if CANCEL in folder.markers or not _is_cancelled_unbegun(folder, view):
        return False
    return not any(row.may_cover(folder.element) for row in view.rows_of_array(folder))


def went_away(sweep: SweepPaths) -> RunStateError:
    """Return the error for a sweep whose folder disappears while it is read."""
    return RunStateError(
        f"{sweep.folder} was there a moment ago and is not now: what its runs do is not known. Nothing was done. Is "
        "its file system mounted? Try again."
    )


def _with_cluster(view: SchedulerView, folders: Iterable[RunFolder]) -> SchedulerView:
    """Return the view with this cluster's name, if a job is not known here and may be on another cluster."""
    if not any(folder.submission and folder.submission.cluster and not view.knows(folder) for folder in folders):
        return view
    try:
        return dataclasses.replace(view, cluster=cluster_name())
    except SlurmError as error:
        return dataclasses.replace(view, unnamed=str(error))


# Seconds after which nobody can requeue an ended job by hand: slurmctld forgets it after MinJobAge, by default 300 s.
OVER_S = CLOCKS_S


def _is_over(folder: RunFolder, remembered: Mapping[tuple[str, str], tuple[End, float]], now: float) -> bool:
    """Return True if it is known, without asking Slurm, that a run has ended and that nothing restarts it."""
    if folder.doubt is not None or folder.untold_job is not None:
        return False
    if CANCEL in folder.markers and (folder.current is None or folder.is_settled):
        return True
    if folder.is_settled and folder.current is not None:
        end_time = folder.current.end_time
    else:
        end_time = remembered[folder.job_key][1] if folder.job_key in remembered else None
        end_time = None if end_time is None or end_time <= last_sign(folder) else end_time
    return end_time is not None and now - end_time > OVER_S


def decide_now(
    run_id: str, folders: dict[str, RunFolder], view: SchedulerView, read: Callable[[str], RunFolder]
) -> End:
    """Return the state of a run; if a run on this machine seems to be over, its folder is read again first."""
    folder = folders[run_id]
    if not folder.is_on_slurm and not folder.is_settled and not decide(folder, view)[0].is_active:
        folders[run_id] = read(run_id)
    return decide(folders[run_id], view)


def _with_job(folder: RunFolder, job: Job, queue: Mapping[str, QueueEntry]) -> RunFolder:
    """Return the folder as if this job were the run's only one; an intent without an answer is looked up."""
    submission, element = job
    if submission.job_id is None and (job_id := find_by_uuid(queue.values(), submission.uuid)) is not None:
        submission = dataclasses.replace(submission, job_id=job_id)
    return dataclasses.replace(folder, submission=submission, element=element, job_id=submission.element_id(element))


def _take_rivals(folders: dict[str, RunFolder], run_ids: Sequence[str], queue: Mapping[str, QueueEntry]) -> None:
    """Replace each run's job by the rival that is nearest to a start, while no job has claimed the run.

    A job at work comes before one that waits, one that waits before one that is held, and each before one that is gone.
    """
    view = SchedulerView(queue, {})

    def place(folder: RunFolder) -> int:
        entry = view.job_of(folder)
        if entry is None:
            return 3
        if entry.state in terms.HAS_NODES:
            return 0
        return 2 if entry.state in terms.HELD or says_held(entry.reason) else 1

    for run_id in run_ids:
        folder = folders[run_id]
        if not folder.rivals or folder.is_claimed or folder.submission is None:
            continue
        jobs = [*folder.rivals, (folder.submission, folder.element)]
        best = min((_with_job(folder, job, queue) for job in jobs), key=place)
        rivals = tuple(job for job in jobs if best.submission is not None and job[0].uuid != best.submission.uuid)
        folders[run_id] = dataclasses.replace(best, rivals=rivals)


def _take_found_jobs(folders: dict[str, RunFolder], run_ids: Sequence[str], queue: Mapping[str, QueueEntry]) -> None:
    """Set the job of each folder that has an intent without an answer, if the queue shows the job."""
    lost = [run_id for run_id in run_ids if _asked_job(folders[run_id]) is None]
    jobs = {uuid: find_by_uuid(queue.values(), uuid) for uuid in {folders[run_id].uuid for run_id in lost}}
    for run_id in lost:
        folder = folders[run_id]
        job_id = jobs[folder.uuid]
        if folder.submission is not None and job_id is not None:
            confirmed = dataclasses.replace(folder.submission, job_id=job_id)
            element = job_of_run(confirmed, folder.element, folder.turn)
            folders[run_id] = dataclasses.replace(folder, submission=confirmed, job_id=element)
