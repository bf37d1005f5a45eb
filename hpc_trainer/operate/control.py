"""Cancelling, holding and releasing of runs, and the choice of runs that a retry submits again.

A marker file that outlives every process is written first, then Slurm is asked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
from collections import Counter
from collections.abc import Collection, Sequence

from hpc_trainer.errors import RunStateError, SlurmError
from hpc_trainer.operate.find import prepare_to_write
from hpc_trainer.record.files import make_folder, write_marker
from hpc_trainer.record.holds import write_hold
from hpc_trainer.record.layout import sweep_folder
from hpc_trainer.record.processes import is_alive, pid_of
from hpc_trainer.record.reading import is_there, read_json
from hpc_trainer.record.run_status import RunStatus
from hpc_trainer.record.states import CANCEL, HOLD, POOL, RunState
from hpc_trainer.record.status import PoolStatus, SweepStatus, read_status
from hpc_trainer.record.turns import slot_folder
from hpc_trainer.slurm.jobs import cancel_jobs, hold_jobs, release_jobs


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


def is_whole_sweep(status: SweepStatus, run_ids: Sequence[str], *, names_runs: bool) -> bool:
    """Return True if a cancel of these runs is one of the whole sweep.

    All runs of a search, given by their names, are not the search, because its slots draw more.
    """
    return len(run_ids) == len(status.specs) and not (status.ledger.is_search and names_runs)


def _cancel_here(status: SweepStatus, runs: Sequence[RunStatus], *, save: bool, is_whole: bool) -> list[str]:
    # Those that are cancelled perhaps by scancel, which Slurm forgets; the marker stays.
    _mark(status, [run for run in runs if run.state is RunState.CANCELLED], is_whole=is_whole)
    chosen = [run for run in runs if run.state is not RunState.CANCELLED and not _is_over(run)]
    _mark(status, chosen, is_whole=is_whole)
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
    pools = _pools_without_runs(status, cancelled, is_whole=is_whole)
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
    saved = {run.run_id for run in saving}
    _stop_local([run for run in chosen if run.run_id not in saved])
    return [run.run_id for run in chosen]


def _pools_without_runs(status: SweepStatus, cancelled: Collection[str], *, is_whole: bool) -> list[PoolStatus]:
    """Return the pools whose slots have no run left that waits or works, once these runs are cancelled.

    The slots of a search draw further trials: they end only with the whole sweep.
    """
    open_runs = [run for run in status.open_runs.values() if run.state.is_active and run.run_id not in cancelled]
    needed = {run.submission.uuid for run in open_runs if run.submission is not None}
    return [
        pool for pool in status.pools
        if (is_whole if pool.submission.source is not None else pool.submission.uuid not in needed)
    ]  # fmt: skip


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


def _mark(status: SweepStatus, runs: Sequence[RunStatus], *, is_whole: bool) -> None:
    """Mark runs as cancelled. The new markers of runs that have not begun are names of one file (hard links)."""
    more = {_WITH_SWEEP: True} if is_whole else None
    newest: str | None = None
    for run in runs:
        paths = status.sweep.run(run.run_id)
        make_folder(paths.place)
        marker, has_begun = paths.at(CANCEL), bool(run.attempts)
        # No fsync before a first attempt: after a power cut Slurm still reports CANCELLED, and 20,000 take a minute.
        if write_marker(marker, more, sync=has_begun, like=None if has_begun else newest):
            newest = marker


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
    """Ask running runs to save a checkpoint and exit, however long that takes; a slot of a pool sees the marker."""
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
    """Hold those of `runs` that wait; with `save` also those that work, which save a checkpoint and exit first.

    The marker is written before Slurm is asked: a job that begins in between finds it at its next start.

    Args:
        status: status of the sweep.
        runs: the runs.
        save: hold running runs too.
        is_whole: these are all runs of the sweep. One marker in the sweep's folder then holds all of them, also those
            that a preemption puts back into the queue.
        why: the reason, if it is not the user's wish.

    Raises:
        RunStateError: jobs are, or may be, on another cluster; nothing was held.
        SlurmError: squeue or scontrol did not answer. The markers stay, and the same command may be repeated.
    """
    elsewhere = next((run for run in runs if run.elsewhere is not None), None)
    if elsewhere is not None:
        raise RunStateError(
            f"{elsewhere.run_id} was {elsewhere.elsewhere}. Nothing was held: run the same command there."
        )
    prepare_to_write(status.sweep, [run.run_id for run in runs])
    waiting = [run for run in runs if run.state in _WAITS]
    running = [run for run in runs if run.state is RunState.RUNNING]
    saving = running if save else []
    draws = any(pool.submission.source is not None for pool in status.pools)  # a search may have no run that waits
    if is_whole and (waiting or running or draws):
        write_hold(status.sweep.hold, why)
    for run in (*(() if is_whole else waiting), *saving):
        make_folder(status.sweep.run(run.run_id).folder)
        write_hold(status.sweep.run(run.run_id).marker(HOLD), why)
    if status.queue_error is not None and any(run.has_slurm_job for run in (*waiting, *saving)):
        raise SlurmError(
            f"{status.queue_error.rstrip('.')}. It is unknown whose jobs these are, so none was held in Slurm. A run "
            "that starts all the same sees that it is held, and exits. Run the same command again."
        )
    notes = hold_jobs([*_waiting_jobs(waiting), *(_waiting_slots(status) if is_whole else ())])
    signal_running(saving)
    unknown = [run.run_id for run in runs if run.state is RunState.UNKNOWN]
    notes += [f"{len(unknown)} run(s) are UNKNOWN and were left alone: {unknown[0]}"] if unknown else []
    return Held(
        held=tuple(run.run_id for run in waiting), saving=tuple(run.run_id for run in saving),
        at_work=() if save else tuple(run.run_id for run in running), notes=tuple(notes),
    )  # fmt: skip


def _waiting_slots(status: SweepStatus) -> list[str]:
    """Return the jobs of slots that have not begun; a slot at work takes no run of a held sweep."""
    return [job_id for pool in status.pools for job_id in pool.waiting]


def _waiting_jobs(runs: Sequence[RunStatus]) -> list[str]:
    """Return the jobs of these runs that wait in Slurm's queue, also those on other hardware."""
    own = [run.waiting_job for run in runs if run.waiting_job is not None and run.own_job is not None]
    return [*own, *(job_id for run in runs for _, job_id in run.rivals)]


