"""Table of results, one row per run: its axes, its metrics, its cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_trainer.domains import contributions
from hpc_trainer.errors import ConfigError, valid
from hpc_trainer.operate.axes import find_axes, typed_axes
from hpc_trainer.record.metrics import SPEED, newest_metrics_in, read_metrics
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import RunStatus, SweepStatus, gpu_hours


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns that a domain adds to the table (hook `result_columns`)."""

    names: frozenset[str]
    """Names of all columns: a metric with one of these names gets the prefix TOLD."""
    of: Callable[[SweepStatus, RunStatus], Mapping[str, Any]]
    """Returns the known values of a run by column."""


_MOST_RUNS = 200
# Metrics of one moment of training; a table of results shows the outcome.
_PASSING = ("lr", "grad_norm", "loss", *SPEED)


# Fixed columns of every row: a metric with the name of one of them, or of an axis, gets the prefix TOLD.
_OURS = frozenset({"run_id", "code", "metrics_step", "state", "step", "gpu_hours", "attempts"})
TOLD = "metrics."
"""Prefix of a metric's name if another column has that name."""


def result_rows(status: SweepStatus, *, typed: bool = False) -> list[dict[str, Any]]:
    """Return a flat dict for each run: run_id, axes, metrics, state, step, cost.

    `code` is present if runs have different code: the first 12 digits of the digest of the frozen code, or None if
    nothing was frozen. `metrics_step` is present if a run has not completed and its metrics are of another step.

    Args:
        status: the sweep.
        typed: return numbers and booleans of the configuration as such, not as the user typed them.
    """
    axes = find_axes([run.spec for run in status.runs])
    contributed: Sequence[Columns] = contributions("result_columns")
    taken = _OURS.union(*(columns.names for columns in contributed), *axes.values())
    if typed:
        axes = {run.run_id: typed_axes(run.spec, axes[run.run_id]) for run in status.runs}
    codes = {run.run_id: run.submission.code for run in status.runs if run.submission is not None}
    varies = len(set(codes.values())) > 1
    return [
        _row(
            status,
            run,
            axes[run.run_id],
            {"code": (codes.get(run.run_id) or "")[:12] or None} if varies else {},
            taken,
        )
        | {name: value for columns in contributed for name, value in columns.of(status, run).items()}
        for run in status.runs
    ]


def _row(
    status: SweepStatus, run: RunStatus, axes: Mapping[str, Any], code: Mapping[str, str | None], taken: Collection[str]
) -> dict[str, Any]:
    told, step = newest_metrics(status, run)
    metrics = {f"{TOLD}{name}" if name in taken else name: value for name, value in told.items()}
    return {
        "run_id": run.run_id,
        **axes,
        **code,
        **metrics,
        **({} if step in (None, run.step) else {"metrics_step": step}),
        "state": run.state.value,
        "step": None if run.progress == "-" else run.step,  # a program that reported no step
        "gpu_hours": round(gpu_hours(run), 4),
        "attempts": len(run.attempts),
    }


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
    """Return those of the run's metrics, or of `metrics`, that tell an outcome; for a program all except speed."""
    passing = _passing(run)
    return {key: value for key, value in (run.metrics if metrics is None else metrics).items() if key not in passing}


def _passing(run: RunStatus) -> Sequence[str]:
    return _PASSING if run.spec.num_steps else SPEED  # 0: a program, whose loss may be its only metric


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


def sort_rows(rows: Sequence[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Return the rows sorted by a column, best first: losses ascend, other columns descend; rows without a value last.

    Raises:
        ConfigError: no row has the column.
    """
    columns = list(dict.fromkeys(column for row in rows for column in row))
    if rows and key not in columns:
        raise ConfigError(f"--sort {key}: there is no such column. {valid(key, columns)}")
    lower_is_better = key.endswith("loss")
    numbers = [(_number(row.get(key)), row) for row in rows]
    numeric = [(number, row) for number, row in numbers if number is not None]
    best_first = sorted(numeric, key=lambda pair: pair[0], reverse=not lower_is_better)
    texts = [row for number, row in numbers if number is None and isinstance(row.get(key), str)]
    rest = [row for number, row in numbers if number is None and not isinstance(row.get(key), str)]
    return [*(row for _, row in best_first), *sorted(texts, key=lambda row: str(row[key])), *rest]


def _number(value: Any) -> float | None:
    """Return a value as a number, also text such as `1e-3`; None if it is not a number."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return None if math.isnan(number) else number
