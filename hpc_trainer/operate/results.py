"""Table of results, one row per run: its axes, its metrics, its cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_trainer.domains import contributions
from hpc_trainer.errors import ConfigError, valid
from hpc_trainer.record.spec import (
    find_axes,
    typed_axes,
)
from hpc_trainer.record.status import (
    RunStatus,
    SweepStatus,
    gpu_hours,
    newest_metrics,
)


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns that a domain adds to the table (hook `result_columns`)."""

    names: frozenset[str]
    """Names of all columns: a metric with one of these names gets the prefix TOLD."""
    of: Callable[[SweepStatus, RunStatus], Mapping[str, Any]]
    """Returns the known values of a run by column."""


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
    metrics_now, step = newest_metrics(status, run)
    metrics = {f"{TOLD}{name}" if name in taken else name: value for name, value in metrics_now.items()}
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
