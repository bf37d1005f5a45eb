"""What is known of a sweep before a plan: the status of its runs, grouped by array and shape, and measured times."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from hpc_trainer.config.schema.cluster import Executor, SnapshotMode
from hpc_trainer.launch.arrays import ActiveArray
from hpc_trainer.launch.follow import NOBODY, Followed
from hpc_trainer.launch.freeze import Grid
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.ledger import STARTS, Kind
from hpc_trainer.record.reading import told_few
from hpc_trainer.record.run_figures import ledger_of_run
from hpc_trainer.record.run_status import RunStatus
from hpc_trainer.record.spec import RunSpec
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import SweepStatus, read_status
from hpc_trainer.record.submissions import Submission
from hpc_trainer.slurm.shape import Shape

# Number of finished runs whose folders are read for the duration of a stop.
_STOPS_LOOKED_AT = 50
_REMOVED_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Known facts of a sweep: the state of each run, runs in the sweep's own queue, and jobs in Slurm's queue."""

    states: Mapping[str, RunState] = field(default_factory=dict)
    waiting: frozenset[str] = frozenset()
    active: tuple[ActiveArray, ...] = ()
    elements: tuple[str, ...] = ()
    """Job ids of the runs that are in Slurm's queue."""
    top_up_job: str | None = None
    """Id of a top-up job that has not begun."""
    shapes: frozenset[Shape] = frozenset()
    """Shapes that Slurm has accepted in this sweep before."""
    specs: Mapping[str, RunSpec] = field(default_factory=dict)
    """Submitted run by run id."""
    codes: Mapping[str, str] = field(default_factory=dict)
    """Digest of the frozen code of each run's latest submission, by run id; "" with snapshot=off.

    A run without code to freeze, because all of it was installed, is absent."""
    stop_s: Mapping[Shape, float] = field(default_factory=dict)
    """Measured seconds that the slowest run of a shape needs to stop and save, by shape."""
    steps: Mapping[str, int] = field(default_factory=dict)
    """Step that each interrupted run has reached, by run id."""
    waiting_jobs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Ids of the jobs of each run that wait in Slurm's queue, by run id."""
    start_s: Mapping[Shape, float] = field(default_factory=dict)
    """Median seconds from the allocation to the first step, by shape without time limit (`timeless`)."""
    hold: str | None = None
    """Hold of the whole sweep in words: by whom, since when and why; None if there is none."""
    notes: tuple[str, ...] = ()
    """Notes for the user on unreadable files of the sweep, and on runs that are left alone."""
    followed: Followed = NOBODY
    """Runs that the runs to submit follow (`after`), with their states."""
    to_draw: int | None = None
    """Number of trials of a search, whose grid is a sample of one run; None for a grid."""


def known_of(sweep: SweepPaths, grid: Grid | None = None) -> Known:
    """Return the known facts of a sweep; empty if it was never submitted."""
    return what_is_known(read_status(sweep), grid) if sweep.exists else Known()


def what_is_known(status: SweepStatus, grid: Grid | None = None) -> Known:
    """Return the known facts of a sweep from its status.

    Args:
        grid: its runs that the sweep does not list become UNKNOWN if a job that no file describes may have them.
    """
    own = [spec.run_id for spec in grid.specs] if grid is not None else []
    claimed = {run_id: why for run_id in own if run_id not in status.specs and (why := status.lost.cause(run_id))}
    in_queue = [run for run in status.open_runs.values() if run.state.is_active and run.own_job is not None]
    submitted = {
        run_id
        for submission in status.ledger.submissions
        if submission.executor == Executor.slurm.value and submission.job_id is not None
        for run_id in submission.run_ids
    }
    return Known(
        states={
            **status.states,
            **dict.fromkeys(status.removed, RunState.NEW),
            **dict.fromkeys(claimed, RunState.UNKNOWN),
        },
        waiting=frozenset(run.run_id for run in status.waiting),
        elements=tuple(str(run.own_job) for run in in_queue),
        steps={run.run_id: run.step for run in status.open_runs.values() if run.state.needs_submit and run.step},
        waiting_jobs={
            run.run_id: (run.waiting_job, *(job_id for _, job_id in run.rivals))
            for run in status.open_runs.values()
            if run.waiting_job is not None and not run.is_claimed
        },
        top_up_job=status.top_up_job,
        active=tuple(_active(in_queue)),
        specs=status.specs,
        codes=_codes(status),
        stop_s=_slowest_stops(status),
        start_s=_median_starts(status),
        hold=None if status.hold is None else status.hold.words,
        shapes=frozenset(
            shape
            for run_id, spec in status.specs.items()
            if run_id in submitted and not spec.is_lost
            for shape in (spec.shape, *(other.shape for other in spec.others))
        ),
        notes=(
            *told_few(status.faults),
            *status.left_alone,
            *dict.fromkeys(claimed.values()),
            *_removed_notes(status, own),
        ),
    )


