"""Figures of runs that their status does not have: times, GPU-hours, where the time went, and the newest metrics."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hpc_trainer.errors import SlurmError
from hpc_trainer.record.journal import Attempt
from hpc_trainer.record.ledger import RunLedger, keep_allocations, ledger_of, match, read_allocations, read_spent
from hpc_trainer.record.metrics import SPEED, newest_metrics_in, read_metrics
from hpc_trainer.record.reading import Faults
from hpc_trainer.record.run_status import WAITS, RunStatus
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import SweepStatus
from hpc_trainer.record.submissions import Ledger
from hpc_trainer.slurm.queue import Allocation, array_of, ask_allocations


def gpu_hours(run: RunStatus) -> float:
    """Return the GPU-hours that all attempts of a run held, up to the last sign of life.

    An attempt that shared its GPU with other runs counts with its share.
    """
    shares = (seconds / attempt.per_gpu for attempt, seconds in zip(run.attempts, _seconds(run), strict=True))
    return run.spec.shape.num_nodes * run.spec.shape.gpus_per_node * sum(shares) / 3600


def wall_s(run: RunStatus) -> float:
    """Return for how many seconds all attempts of a run worked, up to the last sign of life."""
    return sum(_seconds(run))


def _seconds(run: RunStatus) -> list[float]:
    """Return for how many seconds each attempt worked."""
    ends = zip(run.attempts, _ends(run), strict=True)
    return [max(0.0, end - attempt.start_time) for attempt, end in ends]


def _ends(run: RunStatus) -> list[float]:
    """Return when each attempt ended, in seconds since the epoch.

    The journal has no end of a killed attempt: it ended before the next one began, or at the last sign of life.
    """
    if not run.attempts:
        return []
    if len(run.attempts) == 1 and run.attempts[0].end_time is not None:
        return [run.attempts[0].end_time]  # most of 10,000 runs
    later = [*(attempt.start_time for attempt in run.attempts[1:]), time.time() - (run.age_s or 0.0)]
    return [attempt.end_time or end for attempt, end in zip(run.attempts, later, strict=True)]


def submit_times(ledger: Ledger) -> dict[str, list[float]]:
    """Return run id -> when each of the run's submissions was made, in order, in seconds since the epoch."""
    times: dict[str, list[float]] = {}
    for submission in sorted(ledger.submissions, key=lambda submission: submission.time):
        for run_id in submission.run_ids:
            times.setdefault(run_id, []).append(submission.time)
    return times


def queue_s(run: RunStatus, submitted: Sequence[float]) -> float | None:
    """Return for how many seconds a run waited in the queue: before its first attempt, between attempts, and now.

    Between an end and a later submission it did not wait. None if it was never submitted.

    Args:
        run: the run.
        submitted: when each of its submissions was made, from `submit_times`.
    """
    if not submitted:
        return None
    waited, begin = 0.0, submitted[0]
    for attempt, end in zip(run.attempts, _ends(run), strict=True):
        again = [time_ for time_ in submitted if begin < time_ <= attempt.start_time]
        waited += max(0.0, attempt.start_time - (again[-1] if again else begin))
        begin = end
    since = waits_since(run, submitted)
    return waited if since is None else waited + max(0.0, time.time() - since)


def waits_since(run: RunStatus, submitted: Sequence[float]) -> float | None:
    """Return when a waiting run began to wait, in seconds since the epoch; None if unknown, or if it does not wait."""
    if run.state not in WAITS or run.waits_in_sweep:
        return None
    return max([*submitted[-1:], *_ends(run)[-1:]], default=None)


_MOST = 200
_FEW = 20
"""Largest number of array elements about which sacct is asked one by one; above it, about whole arrays."""


def ledger_of_run(status: SweepStatus, run: RunStatus, allocations: Sequence[Allocation] = ()) -> RunLedger | None:
    """Return the ledger of one run, or None, from its files and `allocations`, the accounting's new answer."""
    shape = run.spec.shape
    return ledger_of(
        status.sweep.run(run.run_id), run.attempts, num_gpus=shape.num_nodes * shape.gpus_per_node,
        allocations=allocations, faults=status.faults_of(run.run_id),
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


_MOST_RUNS = 200

# Metrics of one moment of training; a table of results shows the outcome.
_PASSING = ("lr", "grad_norm", "loss", *SPEED)


def newest_metrics(
    status: SweepStatus, run: RunStatus, records: Iterable[Mapping[str, Any]] | None = None
) -> tuple[dict[str, Any], int | None]:
    """Return the metrics of the outcome, and their step; None if the step is not known.

    For a run that has stopped, these are the newest in its metrics.jsonl up to its step: its heartbeat may be older.

    Args:
        records: the records of the run's metrics.jsonl, if the caller has read them.
    """
    if run.state is RunState.COMPLETED or not run.attempts:
        return outcome_metrics(run), run.step if run.state is RunState.COMPLETED else None
    if records is None:
        records = read_metrics(status.sweep.run(run.run_id).metrics, status.faults_of(run.run_id))
    newest, _ = _up_to(run.step, records)
    metrics = outcome_metrics(run, {key: value for key, (value, _) in newest.items()})
    return (metrics, max(newest[key][1] for key in metrics)) if metrics else (outcome_metrics(run), None)


def _up_to(last: int, records: Iterable[Mapping[str, Any]]) -> tuple[dict[str, tuple[Any, int]], frozenset[str]]:
    """Return each metric's newest (value, step) up to step `last`, and the names of metrics logged after `last`."""
    newest: dict[str, tuple[Any, int]] = {}
    later = set[str]()
    for record in records:
        step = record["step"]
        values = {key: value for key, value in record.items() if key not in ("step", "time")}
        if step > last:
            later |= values.keys()
        else:
            newest |= {key: (value, step) for key, value in values.items()}
    return newest, frozenset(later)


def outcome_metrics(run: RunStatus, metrics: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the metrics of the outcome among the run's metrics, or `metrics`; for a program all except speed."""
    passing = _PASSING if run.spec.num_steps else SPEED  # 0: a program, whose loss may be its only metric
    return {key: value for key, value in (run.metrics if metrics is None else metrics).items() if key not in passing}


def metrics_now(status: SweepStatus, runs: Sequence[RunStatus]) -> dict[str, tuple[dict[str, Any], int | None]]:
    """Return for each run id its newest metrics, and the step of its outcome if that differs from the run's step.

    A stopped run is at the step that it saved, while its metrics come from its last heartbeat, at another step. So the
    end of its metrics.jsonl is read, but not with more than 200 runs: a look at 10,000 runs must not read such files.
    """
    stopped = (run for run in runs if run.attempts and run.state not in (RunState.RUNNING, RunState.COMPLETED))
    by_run = {} if len(runs) > _MOST_RUNS else {run.run_id: _where_it_stopped(status, run) for run in stopped}
    return {run.run_id: by_run.get(run.run_id) or (dict(run.metrics), None) for run in runs}


def _where_it_stopped(status: SweepStatus, run: RunStatus) -> tuple[dict[str, Any], int | None]:
    records = newest_metrics_in(status.sweep.run(run.run_id).metrics, status.faults_of(run.run_id))
    newest, later = _up_to(run.step, records)
    of_heartbeat = {key: value for key, value in run.metrics.items() if key in newest or key not in later}
    metrics = of_heartbeat | {key: value for key, (value, _) in newest.items()}
    telling = outcome_metrics(run, metrics) or metrics.keys() & {"loss"}
    step = max((newest[key][1] for key in telling if key in newest), default=None)
    return metrics, None if step == run.step else step
