"""Table of `status`: one line per run, and the columns that a narrow terminal drops."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpc_trainer.cli.common import axis_value, figure, print_table, short_duration, throughput_words
from hpc_trainer.cli.fit_table import Least, cut
from hpc_trainer.operate.results import find_axes, metrics_now, outcome_metrics
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import RunStatus, SweepStatus, goodputs

_MUCH_WAIT = 0.05  # of a step
_MOST_OF_CAUSE = 120
_QUIET_S = 60.0

_AXES = ""  # placeholder for one column per axis of the runs
_COLUMNS = (
    "RUN", "STATE", "STEP", "ETA", _AXES, "SPEED", "GOODPUT", "ATTEMPTS", "JOB", "NODE", "METRICS", "CAUSE",
)  # fmt: skip
_GIVES_WAY: Sequence[Least] = (
    "JOB", "ATTEMPTS", "NODE", "GOODPUT", "SPEED", ("RUN", 20), ("METRICS", 18), ("CAUSE", 24), ("RUN", 16), _AXES,
    ("METRICS", 16), ("CAUSE", 18), "METRICS", "ETA", "STEP",
)  # fmt: skip
"""Columns that a narrow terminal drops, or cuts to a width, in this order. So state, step and ETA stay longest, then
causes, then the run's axes and metrics, then the figures of its work."""


def print_runs(status: SweepStatus, runs: Sequence[RunStatus]) -> None:
    """Print a line for each of these runs; print nothing without runs."""
    if not runs:
        return
    goodput, metrics = goodputs(status, runs), metrics_now(status, runs)
    axes = find_axes([run.spec for run in runs])
    keys = list(dict.fromkeys(key for run in runs for key in axes[run.run_id]))
    rows = []
    for run in runs:
        cells = {
            "RUN": run.run_id, "STATE": run.state, "STEP": run.progress, "ETA": short_duration(run.eta_s),
            "SPEED": speed_words(run.speed),
            "GOODPUT": f"{goodput[run.run_id]:.0%}" if run.run_id in goodput else "-",
            "ATTEMPTS": str(len(run.attempts)), "JOB": _short_job(run.job_id), "NODE": _nodes(run),
            "METRICS": _metrics(run, *metrics[run.run_id]), "CAUSE": _cause(run),
        }  # fmt: skip
        rows.append([*_each(_COLUMNS, cells, [axis_value(key, axes[run.run_id].get(key, "-")) for key in keys])])
    headings = [key.upper() for key in keys]
    columns = [*_each(_COLUMNS, {name: name for name in _COLUMNS}, headings)]
    least = [*_each(_GIVES_WAY, {name: name for name in _GIVES_WAY}, headings[::-1])]
    print_table(columns, rows, least=least)


def _each(names: Sequence[Any], known: Mapping[Any, Any], of_axes: Sequence[Any]) -> Iterator[Any]:
    """Yield the value of each name, and the values of the axes in place of `_AXES`."""
    for name in names:
        if name == _AXES:
            yield from of_axes
        else:
            yield known[name]


def _metrics(run: RunStatus, metrics: Mapping[str, Any], step: int | None) -> str:
    shown = outcome_metrics(run, metrics) or {key: metrics[key] for key in ("loss",) if key in metrics}
    words = [f"{key}={figure(value)}" for key, value in shown.items()]
    return " ".join([*words, *([] if step is None or not words else [f"(of step {step})"])]) or "-"


def speed_words(speed: Mapping[str, float]) -> str:
    """Return the speed as `482k tokens/s mfu 42%`, or samples/s or steps/s; with the wait for data if that is much."""
    throughput = throughput_words(speed)
    words = [] if throughput is None else [throughput]
    words += [f"mfu {speed['mfu']:.0%}"] if "mfu" in speed else []
    waits = speed.get("data_wait_share", 0.0)
    return " ".join([*words, *([f"data wait {waits:.0%}"] if waits >= _MUCH_WAIT else [])]) or "-"


def _short_job(job_id: str | None) -> str:
    """Return a Slurm job id unchanged, and a local queue as `local:PID`."""
    if job_id is None:
        return "-"
    return f"local:{job_id.rsplit(':', 2)[1]}" if ":" in job_id else job_id


def _nodes(run: RunStatus) -> str:
    """Return the nodes as Slurm lists them; after the end, the first node and the number of the others."""
    others = run.spec.shape.num_nodes - 1
    if run.node is None:
        return "-"
    return run.node if not others or re.search(r"[\[,]", run.node) else f"{run.node} +{others}"


def _cause(run: RunStatus) -> str:
    if run.warning is not None:
        return run.warning
    if run.state is RunState.RUNNING and (run.age_s or 0.0) >= _QUIET_S:  # the run may hang: its speed is old
        return f"last sign of life {short_duration(run.age_s)} ago"
    if run.state is RunState.COMPLETED or run.reason is None or run.reason.upper() == run.state.value:
        return "-"
    age = f" ({short_duration(run.age_s)} ago)" if run.state is RunState.UNKNOWN and run.age_s is not None else ""
    return cut(run.reason, _MOST_OF_CAUSE) + age
