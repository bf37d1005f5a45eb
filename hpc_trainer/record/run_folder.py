"""What a run's own folder says: `read_folder` reads its journal, heartbeat, result and markers into a `RunFolder`.

Damaged files become faults and doubts; nothing is asked of Slurm.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hpc_trainer.errors import RunStateError, UntrustedFileError
from hpc_trainer.record.doubts import untold_job as untold_job_doubt
from hpc_trainer.record.holds import read_hold
from hpc_trainer.record.journal import Attempt, Journal, read_heartbeat, read_result
from hpc_trainer.record.layout import AFTER, HEARTBEAT, RESULT, SUBMISSIONS, RunPaths, SweepPaths, journals_in
from hpc_trainer.record.reading import Faults, exists, is_there, list_folder, read_json
from hpc_trainer.record.states import AFTER_CANCELLED, CANCEL, DONE, HOLD, POOL, UNEXPLAINED, RunState
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
from hpc_trainer.record.turns import Turn, pool_job
from hpc_trainer.slurm.queue import CLOCKS_S, array_of


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
    paths: RunPaths, latest: Job | None, waiting: Waiting | None, jobs: Collection[str] = (),
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
    last_life = functools.partial(_last_life, paths, story.attempts, heartbeat)
    owner = _find_owner(
        paths, story.attempts, book, latest, waiting, jobs, rivals, last_life=last_life, has_lost=bool(lost)
    )
    doubts = [*book.damage, *(() if story.is_whole else journal_faults), *lost, *unseen]
    if owner.untold_job is not None and not doubts:
        doubts = [untold_job_doubt(owner.untold_job)]
    faults += [*book.damage, *journal_faults, *lost, *unseen]
    return RunFolder(
        paths=paths, submission=owner.submission, element=owner.element, untold_job=owner.untold_job,
        job_id=job_of_run(owner.submission, owner.element, turn), rivals=owner.rivals, is_claimed=owner.is_claimed,
        waits=None if owner.waiting is None else owner.waiting.reason,
        attempts=story.attempts, heartbeat=heartbeat, unread=unread, markers=markers, is_empty=listed == [],
        result=read_result(paths.at(RESULT), faults) if DONE in markers else {},
        held=read_hold(paths.marker(HOLD), unseen).words if HOLD in markers else held, turn=turn,
        decision=(read_json(paths.at(AFTER), faults) or {}) if AFTER in present and not story.attempts else {},
        doubt=doubts[0] if doubts else None, faults=tuple(f"{paths.run_id}: {fault}" for fault in faults),
    )  # fmt: skip


def job_of_run(submission: Submission | None, index: int, turn: Turn | None) -> str | None:
    """Return the id of a run's own job, or of the slot that has it; None if it has none (yet)."""
    if submission is None:
        return None
    if submission.is_pool:
        return None if turn is None else turn.holder.job_id
    return submission.element_id(index)


class _Owner(NamedTuple):
    """Submission that has a run, as the files of the run and of its sweep show it; fields as in `RunFolder`."""

    submission: Submission | None
    element: int
    waiting: Waiting | None
    untold_job: str | None
    rivals: tuple[Job, ...]
    is_claimed: bool


def _find_owner(
    paths: RunPaths, attempts: list[Attempt], book: Ledger, latest: Job | None, waiting: Waiting | None,
    jobs: Collection[str], rivals: Sequence[Job], *, last_life: Callable[[], float], has_lost: bool,
) -> _Owner:  # fmt: skip
    """Return the newest submission of a run, and whether the run still waits in the sweep's own queue.

    Args:
        paths: paths of the run.
        attempts: its attempts.
        book: the run's own submissions, of successor jobs.
        latest: as for `read_folder`, like `waiting`, `jobs` and `rivals`.
        waiting: its entry in the sweep's own queue.
        jobs: ids of all arrays in the sweep's submissions.
        rivals: all jobs of the newest submission.
        last_life: the result of `_last_life`, which costs a request.
        has_lost: True if there is a sign of an attempt whose journal lines are lost.
    """
    if latest is None and book.submissions:
        waiting = None  # the array that these successors follow took the run out of the queue, and its line is lost
    winner = winner_of(paths, rivals, {attempt.job_id for attempt in attempts}) if rivals else None
    latest = winner or latest
    submission, element = newest_in(book, latest) or (None, 0)
    own_jobs = {successor.job_id for successor in book.submissions if successor.job_id is not None}
    all_jobs = {*jobs, *own_jobs} if own_jobs else jobs  # copied only if there is something to add
    is_unknown = is_of_unknown_job(attempts, submission, all_jobs)
    if waiting is not None and (is_unknown or has_lost) and waiting.time < last_life():
        waiting = None  # the array that the attempt ran in also took the run out of the queue
    untold_job = attempts[-1].job_id if is_unknown and submission is not None else None
    if is_unknown and submission is None:
        submission = submission_told_by(attempts[-1])
    others = tuple(rival for rival in rivals if latest is None or rival[0].uuid != latest[0].uuid)
    return _Owner(submission, element, waiting, untold_job, others, is_claimed=winner is not None)


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
    paths: RunPaths, latest: Job | None, waits: str | None, rivals: Sequence[Job] = (),
    turn: Turn | None = None, removed: str | None = None, held: str | None = None,
) -> RunFolder:  # fmt: skip
    """Return the RunFolder of a run that has no folder yet, or that is removed; arguments as for `read_folder`."""
    submission, index = latest or (None, 0)
    return RunFolder(
        paths=paths, submission=submission, element=index, job_id=job_of_run(submission, index, turn), turn=turn,
        attempts=[], heartbeat={}, result={}, markers=frozenset(), waits=waits, is_empty=True,
        rivals=tuple([rival for rival in rivals if rival[0] is not submission]), removed=removed, held=held,
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


def last_sign(folder: RunFolder) -> float:
    """Return when the run last gave a sign of life, in seconds since the epoch; 0.0 if it never did."""
    beat = folder.heartbeat.get("time", 0.0)
    return float(max(beat, folder.current.start_time if folder.current else 0.0))


def went_away(sweep: SweepPaths) -> RunStateError:
    """Return the error for a sweep whose folder disappears while it is read."""
    return RunStateError(
        f"{sweep.folder} was there a moment ago and is not now: what its runs do is not known. Nothing was done. Is "
        "its file system mounted? Try again."
    )
