"""Questions to Slurm about the runs of a sweep.

Runs go on while they are read. Folders of runs that the scheduler no longer has are therefore read again after its
answer, to see the files that runs write at their end.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from hpc_trainer.errors import RunStateError, SlurmError
from hpc_trainer.runs.layout import SweepPaths
from hpc_trainer.runs.reading import Faults
from hpc_trainer.runs.shared_folder import cache_age_s, look_anew
from hpc_trainer.runs.states import CANCEL
from hpc_trainer.slurm.accounting import read_accounting
from hpc_trainer.slurm.cluster import cluster_name
from hpc_trainer.slurm.queue import CLOCKS_S, QueueEntry, array_of, find_by_uuid, read_queue
from hpc_trainer.state.known_ends import read_ends
from hpc_trainer.state.run_folder import RunFolder
from hpc_trainer.state.run_state import End, SchedulerView, decide, last_sign


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