def release_runs(status: SweepStatus, runs: Sequence[RunStatus], *, is_whole: bool = False) -> Released:
    """Take back the holds of `runs`, hpc_trainer's and Slurm's, and say which of them have no job any more.

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
    notes = release_jobs([*_waiting_jobs(held), *(_waiting_slots(status) if is_whole else ())])
    chosen = dict.fromkeys(run.run_id for run in (*held, *marked))
    now = read_status(sweep).open_runs if chosen else {}
    again = [run_id for run_id in chosen if run_id in now and _has_no_job(now[run_id])]
    return Released(released=tuple(chosen), to_submit=tuple(again), notes=tuple(notes))


def _has_no_job(run: RunStatus) -> bool:
    """Return True if nothing starts the run by itself: it exited because of the hold, or waits in the sweep's queue."""
    # A job that began in spite of the hold left an empty folder.
    left_at_once = run.state in (RunState.FAILED, RunState.GONE) and not run.attempts
    return run.state.needs_submit or run.waits_in_sweep or left_at_once


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Retried:
    """Runs that a retry submits again."""

    run_ids: tuple[str, ...]
    takes_back: bool
    """True if the cancel of cancelled runs among them is taken back."""


def runs_to_retry(status: SweepStatus, run_ids: Sequence[str], names: Sequence[str], *, is_chosen: bool) -> Retried:
    """Return those of `run_ids` that have failed or were interrupted.

    A cancelled run is among them if its own name is given, or if its sweep's name is given and cancelled it. A run
    whose folder was deleted is among them if its own name is given.

    Args:
        status: the sweep.
        run_ids: the runs that `names` mean.
        names: what the user named.
        is_chosen: a condition chose the runs, which counts as naming them.

    Raises:
        RunStateError: there is no such run.
    """
    from hpc_trainer.operate.why import explain  # late: the other verbs need no causes

    folder = status.sweep.folder.parent
    is_sweep = [sweep_folder(folder, name).name for name in names] == [status.sweep.name]
    takes_all = is_chosen or (bool(names) and not is_sweep)
    states = {run_id: status.states[run_id] for run_id in run_ids}
    back = {
        run_id
        for run_id, state in states.items()
        if (state is RunState.CANCELLED and (takes_all or cancelled_with_sweep(status, run_id)))
        or (state is RunState.GONE and takes_all)
    }
    wanted = [run_id for run_id, state in states.items() if state.has_failed or state.needs_submit or run_id in back]
    unknown = next((run_id for run_id, state in states.items() if state is RunState.UNKNOWN), None)
    if not wanted and unknown is not None:
        why = explain(status, status.run(unknown), asks_slurm=False)
        raise RunStateError(
            f"{unknown} is UNKNOWN, and retry leaves such a run alone, because it may have a job already. "
            f"{why.verdict} Cause: {why.cause}. Do: {'; or: '.join(why.advice)}"
        )
    if not wanted:
        raise RunStateError(_nothing_to_retry(status, run_ids))
    return Retried(run_ids=tuple(wanted), takes_back=takes_all or bool(back))


def _nothing_to_retry(status: SweepStatus, run_ids: Sequence[str]) -> str:
    """Return a message that no run has failed or was interrupted, with the command that restarts each kind of run."""
    states = [status.states[run_id] for run_id in run_ids]
    if len(states) == 1:
        sentences = [f"nothing to retry: {run_ids[0]} is {states[0].value}."]
    else:
        counted = sorted(Counter(state.value for state in states).items())
        counts = ", ".join(f"{number} {state}" for state, number in counted) or "no runs"
        sentences = [f"nothing to retry: no run of {status.sweep.name} has failed or was interrupted ({counts})."]
    if RunState.HELD in states:
        sentences.append(f"To release held runs: hpc-trainer release {status.sweep.name}")
    elif any(state.is_active for state in states):
        sentences.append("Waiting and running runs continue by themselves.")
    if RunState.CANCELLED in states:
        cancelled = next(run_id for run_id, state in zip(run_ids, states, strict=True) if state is RunState.CANCELLED)
        sentences.append(f"To restart a cancelled run, name it: hpc-trainer retry {cancelled}")
    if RunState.GONE in states:
        gone = next(run_id for run_id, state in zip(run_ids, states, strict=True) if state is RunState.GONE)
        sentences.append(f"To train a run with a deleted folder again, name it: hpc-trainer retry {gone}")
    if RunState.COMPLETED in states:
        sentences.append("To train completed runs anew, add --fresh to their `hpc-trainer submit`.")
    return " ".join(sentences)
