"""One row a run: what it was asked, what came out, what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpc_trainer.operate.status import RunStatus, SweepStatus, gpu_hours

# Metrics of one moment of training; a table of results wants the outcome.
_PASSING = ("lr", "steps_per_s", "samples_per_s", "grad_norm", "loss")


def result_rows(status: SweepStatus) -> list[dict[str, Any]]:
    """A flat dict for each run: run_id, the axes' values, metrics, state, gpu_hours, attempts."""
    return [
        {
            "run_id": run.run_id,
            **run.spec.axes,
            **outcome_metrics(run),
            "state": run.state.value,
            "gpu_hours": round(gpu_hours(run), 4),
            "attempts": len(run.attempts),
        }
        for run in status.runs
    ]


def outcome_metrics(run: RunStatus) -> dict[str, Any]:
    """The run's metrics that tell an outcome, as eval_accuracy."""
    return {key: value for key, value in run.metrics.items() if key not in _PASSING}


def sort_rows(rows: Sequence[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Rows by a column, best first: losses ascending, everything else descending; rows without it last."""
    lower_is_better = key.endswith("loss")
    have = [row for row in rows if row.get(key) is not None]
    return [
        *sorted(have, key=lambda row: row[key], reverse=not lower_is_better),
        *(row for row in rows if row.get(key) is None),
    ]
