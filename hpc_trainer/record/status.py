"""States of all runs of a sweep: from their own files, then from Slurm, and never guessed.

Slurm is asked once for all runs about which their files leave a doubt, and once for the ledger of each attempt.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.errors import RunStateError, SlurmError, did_you_mean
from hpc_trainer.record import doubts
from hpc_trainer.record.doubts import Doubt
from hpc_trainer.record.journal import Attempt
from hpc_trainer.record.known_ends import read_ends, read_finished, record_ends, record_finished
from hpc_trainer.record.layout import OTHER_FOLDER, SweepPaths
from hpc_trainer.record.ledger import RunLedger, keep_allocations, ledger_of, match, read_allocations, read_spent
from hpc_trainer.record.lost import LostJobs, find_lost_jobs, known_specs, lost_notes, told_few
from hpc_trainer.record.reading import Faults, FaultsOf, exists, list_folder
from hpc_trainer.record.run_folder import RunFolder, read_folder, unstarted_folder
from hpc_trainer.record.run_state import End, SchedulerView, decide, last_sign
from hpc_trainer.record.run_status import RunStatus, gpu_hours, status_of
from hpc_trainer.record.shared_folder import cache_age_s, look_anew
from hpc_trainer.record.spec import WRITE_AGAIN, RunSpec
from hpc_trainer.record.states import CANCEL, DONE, RunState
from hpc_trainer.record.submissions import Ledger, Submission, latest_of_each_run, read_ledger
from hpc_trainer.slurm.accounting import Allocation, ask_allocations, read_accounting
from hpc_trainer.slurm.commands import cluster_name, has_slurm
from hpc_trainer.slurm.queue import CLOCKS_S, QueueEntry, array_of, find_by_uuid, read_queue
from hpc_trainer.slurm.states import PENDING


def ask_slurm(
    sweep: SweepPaths, folders: dict[str, RunFolder], read: Callable[[str], RunFolder], notes: list[str],
    faults: Faults, *, must_ask: bool, is_look: bool,
) -> SchedulerView:  # fmt: skip
    """Return Slurm's answers about these folders; folders of runs that have left the queue are read again and replaced.

    Slurm is asked by one squeue, and by one sacct for runs that have left the queue. If neither knows a job, one
    scontrol asks for the cluster's name.

    Args:
        read: function that reads the folder of a run again.
        notes: gets a note for each question that Slurm did not answer.
        faults: gets a fault for each unreadable record of an end that Slurm reported before.
        must_ask: True if Slurm must be asked for other reasons than these folders.
        is_look: True if no command acts on the answer. Slurm is then not asked if every end is known, because a Slurm
            that does not answer takes 30 s.

    Raises:
        RunStateError: the sweep's folder disappeared in the meantime.
    """
    asked = [run_id for run_id, folder in folders.items() if folder.needs_scheduler]
    begin, age_s = time.time(), cache_age_s(sweep.folder)
    damage = Faults()
    remembered = read_ends(sweep, damage) if asked else {}
    faults += damage
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
    _take_found_jobs(folders, asked, queue)
    left = [run_id for run_id in asked if view.job_of(folders[run_id]) is None and not folders[run_id].is_settled]
    if left and not look_anew(sweep.folder):  # finds folders of runs that began since the last listing
        raise went_away(sweep)
    for run_id in left:
        folders[run_id] = read(run_id)  # now shows the files that the run wrote at its end
    left = [run_id for run_id in left if not folders[run_id].is_settled and view.job_of(folders[run_id]) is None]
    try:
        gone = [(folder.job_id, folder.submission) for folder in map(folders.__getitem__, left)]
        jobs = {array_of(job_id): submission.time for job_id, submission in gone if job_id and submission}
        rows = read_accounting(jobs, min(jobs.values(), default=begin))
        view = SchedulerView(queue, rows, asked_time=begin, cache_age_s=age_s)
    except SlurmError as error:
        notes.append(f"sacct did not answer ({error}): runs that left the queue are UNKNOWN until it does.")
        view = SchedulerView(queue, None, asked_time=begin, cache_age_s=age_s)
    if left:
        view = dataclasses.replace(view, remembered=remembered, unread=damage[0] if damage.refusal else None)
    return _with_cluster(view, [folders[run_id] for run_id in left])


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
    """Return True if a run is known to have ended without asking Slurm, and nothing restarts it automatically."""
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


def _take_found_jobs(folders: dict[str, RunFolder], run_ids: Sequence[str], queue: Mapping[str, QueueEntry]) -> None:
    """Set the job of each folder that has an intent without an answer, if the queue shows the job."""
    lost = [run_id for run_id in run_ids if folders[run_id].job_id is None]
    jobs = {uuid: find_by_uuid(queue.values(), uuid) for uuid in {folders[run_id].uuid for run_id in lost}}
    for run_id in lost:
        folder = folders[run_id]
        job_id = jobs[folder.uuid]
        if folder.submission is not None and job_id is not None:
            confirmed = dataclasses.replace(folder.submission, job_id=job_id)
            element = confirmed.element_id(folder.element)
            folders[run_id] = dataclasses.replace(folder, submission=confirmed, job_id=element)


_SWEEPS_SHOWN = 10

__all__ = ["RunStatus", "SweepStatus", "gpu_hours", "read_status"]


@dataclass(frozen=True, kw_only=True)
class SweepStatus:
    """Status of every run of a sweep, in order of submission. Folders of done runs are read only on demand."""

    sweep: SweepPaths
    specs: Mapping[str, RunSpec]
    """Run id -> spec, in order of submission."""
    open_runs: Mapping[str, RunStatus]
    """Run id -> status of each run that is not done."""
    read_done: Callable[[str], RunStatus]
    """Function that reads the folder of a run that is done."""
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
    left_alone: list[str] = field(default_factory=list)
    """Notes about runs that another cluster has or may have, and about jobs without a record; a part of `notes`."""

    @functools.cached_property
    def runs(self) -> list[RunStatus]:
        """Status of every run."""
        return [self.run(run_id) for run_id in self.specs]

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

    Runs go on while they are read, so the folders of runs that the scheduler no longer has are read again after its
    answer. If neither squeue nor sacct knows a job, one scontrol asks for the name of this cluster.

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
    if not specs and not sweep.folder.is_dir():
        raise RunStateError(_no_sweep(sweep))
    if specs and listed == []:
        raise went_away(sweep)  # else its runs would look as if they had not begun
    began = frozenset(listed or ())
    submissions = latest_of_each_run(ledger.submissions)
    jobs = {submission.job_id for submission in ledger.submissions if submission.job_id is not None}

    def read(run_id: str, names: Sequence[str] | None = None) -> RunFolder:
        return read_folder(
            sweep.run(run_id), submissions.get(run_id), ledger.waiting.get(run_id), jobs, names,
            is_listed=run_id in began,
        )  # fmt: skip

    notes: list[str] = []
    finished = read_finished(sweep) if is_look else {}
    folders = _first_look(sweep, specs, listed, read, submissions, ledger, finished)
    # A batch script proves that this sweep was given to Slurm, even if submissions.jsonl is lost or damaged.
    is_told = not ledger.damage and ledger != Ledger()
    may_live = [folder for folder in folders.values() if not (is_look and CANCEL in folder.markers)]
    may_hide = bool(may_live) or not is_look or not specs
    is_torn = (may_hide and not is_told) or any(folder.submission is None for folder in may_live)
    untold = [specs[folder.paths.run_id] for folder in may_live if folder.submission is None]
    was_on_slurm = is_torn and (exists(sweep.scripts, faults) is not False or any(map(_may_be_on_slurm, untold)))
    view = ask_slurm(
        sweep, folders, read, notes, faults, must_ask=was_on_slurm or bool(may_live and ledger.waiting), is_look=is_look
    )
    decided = {run_id: decide_now(run_id, folders, view, read) for run_id in folders}
    record_ends(sweep, view, ((folders[run_id], end) for run_id, end in decided.items()))

    def known(run_id: str, folder: RunFolder, end: End) -> RunStatus:
        return status_of(specs[run_id], folder, view, end, ledger.refused.get(run_id), faults)

    @functools.cache  # a second call neither reads the folder again nor reports its faults twice
    def read_done(run_id: str) -> RunStatus:
        folder = read(run_id)
        faults.extend(folder.faults)
        return known(run_id, folder, decide(folder, view))

    runs = [known(run_id, folder, decided[run_id]) for run_id, folder in folders.items()]
    lost = find_lost_jobs(
        sweep, ledger, [run.submission for run in runs if run.submission], view.queue, faults,
        needs_submit=not is_told or any(run.state.needs_submit for run in runs),
    )  # fmt: skip
    if not is_told and was_on_slurm and view.queue is None:
        lost = dataclasses.replace(lost, unseen=_unseen(ledger))
    faults += [*ledger.damage, *(fault for folder in folders.values() for fault in folder.faults)]
    open_runs = {run.run_id: _doubted(run, lost) for run in runs}
    left_alone = [*_elsewhere_notes(runs), *_lost_notes(open_runs.values())]
    status = SweepStatus(
        sweep=sweep, specs=specs, open_runs=open_runs, read_done=read_done,
        remarks=[*notes, *left_alone], ledger=ledger, top_up_job=_top_up_job(ledger, view), faults=faults,
        tending_job=_top_up_job(ledger, view, may_work=True), silence=notes[0] if notes else None,
        is_queue_silent=view.queue is None,
        lost=lost, queue_error=notes[0] if view.queue is None else ledger.unread, left_alone=left_alone,
    )  # fmt: skip
    if status.waiting:
        return dataclasses.replace(status, remarks=[*status.remarks, _waiting_note(status, view)])
    return status


def _elsewhere_notes(runs: Iterable[RunStatus]) -> list[str]:
    counts = Counter(run.elsewhere for run in runs if run.elsewhere is not None)
    return [f"{count} run(s) were {place}." for place, count in counts.items()]


def _lost_notes(runs: Iterable[RunStatus]) -> Iterator[str]:
    active = [run for run in runs if run.state.is_active]
    causes = [run.cause for run in active if run.cause is not None and run.state is RunState.UNKNOWN]
    jobs = [run.own_job for run in active if run.own_job is not None and run.submission and not run.submission.uuid]
    return lost_notes(causes, jobs)


def _may_be_on_slurm(spec: RunSpec) -> bool:
    """Return True if a Slurm job may have a run that no submission names; for a lost spec, if Slurm is installed."""
    return has_slurm() if spec.is_lost else bool(spec.config["cluster"]["executor"] == Executor.slurm.value)


def _unseen(ledger: Ledger) -> Doubt:
    return doubts.silent_after_damage(ledger.damage[0] if ledger.damage else None)


def _first_look(
    sweep: SweepPaths, run_ids: Iterable[str], listed: Iterable[str] | None, read: Callable[..., RunFolder],
    submissions: Mapping[str, tuple[Submission, int]], ledger: Ledger, finished: Mapping[str, str],
) -> dict[str, RunFolder]:  # fmt: skip
    """Return the folders of runs that are not done.

    A run that is done costs one listing, or nothing if `finished` names it. Any other run costs the listing and two
    files.

    Args:
        sweep: the sweep.
        run_ids: all of its runs.
        listed: the names in the sweep's folder, which show what runs have no folder yet; None if it was not listed.
        read: reads the folder of a run, given its id and the names in it.
        submissions: the newest submission of each run, and the run's index in it.
        ledger: the content of submissions.jsonl.
        finished: the result of `read_finished`; {} if the caller acts on the status.
    """
    present = set(run_ids if listed is None else listed)
    place = str(sweep.folder)
    folders: dict[str, RunFolder] = {}
    done: dict[str, str] = {}
    for run_id in run_ids:
        latest = submissions.get(run_id)
        uuid = latest[0].uuid if latest is not None else ""
        if run_id not in present:
            folders[run_id] = unstarted_folder(sweep.run(run_id), latest, _reason(ledger, run_id))
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
        return run if job_id is None else dataclasses.replace(run, job_id=job_id, own_job=job_id)
    cause = None if run.state is RunState.CANCELLED else lost.cause(run.run_id)
    if cause is not None:
        lost_job = lost.job_of(run.run_id)
        job_id, own_job = lost_job or run.job_id, lost_job or run.own_job
        return dataclasses.replace(
            run, state=RunState.UNKNOWN, cause=cause, job_id=job_id, own_job=own_job, waits_in_sweep=False
        )
    if run.spec.is_lost and run.state.needs_submit:
        return dataclasses.replace(run, state=RunState.UNKNOWN, cause=doubts.lost_spec(WRITE_AGAIN))
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
        f"{count}, and no top-up job is queued. The submit command brings them in, or: "
        f"hpc-trainer top-up {status.sweep.folder}"
    )


def _no_sweep(sweep: SweepPaths) -> str:
    parent = sweep.folder.parent
    names = sorted(folder.name for folder in parent.glob("*") if SweepPaths(folder).exists)
    few = ", ".join(names[:_SWEEPS_SHOWN]) + (" .." if len(names) > _SWEEPS_SHOWN else "")
    is_there = "" if parent.is_dir() else ": there is no such folder"
    listed = f"Sweeps in {parent}: {few}." if names else f"{parent} holds no sweep{is_there}."
    return f"there is no sweep {sweep.name}. {did_you_mean(sweep.name, names)}{listed} {OTHER_FOLDER}"


_MOST = 200
_FEW = 20
"""Largest number of array elements about which sacct is asked one by one; above it, about whole arrays."""


def ledger_of_run(status: SweepStatus, run: RunStatus, told: Sequence[Allocation] = ()) -> RunLedger | None:
    """Return the ledger of one run from its files and `told`, the accounting's new answer; None if it has none."""
    shape = run.spec.shape
    return ledger_of(
        status.sweep.run(run.run_id), run.attempts, num_gpus=shape.num_nodes * shape.gpus_per_node,
        allocations=told, faults=status.faults_of(run.run_id),
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
