"""Cancelling of runs: first a marker file that outlives every process, then the signal."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Sequence

from hpc_trainer.errors import RunStateError, SlurmError
from hpc_trainer.operate.find import prepare_to_write
from hpc_trainer.record.files import make_folder, write_json, write_marker
from hpc_trainer.record.processes import is_alive, pid_of
from hpc_trainer.record.reading import read_json
from hpc_trainer.record.states import CANCEL, POOL, RunState
from hpc_trainer.record.status import PoolStatus, RunStatus, SweepStatus, read_status
from hpc_trainer.record.turns import slot_folder
from hpc_trainer.slurm.jobs import cancel_jobs


def cancel_runs(
    status: SweepStatus, runs: Sequence[RunStatus], *, save: bool = False, is_whole: bool = False
) -> list[str]:
    """Cancel those of `runs` that are not over, and return their ids. They do not restart by themselves.

    The marker is written first, in every state: another process may be resubmitting an interrupted run at this
    moment, and reads the marker last. A run is over if it is complete or has recorded its own failure. A job gets a
    signal only if it surely belongs to the run: Slurm reuses job ids.

    Args:
        save: let running runs save a checkpoint, however long it takes. Otherwise Slurm kills them after KillWait (30 s
            by default); most runs save within that time, too.
        is_whole: the whole sweep is cancelled, including its jobs that none of its files name.

    Raises:
        RunStateError: jobs are, or may be, on another cluster. Their runs were not touched; the others are cancelled.
        SlurmError: squeue did not answer, submissions.jsonl could not be read, or scancel failed. The markers stay, and
            the same command may be repeated.
        UntrustedFileError: others may write the sweep's folder or a run's. Nothing was cancelled.
    """
    here = [run for run in runs if run.elsewhere is None]
    prepare_to_write(status.sweep, [run.run_id for run in here])
    cancelled = _cancel_here(status, here, save=save, is_whole=is_whole)
    if len(here) < len(runs):
        raise RunStateError(_elsewhere([run for run in runs if run.elsewhere is not None], cancelled))
    return cancelled


def _elsewhere(runs: Sequence[RunStatus], cancelled: Sequence[str]) -> str:
    listed = ", ".join(run.run_id for run in runs[:5]) + (f" and {len(runs) - 5} more" if len(runs) > 5 else "")
    places = " and ".join(sorted({str(run.elsewhere) for run in runs}))
    done = f" Cancelled here: {', '.join(cancelled)}." if cancelled else ""
    return f"{len(runs)} run(s) were {places}. Nothing of them was touched: {listed}. Run the same command there.{done}"


def _cancel_here(status: SweepStatus, runs: Sequence[RunStatus], *, save: bool, is_whole: bool) -> list[str]:
    for run in runs:
        if run.state is RunState.CANCELLED:  # perhaps by scancel, which Slurm forgets; the marker stays
            _mark(status, run, is_whole=is_whole)
    chosen = [run for run in runs if run.state is not RunState.CANCELLED and not _is_over(run)]
    for run in chosen:
        _mark(status, run, is_whole=is_whole)
    # A run that an earlier cancel marked may still have its job, if that scancel failed.
    marked = [run for run in runs if run.state is RunState.CANCELLED and _may_have_job(run)]
    saving = [run for run in chosen if save and run.state is RunState.RUNNING]
    at_once = [run for run in chosen if run.state.is_active and not (save and run.state is RunState.RUNNING)]
    jobs = _jobs([*marked, *at_once, *_brought_back(status, chosen)])
    jobs += [job_id for run in (*marked, *chosen) for _, job_id in run.rivals]
    cancelled = {run.run_id for run in chosen}
    if status.top_up_job is not None and all(run.run_id in cancelled for run in status.waiting):
        jobs.append(status.top_up_job)  # no run is left that this job could submit
    if is_whole:
        jobs += status.lost.arrays
    pools = _pools_without_runs(status, cancelled)
    jobs += [job_id for pool in pools for job_id in (*pool.waiting, *(() if save else pool.at_work))]
    saving_slots = [job_id for pool in pools for job_id in (pool.at_work if save else ())]
    may_have_jobs = any(run.has_slurm_job for run in (*chosen, *marked))
    if status.queue_error is not None and (may_have_jobs or status.ledger.unread is not None):
        raise SlurmError(
            f"{status.queue_error.rstrip('.')}. It is unknown whether the jobs still belong to these runs, "
            "so no job was cancelled. The runs are marked, and end when they see the mark. Run the same command again."
        )
    if is_whole:
        status.sweep.hold.unlink(missing_ok=True)  # nothing is left that could be held
    _end_slots(status, pools)
    cancel_jobs([job_id for job_id in jobs if job_id[:1].isdecimal()])
    cancel_jobs([job_id for job_id in saving_slots if job_id[:1].isdecimal()], signal="USR2")
    signal_running(saving)
    _stop_local([run for run in chosen if run not in saving])
    return [run.run_id for run in chosen]


def _pools_without_runs(status: SweepStatus, cancelled: Collection[str]) -> list[PoolStatus]:
    """Return the pools whose slots have no run left that waits or works, once these runs are cancelled."""
    open_runs = [run for run in status.open_runs.values() if run.state.is_active and run.run_id not in cancelled]
    needed = {run.submission.uuid for run in open_runs if run.submission is not None}
    return [pool for pool in status.pools if pool.submission.uuid not in needed]


def _end_slots(status: SweepStatus, pools: Sequence[PoolStatus]) -> None:
    """Mark the slots of pools, so that none requeues its job, and stop those that are processes of this machine."""
    for pool in pools:
        for element in range(pool.submission.slots):
            slot = slot_folder(status.sweep, pool.submission.uuid, element)
            make_folder(slot.folder)
            write_marker(slot.marker(CANCEL), sync=False)
        for process in pool.at_work if pool.submission.executor != "slurm" else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid_of(process), signal.SIGTERM)


def _mark(status: SweepStatus, run: RunStatus, *, is_whole: bool) -> None:
    paths = status.sweep.run(run.run_id)
    make_folder(paths.folder)
    # No fsync before a first attempt: Slurm still reports CANCELLED after a power cut, and 20,000 fsyncs take a minute.
    marker, sync = paths.marker(CANCEL), bool(run.attempts)
    if is_whole and not os.path.lexists(marker):
        write_json(marker, {"time": time.time(), _WITH_SWEEP: True}, sync=sync)
    else:
        write_marker(marker, sync=sync)


# Key in the marker of a run that was cancelled with its whole sweep: a retry of the sweep includes the run.
_WITH_SWEEP = "with_sweep"


def cancelled_with_sweep(status: SweepStatus, run_id: str) -> bool:
    """Return True if a cancelled run was cancelled by its sweep's name, and not by its own."""
    return (read_json(status.sweep.run(run_id).marker(CANCEL), status.faults) or {}).get(_WITH_SWEEP) is True


