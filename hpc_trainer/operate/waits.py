"""Repeated looks at a sweep, until none of the awaited runs is pending or running."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence

from hpc_trainer.errors import RunStateError, UntrustedFileError
from hpc_trainer.operate.verdicts import SILENT, TAKEN, of_unknown
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.run_status import RunStatus
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import SweepStatus, read_status

# Run folders are cheap to read; Slurm is asked at most this often (docs of squeue: no tight loops).
_LOCAL_POLL_S = 0.5
_SLURM_POLL_S = 10.0
# A run that no scheduler has will not change by itself after so many seconds without a change. The accounting may be
# ten minutes behind (record/run_state.py).
_PATIENCE_S = 900.0


def looks(sweep: SweepPaths, run_ids: set[str]) -> Iterator[SweepStatus]:
    """Yield the sweep's status until none of the named runs is pending or running; the last status is yielded too.

    A run that no scheduler has is waited for at most `_PATIENCE_S` seconds; a remark of the status then reports it. If
    Slurm does not answer, it is asked again. If the folder disappears after a look that saw it, it is read again.

    Raises:
        RunStateError: there is no such sweep, or its folder has been gone for `_PATIENCE_S` seconds.
    """
    since: dict[str, tuple[object, float]] = {}
    seen: SweepStatus | None = None
    seen_at = time.monotonic()
    while True:
        status = _look(sweep, seen)
        now = time.monotonic()
        if status.is_away:
            if now - seen_at >= _PATIENCE_S:
                raise RunStateError(f"{status.silence} No longer waiting, after {_PATIENCE_S / 60:.0f} minutes.")
            yield status
            _sleep(status)
            continue
        seen, seen_at = status, now
        active = active_among(status, run_ids)
        nobodys = [run for run in active if _is_nobodys(run, status)]
        since = {run.run_id: _stands_since(run, since.get(run.run_id), now) for run in nobodys}
        given_up = [run for run in nobodys if now - since[run.run_id][1] >= _PATIENCE_S]
        if given_up:
            status = dataclasses.replace(status, remarks=[*status.remarks, _no_longer(given_up)])
        yield status
        if len(given_up) == len(active):
            return
        _sleep(status)


def _look(sweep: SweepPaths, before: SweepStatus | None) -> SweepStatus:
    """Return the sweep's status; if its folder cannot be read, the status of the previous look with `silence` set.

    A rebooting server or a mount that is gone for a moment hides the files of running runs.
    """
    try:
        status = read_status(sweep, is_look=True)
    except (RunStateError, OSError) as error:
        if before is None or isinstance(error, UntrustedFileError):
            raise
    else:
        if before is None or before.specs.keys() <= status.specs.keys():
            return status
    silence = f"{sweep.folder} was there before and cannot be read now."
    return dataclasses.replace(before, silence=silence, is_away=True)


def active_among(status: SweepStatus, run_ids: set[str]) -> list[RunStatus]:
    """Return those of the named runs that are pending or running."""
    return [run for run in status.open_runs.values() if run.run_id in run_ids and run.state.is_active]


def _is_nobodys(run: RunStatus, status: SweepStatus) -> bool:
    """Return True if no scheduler and no process has the run, although those that were asked have answered."""
    if status.is_queue_silent:
        return False
    if run.waits_in_sweep:
        return status.tending_job is None
    if run.state is RunState.HELD and run.waits_for is not None:
        return True  # until a user brings back the run that it follows
    is_unknown = run.state is RunState.UNKNOWN and run.own_job is None
    return is_unknown and of_unknown(run.cause, None) not in (SILENT, TAKEN)


def _stands_since(run: RunStatus, before: tuple[object, float] | None, now: float) -> tuple[object, float]:
    """Return the run's state, and the time since when it has not changed and the run gave no sign of life."""
    stands = run.state, run.cause, run.step, len(run.attempts)
    is_still = before is not None and before[0] == stands and (run.age_s is None or run.age_s >= now - before[1])
    return stands, before[1] if before is not None and is_still else now


def _no_longer(runs: Sequence[RunStatus]) -> str:
    first = runs[0]
    return (
        f"No longer waiting for {len(runs)} run(s) that no scheduler is known to have; for {_PATIENCE_S / 60:.0f} "
        f"minutes nothing has changed. {first.run_id} is {first.state.value}: {first.reason}. What to do: "
        f"hpc-trainer why {first.run_id}"
    )


def _sleep(status: SweepStatus) -> None:
    time.sleep(pause_s(status))


def pause_s(status: SweepStatus) -> float:
    """Return the seconds to wait until the next look at a sweep."""
    on_slurm = any(run.has_slurm_job for run in status.open_runs.values() if run.state.is_active)
    is_silent = status.silence is not None and not status.is_away
    return _SLURM_POLL_S if on_slurm or is_silent or status.waiting else _LOCAL_POLL_S
