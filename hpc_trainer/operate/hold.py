"""Holding and releasing of runs: first a marker file that outlives every process, then `scontrol hold`."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence

from hpc_trainer.errors import RunStateError, SlurmError
from hpc_trainer.operate.cancel import signal_running
from hpc_trainer.operate.find import prepare_to_write
from hpc_trainer.record.files import make_folder
from hpc_trainer.record.holds import write_hold
from hpc_trainer.record.reading import is_there
from hpc_trainer.record.states import HOLD, RunState
from hpc_trainer.record.status import RunStatus, SweepStatus, read_status
from hpc_trainer.slurm.jobs import hold_jobs, release_jobs

_WAITS = (RunState.PENDING, RunState.REQUEUED, RunState.HELD)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Result of `hold_runs`: ids of the runs that are held, of those asked to save, and of those left alone."""

    held: tuple[str, ...] = ()
    saving: tuple[str, ...] = ()
    at_work: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """Result of `release_runs`: ids of the released runs, and of those among them that must be submitted again."""

    released: tuple[str, ...] = ()
    to_submit: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def hold_runs(
    status: SweepStatus, runs: Sequence[RunStatus], *, save: bool = False, is_whole: bool = False, why: str = ""
) -> Held:
    """Hold those of `runs` that wait; with `save` also those that work, which save a checkpoint and leave first.

    The marker is written before Slurm is asked: a job that begins in between finds it at its next start.

    Args:
        status: status of the sweep.
        runs: the runs.
        save: hold running runs too.
        is_whole: these are all runs of the sweep. One marker in the sweep's folder then holds all of them, also those
            that a preemption puts back into the queue.
        why: the reason, if it is not the user's wish.

    Raises:
        RunStateError: jobs are, or may be, on another cluster, or runs at work in a pool on Slurm should save; nothing
            was held.
        SlurmError: squeue or scontrol did not answer. The markers stay, and the same command may be repeated.
    """
    elsewhere = next((run for run in runs if run.elsewhere is not None), None)
    if elsewhere is not None:
        raise RunStateError(
            f"{elsewhere.run_id} was {elsewhere.elsewhere}. Nothing was held: run the same command there."
        )
    pooled = next((run for run in runs if save and run.state is RunState.RUNNING and _is_in_slurm_pool(run)), None)
    if pooled is not None:
        raise RunStateError(
            f"{pooled.run_id} is at work in a job of a pool, and a signal would reach all runs of that job. Nothing "
            "was held. Without --save, waiting runs are held, and running runs continue to their end."
        )
    prepare_to_write(status.sweep, [run.run_id for run in runs])
    waiting = [run for run in runs if run.state in _WAITS]
    running = [run for run in runs if run.state is RunState.RUNNING]
    saving = running if save else []
    if is_whole and (waiting or saving):
        write_hold(status.sweep.hold, why)
    for run in (*(() if is_whole else waiting), *saving):
        make_folder(status.sweep.run(run.run_id).folder)
        write_hold(status.sweep.run(run.run_id).marker(HOLD), why)
    if status.queue_error is not None and any(run.has_slurm_job for run in (*waiting, *saving)):
        raise SlurmError(
            f"{status.queue_error.rstrip('.')}. It is unknown whose jobs these are, so none was held in Slurm. A run "
            "that starts in spite of that finds its hold and leaves. Run the same command again."
        )
    notes = hold_jobs([*_jobs(waiting), *(_waiting_slots(status) if is_whole else ())])
    signal_running(saving)
    unknown = [run.run_id for run in runs if run.state is RunState.UNKNOWN]
    notes += [f"{len(unknown)} run(s) are UNKNOWN and were left alone: {unknown[0]}"] if unknown else []
    return Held(
        held=tuple(run.run_id for run in waiting), saving=tuple(run.run_id for run in saving),
        at_work=() if save else tuple(run.run_id for run in running), notes=tuple(notes),
    )  # fmt: skip


def _is_in_slurm_pool(run: RunStatus) -> bool:
    return run.submission is not None and run.submission.is_pool and run.submission.executor == "slurm"


def _waiting_slots(status: SweepStatus) -> list[str]:
    """Return the jobs of slots that have not begun; a slot at work takes no run of a held sweep."""
    return [job_id for pool in status.pools for job_id in pool.waiting]


def _jobs(runs: Sequence[RunStatus]) -> list[str]:
    """Return the jobs of these runs that wait in Slurm's queue, also those on other hardware."""
    own = [run.waiting_job for run in runs if run.waiting_job is not None and run.own_job is not None]
    return [*own, *(job_id for run in runs for _, job_id in run.rivals)]


def release_runs(status: SweepStatus, runs: Sequence[RunStatus], *, is_whole: bool = False) -> Released:
    """Take back the holds of `runs`, ours and Slurm's, and say which of them have no job any more.

    Raises:
        RunStateError: single runs of a sweep are named that is held as a whole.
        SlurmError: squeue or scontrol did not answer; the same command may be repeated.
    """
    sweep = status.sweep
    if status.hold is not None and not is_whole:
        raise RunStateError(f"{sweep.name} is {status.hold.words}. Release all of it: hpc-trainer release {sweep.name}")
    prepare_to_write(sweep, [run.run_id for run in runs])
    held = [run for run in runs if run.state is RunState.HELD]
    marked = [run for run in runs if is_there(sweep.run(run.run_id).marker(HOLD))]
    if status.queue_error is not None and any(run.has_slurm_job for run in held):
        raise SlurmError(f"{status.queue_error.rstrip('.')}. Nothing was released. Run the same command again.")
    for run in marked:
        sweep.run(run.run_id).marker(HOLD).unlink(missing_ok=True)
    if is_whole:
        sweep.hold.unlink(missing_ok=True)
        shutil.rmtree(sweep.alike, ignore_errors=True)  # the next failures count anew
    notes = release_jobs([*_jobs(held), *(_waiting_slots(status) if is_whole else ())])
    chosen = dict.fromkeys(run.run_id for run in (*held, *marked))
    now = read_status(sweep).open_runs if chosen else {}
    again = [run_id for run_id in chosen if run_id in now and _has_no_job(now[run_id])]
    return Released(released=tuple(chosen), to_submit=tuple(again), notes=tuple(notes))


def _has_no_job(run: RunStatus) -> bool:
    """Return True if nothing starts the run by itself: it left because of the hold, or waits in the sweep's queue."""
    # A job that began in spite of the hold left an empty folder.
    left_at_once = run.state in (RunState.FAILED, RunState.GONE) and not run.attempts
    return run.state.needs_submit or run.waits_in_sweep or left_at_once
