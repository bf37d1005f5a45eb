"""Status of all runs of a sweep: `read_status` reads their files, asks Slurm about doubtful ones, and never guesses.

Slurm is asked once for all runs about which their files leave a doubt (`slurm_answers.py`). Runs and jobs whose lines
are lost are found by `known_runs.py`.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.errors import RunStateError, did_you_mean
from hpc_trainer.record import doubts
from hpc_trainer.record.doubts import DoubtKind, kind_of_doubt
from hpc_trainer.record.holds import Hold, read_hold
from hpc_trainer.record.known_ends import read_finished, record_ends, record_finished
from hpc_trainer.record.known_runs import LostJobs, find_lost_jobs, known_specs
from hpc_trainer.record.layout import OTHER_FOLDER, SweepPaths, no_sweeps_words, sweep_folders
from hpc_trainer.record.reading import Faults, FaultsOf, exists, is_there, list_folder, told_few
from hpc_trainer.record.run_folder import RunFolder, read_folder, unstarted_folder, went_away
from hpc_trainer.record.run_state import decide, decide_now, told_by_slurm
from hpc_trainer.record.run_status import RunStatus, status_of
from hpc_trainer.record.shared_folder import look_anew
from hpc_trainer.record.slurm_answers import SchedulerView, ask_slurm
from hpc_trainer.record.spec import WRITE_AGAIN, RunSpec
from hpc_trainer.record.states import CANCEL, DONE, End, RunState
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
    slot_failure,
    slot_name,
)
from hpc_trainer.slurm.commands import has_slurm
from hpc_trainer.slurm.queue import array_of, find_by_uuid
from hpc_trainer.slurm.terms import NOT_BEGUN, PENDING, explain_reason


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
    failure: str | None = None
    """Reason why one of its slots could not begin."""

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
        parts += [self.failure] if self.failure is not None else []
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
    notes: list[str] = []
    files = _read_files(sweep, faults)
    folders = _first_look(files, read_finished(sweep) if is_look else {})
    may_live = [folder for folder in folders.values() if not (is_look and CANCEL in folder.markers)]
    was_on_slurm = _was_on_slurm(files, may_live, faults, is_look=is_look)
    # Slots of a search may wait or work although no run does.
    searches = [pool for pool in files.ledger.submissions if pool.source is not None and pool.executor == "slurm"]
    may_draw = any(not is_look or may_have_slots(sweep, pool) for pool in searches)
    view = ask_slurm(
        sweep, folders, files.read, notes, faults, is_look=is_look,
        must_ask=was_on_slurm or may_draw or bool(may_live and files.ledger.waiting),
    )  # fmt: skip
    decided = {run_id: decide_now(run_id, folders, view, files.read) for run_id in folders}
    record_ends(sweep, told_by_slurm(view, ((folders[run_id], end) for run_id, end in decided.items())))
    runs = [_run_status(files, folder, view, decided[run_id], faults) for run_id, folder in folders.items()]
    lost = find_lost_jobs(
        sweep, files.ledger, [run.submission for run in runs if run.submission], view.queue, faults,
        needs_submit=not files.has_whole_ledger or any(run.state.needs_submit for run in runs),
    )  # fmt: skip
    if not files.has_whole_ledger and was_on_slurm and view.queue is None:
        lost = replace(lost, unseen=doubts.silent_after_damage(next(iter(files.ledger.damage), None)))
    faults += [*files.ledger.damage, *(fault for folder in folders.values() for fault in folder.faults)]
    open_runs = {run.run_id: _doubted(run, lost) for run in runs}
    left_alone = [*_elsewhere_notes(runs), *_lost_notes(open_runs.values())]
    pools = tuple(_pools(sweep, files.ledger, view, files.turns))
    summaries = Summaries(sweep) if is_look else None
    status = SweepStatus(
        sweep=sweep, specs=files.specs, ledger=files.ledger, removed=files.removed, hold=files.hold,
        open_runs=open_runs, read_done=_reader_of_done(files, view, summaries, faults), summaries=summaries,
        remarks=[*notes, *(f"{pool.words}." for pool in pools), *left_alone], left_alone=left_alone, faults=faults,
        silence=notes[0] if notes else None, is_queue_silent=view.queue is None,
        queue_error=notes[0] if view.queue is None else files.ledger.unread, lost=lost, pools=pools, stuck=files.stuck,
        top_up_job=_top_up_job(files.ledger, view), tending_job=_top_up_job(files.ledger, view, may_work=True),
    )  # fmt: skip
    if status.waiting:
        return replace(status, remarks=[*status.remarks, _waiting_note(status, view)])
    return status


@dataclass(frozen=True, kw_only=True)
class _SweepFiles:
    """Content of a sweep's own files, and the names in its folder. Folders of runs are read by `read` only."""

    sweep: SweepPaths
    specs: dict[str, RunSpec]
    """Run id -> spec of every run, in the order that all commands show."""
    listed: list[str] | None
    """Names in the sweep's folder, which show which runs have no folder yet; None if it could not be listed."""
    ledger: Ledger
    """Content of submissions.jsonl."""
    submissions: Mapping[str, Job]
    """Run id -> the newest submission, and the run's index in it."""
    rivals: Mapping[str, Sequence[Job]]
    """Run id -> all jobs of the newest submission, if it went to several shapes."""
    removed: Mapping[str, Removed]
    """Removed runs; remains of their folders do not count."""
    turns: Mapping[str, Turn]
    """Run id -> the slot of a pool that has the run."""
    stuck: Mapping[str, Stuck]
    """Run id -> the claim because of which no slot of a pool takes the run."""
    hold: Hold | None
    """Hold of the whole sweep."""

    @property
    def has_whole_ledger(self) -> bool:
        """True if submissions.jsonl exists and no line of it is lost or damaged."""
        return not self.ledger.damage and self.ledger != Ledger()

    @functools.cached_property
    def held(self) -> str | None:
        """Hold of the whole sweep in words."""
        return None if self.hold is None else self.hold.words

    @functools.cached_property
    def _began(self) -> frozenset[str]:
        return frozenset(self.listed or ())

    @functools.cached_property
    def _jobs(self) -> set[str]:
        return {submission.job_id for submission in self.ledger.submissions if submission.job_id is not None}

    def read(self, run_id: str, names: Sequence[str] | None = None) -> RunFolder:
        """Read the folder of a run; `names` are the names in it, if it was listed just now."""
        return read_folder(
            self.sweep.run(run_id), self.submissions.get(run_id), self.ledger.waiting.get(run_id), self._jobs, names,
            is_listed=run_id in self._began, rivals=self.rivals.get(run_id, ()), turn=self.turns.get(run_id),
            held=self.held,
        )  # fmt: skip

    def unstarted(self, run_id: str) -> RunFolder:
        """Return the folder of a run that is removed or has no folder yet."""
        paths, latest = self.sweep.run(run_id), self.submissions.get(run_id)
        if run_id in self.removed:
            return unstarted_folder(paths, latest, None, removed=self.removed[run_id].words)
        waiting = self.ledger.waiting.get(run_id)
        return unstarted_folder(
            paths, latest, None if waiting is None else waiting.reason, self.rivals.get(run_id, ()),
            self.turns.get(run_id), held=self.held,
        )  # fmt: skip