def _is_over(run: RunStatus) -> bool:
    newest = run.attempts[-1] if run.attempts else None
    if run.state.has_failed:
        return newest is not None and newest.has_ended and newest.state is run.state
    return run.state is RunState.COMPLETED or (run.state is RunState.NEW and run.submission is None)


def _brought_back(status: SweepStatus, chosen: Sequence[RunStatus]) -> list[RunStatus]:
    """Return runs that were interrupted in `status` and have a job again by now."""
    interrupted = {run.run_id for run in chosen if not run.state.is_active}
    if not interrupted:
        return []
    now = read_status(status.sweep).open_runs.values()
    return [run for run in now if run.run_id in interrupted and _may_have_job(run)]


def _jobs(runs: Sequence[RunStatus]) -> list[str]:
    """Return the Slurm job ids that surely belong to these runs; local runs have none."""
    return [run.own_job for run in runs if run.own_job is not None]


def _may_have_job(run: RunStatus) -> bool:
    newest = run.attempts[-1] if run.attempts else None
    has_left = newest is not None and newest.has_ended and newest.state is not RunState.REQUEUED
    return not has_left or (newest is not None and run.job_id != newest.job_id)


def signal_running(runs: Sequence[RunStatus]) -> None:
    """Ask running runs to save a checkpoint and leave, however long that takes."""
    cancel_jobs(_jobs(runs), signal="USR2")
    _stop_local(runs)


def _stop_local(runs: Sequence[RunStatus]) -> None:
    """Signal one rank of each local run that works: all its ranks then agree on a step, save, and exit."""
    for run in runs:
        if run.state is not RunState.RUNNING or not run.attempts or run.attempts[-1].executor not in ("local", POOL):
            continue
        if is_alive(run.attempts[-1].process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(run.attempts[-1].pid, signal.SIGTERM)
