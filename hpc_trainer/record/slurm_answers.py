"""What Slurm says about the runs of a sweep: `ask_slurm` asks once for all of them, and returns a `SchedulerView`.

Slurm reuses the ids of jobs, so each answer is compared with what the run's folder says about its job.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hpc_trainer.errors import SlurmError
from hpc_trainer.record.known_ends import read_ends
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.reading import Faults
from hpc_trainer.record.run_folder import RunFolder, job_of_run, last_sign, went_away
from hpc_trainer.record.shared_folder import cache_age_s, look_anew
from hpc_trainer.record.states import CANCEL, End
from hpc_trainer.record.submissions import Job, Submission
from hpc_trainer.record.turns import pool_is_alive, pool_job, slot_failure
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

# Seconds for which a new job may be missing in squeue and sacct.
_LAG_S = 30.0


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
    """Seconds for which this machine may show old content of the sweep's folder (`shared_folder.cache_age_s`)."""
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

    def is_in_queue(self, folder: RunFolder) -> bool:
        """Return True if the queue has the run's job, or a slot of its pool."""
        return bool(self.slots_of(folder)) if folder.is_in_pool else self.job_of(folder) is not None

    def is_cancelled_unbegun(self, folder: RunFolder) -> bool:
        """Return True if the run's job never began, and the accounting knows its array but has no row of its own.

        An element has its own row once it begins. If it is cancelled before, it has none, or the array has one row for
        it: `7` or `7_[0-4%2]` (22.05).
        """
        return folder.current is None and self.row_of(folder) is None and bool(self.rows_of_array(folder))

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
    submission = folder.submission
    if submission is None:
        return is_of(entry, "")
    # Without a uuid, because its line is lost, the sweep's name is compared.
    return is_of(entry, submission.uuid) if submission.uuid else _is_of_sweep(entry, folder)


def _is_of_sweep(entry: JobRow, folder: RunFolder) -> bool:
    """Return True if the job's name is one that this run's sweep gives (`slurm.queue.job_name`)."""
    return re.fullmatch(rf"{re.escape(folder.paths.folder.parent.name)}-[0-9a-f]{{8}}", entry.name) is not None


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
    left = _read_again(sweep, folders, asked, view, read)
    view = dataclasses.replace(view, accounting=_rows_of([folders[run_id] for run_id in left], begin, notes))
    if left:
        view = dataclasses.replace(view, remembered=remembered, unread=damage[0] if damage.refusal else None)
    if not is_second and any(_rests_on_a_missing_row(folders[run_id], view) for run_id in left):
        time.sleep(LATE_ROW_S)
        return ask_slurm(
            sweep, folders, read, notes, faults, must_ask=must_ask, is_look=is_look, is_second=True
        )  # fmt: skip
    return _with_cluster(view, [folders[run_id] for run_id in left])


def _read_again(
    sweep: SweepPaths, folders: dict[str, RunFolder], run_ids: Sequence[str], view: SchedulerView,
    read: Callable[[str], RunFolder],
) -> list[str]:  # fmt: skip
    """Read the folders of runs that are not in the queue again, and return those whose files do not record the end.

    Raises:
        RunStateError: the sweep's folder disappeared in the meantime.
    """
    queue = view.queue or {}
    _take_rivals(folders, run_ids, queue)
    _take_found_jobs(folders, run_ids, queue)
    left = _not_in_queue(folders, run_ids, view)
    if left and not look_anew(sweep.folder):  # finds folders of runs that began since the last listing
        raise went_away(sweep)
    for run_id in left:
        folders[run_id] = read(run_id)  # now shows the files that the run wrote at its end
    _take_rivals(folders, left, queue)
    return _not_in_queue(folders, left, view)


def _not_in_queue(folders: Mapping[str, RunFolder], run_ids: Iterable[str], view: SchedulerView) -> list[str]:
    """Return the runs that the queue does not have, and whose files do not record the end."""
    return [run_id for run_id in run_ids if not (view.is_in_queue(folders[run_id]) or folders[run_id].is_settled)]


def _rows_of(folders: Iterable[RunFolder], now: float, notes: list[str]) -> Mapping[str, AccountingEntry] | None:
    """Return the accounting's rows for the jobs of these runs; None, with a note, if it did not answer."""
    gone = [(_asked_job(folder), folder.submission) for folder in folders]
    jobs = {array_of(job_id): submission.time for job_id, submission in gone if job_id and submission}
    try:
        return read_accounting(jobs, min(jobs.values(), default=now))
    except SlurmError as error:
        notes.append(f"sacct did not answer ({error}): runs that left the queue are UNKNOWN until it does.")
        return None


def _asked_job(folder: RunFolder) -> str | None:
    """Return the job about which the accounting is asked; for a run of a pool the pool's array."""
    return folder.submission.job_id if folder.is_in_pool and folder.submission else folder.job_id


def _rests_on_a_missing_row(folder: RunFolder, view: SchedulerView) -> bool:
    """Return True if the run counts as cancelled for no other reason than that the accounting has no row for it."""
    if folder.is_in_pool or view.accounting is None or view.is_young(folder) or folder.job_key in view.remembered:
        return False
    if CANCEL in folder.markers or not view.is_cancelled_unbegun(folder):
        return False
    return not any(row.may_cover(folder.element) for row in view.rows_of_array(folder))


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