def _read_files(sweep: SweepPaths, faults: Faults) -> _SweepFiles:
    """Read a sweep's own files and list its folder.

    Raises:
        RunStateError: there is no such sweep, or its folder disappeared in the meantime.
    """
    try:
        look_anew(sweep.folder)  # another login node may have submitted it a moment ago
    except OSError as error:
        faults.refuse(sweep.folder, error)
    ledger = read_ledger(sweep, may_fail=True)
    listed = list_folder(sweep.folder, faults)
    specs = known_specs(sweep, ledger, listed or (), faults)
    whole = read_removed_sweep(sweep.folder) if not specs else None
    if whole is not None or (not specs and (sweep.is_foreign or not sweep.folder.is_dir())):
        raise RunStateError(_no_sweep(sweep, whole))
    if specs and listed == []:
        raise went_away(sweep)  # else its runs would look as if they had not begun
    began = frozenset(listed or ())
    submissions = latest_of_each_run(ledger.submissions)
    removed = _still_removed(read_removed(sweep, began, faults), submissions)
    hold = read_hold(sweep.hold, faults) if sweep.hold.name in began else None
    turns, stuck = _open_turns(sweep, ledger, listed or (), submissions, faults)
    return _SweepFiles(
        sweep=sweep, specs=specs, listed=listed, ledger=ledger, submissions=submissions, removed=removed, turns=turns,
        stuck=stuck, rivals=rivals_of_each_run(ledger.submissions), hold=hold,
    )  # fmt: skip


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
                failure=slot_failure(sweep, pool),
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