def _removed_notes(status: SweepStatus, run_ids: Iterable[str]) -> list[str]:
    """Return notes on runs of the grid that `rm` removed: they begin anew."""
    removed = [(run_id, status.removed[run_id]) for run_id in run_ids if run_id in status.removed]
    lines = (f"{run_id} was {removal.words}: it begins anew, at step 0." for run_id, removal in removed)
    return first_few(lines, _REMOVED_SHOWN, "removed runs begin anew")


def _active(in_queue: Iterable[RunStatus]) -> Iterator[ActiveArray]:
    """Yield the arrays and successor jobs of these runs, in the order of their submission."""
    of_job: dict[str, list[Submission]] = {}
    for run in in_queue:
        for submission in (run.submission, *(rival for rival, _ in run.rivals)):
            if submission is not None and submission.job_id is not None:
                of_job.setdefault(submission.job_id, []).append(submission)
    for job_id, (first, *others) in sorted(of_job.items(), key=lambda item: item[1][0].time):
        parallelism = first.parallelism or max(1, len(first.run_ids))
        yield ActiveArray(
            job_id=job_id, hardware=first.hardware, parallelism=parallelism, num_active=1 + len(others),
            choice=None if first.race is None else first.choice,
        )  # fmt: skip


def _codes(status: SweepStatus) -> dict[str, str]:
    """Return the digest of each run's code, from its newest submission or its entry in the sweep's own queue."""
    codes: dict[str, str] = {}
    for submission in status.ledger.submissions:
        code = submission.code
        if code is None and submission.run_ids:  # a submission has one snapshot, so its first run stands for all
            spec = status.specs.get(submission.run_ids[0])
            if spec is not None and spec.config.get("snapshot", {}).get("mode") == SnapshotMode.off.value:
                code = ""
        if code is not None:
            codes.update(dict.fromkeys(submission.run_ids, code))
        else:
            for run_id in submission.run_ids if codes else ():
                codes.pop(run_id, None)
    return codes | {
        run_id: submission.code for run_id, submission in status.ledger.waiting.items() if submission.code is not None
    }


def _slowest_stops(status: SweepStatus) -> dict[Shape, float]:
    """Return the slowest stop in seconds by shape, of open runs and of the last 50 completed runs."""
    slowest: dict[Shape, float] = {}
    done = [run_id for run_id, state in status.states.items() if state is RunState.COMPLETED][-_STOPS_LOOKED_AT:]
    for run in (*status.open_runs.values(), *map(status.run, done)):
        if run.stop_s is not None:
            slowest[run.spec.shape] = max(run.stop_s, slowest.get(run.spec.shape, 0.0))
    return slowest


def _median_starts(status: SweepStatus) -> dict[Shape, float]:
    """Return the median seconds from the allocation to the first step, by shape without time limit."""
    begun = [run for run in status.open_runs.values() if run.attempts][-_STOPS_LOOKED_AT:]
    done = [run_id for run_id, state in status.states.items() if state is RunState.COMPLETED][-_STOPS_LOOKED_AT:]
    starts_of: dict[Shape, list[float]] = {}
    for run in itertools.chain(begun, map(status.run, done)):
        ledger = ledger_of_run(status, run)
        for attempt in () if ledger is None else ledger.attempts:
            if any(attempt.seconds.get(kind) for kind in (Kind.step, Kind.program)):
                start_s = math.fsum(attempt.seconds.get(kind, 0.0) for kind in STARTS)
                starts_of.setdefault(timeless(run.spec.shape), []).append(start_s)
    return {shape: statistics.median(starts) for shape, starts in starts_of.items()}


def timeless(shape: Shape) -> Shape:
    """Return the shape without its time limit, which does not change how fast a run starts."""
    return dataclasses.replace(shape, time_limit_min=0, signal_lead_s=0)


def first_few(lines: Iterable[str | None], most: int, what: str) -> list[str]:
    """Return the first `most` distinct lines, and a line with the number of further `what`."""
    distinct = list(dict.fromkeys(line for line in lines if line is not None))
    more = [f"{len(distinct) - most} more {what}."] if len(distinct) > most else []
    return [*distinct[:most], *more]