def _was_on_slurm(files: _SweepFiles, may_live: Sequence[RunFolder], faults: Faults, *, is_look: bool) -> bool:
    """Return True if Slurm may have jobs of the sweep that submissions.jsonl does not name, because lines are lost.

    A batch script proves that the sweep was given to Slurm, even if submissions.jsonl is lost or damaged.

    Args:
        files: the sweep's files.
        may_live: folders of the runs about which a job matters.
        faults: gets a fault if the folder of batch scripts cannot be looked at.
        is_look: True if no command acts on the status.
    """
    untold = [files.specs[folder.paths.run_id] for folder in may_live if folder.submission is None]
    matters = bool(may_live) or not is_look or not files.specs
    if not untold and (files.has_whole_ledger or not matters):
        return False
    return exists(files.sweep.scripts, faults) is not False or any(map(_may_be_on_slurm, untold))


def _may_be_on_slurm(spec: RunSpec) -> bool:
    """Return True if a Slurm job may have a run that no submission names; for a lost spec, if Slurm is installed."""
    return has_slurm() if spec.is_lost else bool(spec.config["cluster"]["executor"] == Executor.slurm.value)


def _first_look(files: _SweepFiles, finished: Mapping[str, str]) -> dict[str, RunFolder]:
    """Return the folders of runs that are not done, and record those that are.

    A run that is done costs one listing, or nothing if `finished` names it. Any other run costs the listing and two
    files.

    Args:
        files: the sweep's files.
        finished: the result of `read_finished`; {} if the caller acts on the status.
    """
    present = set(files.specs if files.listed is None else files.listed)
    place = str(files.sweep.folder)
    folders: dict[str, RunFolder] = {}
    done: dict[str, str] = {}
    for run_id in files.specs:
        latest = files.submissions.get(run_id)
        uuid = latest[0].uuid if latest is not None else ""
        if run_id in files.removed or run_id not in present:
            folders[run_id] = files.unstarted(run_id)
        elif (uuid and finished.get(run_id) == uuid) or DONE in (names := _names_of(f"{place}/{run_id}")):
            done[run_id] = uuid
        else:
            folders[run_id] = files.read(run_id, names or None)
    record_finished(files.sweep, finished, done)
    return folders


def _names_of(folder: str) -> list[str]:
    """Return the names in a run's folder; [] if it cannot be listed, because the later read reports the reason."""
    try:
        return os.listdir(folder)  # noqa: PTH208  (10,000 of them)
    except OSError:
        return []


def _run_status(files: _SweepFiles, folder: RunFolder, view: SchedulerView, end: End, faults: Faults) -> RunStatus:
    """Return the status of a run, with the spec of the hardware on which it has started."""
    run_id = folder.paths.run_id
    spec = files.specs[run_id]
    choice = folder.submission.choice if folder.submission is not None and folder.is_claimed else None
    if choice is not None and choice <= len(spec.others):
        spec = spec.on(choice)
    return status_of(spec, folder, view, end, files.ledger.refused.get(run_id), faults)


def _reader_of_done(
    files: _SweepFiles, view: SchedulerView, summaries: Summaries | None, faults: Faults
) -> Callable[[str], RunStatus]:
    """Return a function that reads a run that is done, from its summary if it has one."""

    @functools.cache  # a second call neither reads the folder again nor reports its faults twice
    def read_done(run_id: str) -> RunStatus:
        latest = files.submissions.get(run_id)
        if summaries is None or latest is None or run_id in files.rivals:
            folder = files.read(run_id)
        else:
            folder = summaries.read(files.sweep.run(run_id), latest, files.read)
        faults.extend(folder.faults)
        return _run_status(files, folder, view, decide(folder, view), faults)

    return read_done


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
    names = sorted(folder.name for folder in _readable_folders(parent) if SweepPaths(folder).exists)
    few = ", ".join(names[:_SWEEPS_SHOWN]) + (" .." if len(names) > _SWEEPS_SHOWN else "")
    listed = f"Sweeps in {parent}: {few}." if names else no_sweeps_words(parent)
    is_there = f": {sweep.folder} is a folder with other files" if sweep.is_foreign else ""
    return f"there is no sweep {sweep.name}{is_there}. {did_you_mean(sweep.name, names)}{listed} {OTHER_FOLDER}"


def _readable_folders(runs_dir: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return sweep_folders(runs_dir)
    return []
