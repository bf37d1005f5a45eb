"""status, logs, cancel and results: commands on submitted runs."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape

from hpc_trainer.cli.common import (
    Least,
    axis_value,
    counts_line,
    cut,
    figure,
    print_json,
    print_next,
    print_table,
    say,
    short_duration,
    throughput_words,
    warn,
)  # fmt: skip
from hpc_trainer.cli.options import tell_notes
from hpc_trainer.cli.terminal import as_typed, unfiltered, visible_log_line
from hpc_trainer.errors import ConfigError
from hpc_trainer.operate.cancel import cancel_runs
from hpc_trainer.operate.find import check_one_each, configured_runs_dir, elsewhere_too, find_sweep, select
from hpc_trainer.operate.logs import follow_logs, log_files, read_logs
from hpc_trainer.operate.results import result_rows, sort_rows
from hpc_trainer.record.reading import exists
from hpc_trainer.record.spec import find_axes
from hpc_trainer.record.states import CANCEL, RunState
from hpc_trainer.record.status import RunStatus, SweepStatus, goodputs, metrics_now, outcome_metrics, read_status
from hpc_trainer.record.turns import pool_job

_MOST_REMARKS = 5

# With more runs than this, the user gets a summary by state, unless all runs are asked for.
MOST_LINES = 200
SHOWN_OF_MORE = 20


def run_status(name: str | None, runs_dir: Path | None, *, watch: bool, as_json: bool, every_run: bool = False) -> None:
    """Show a sweep once, or until it ends with `watch`; `every_run` prints a line for each of any number of runs."""
    sweep = find_sweep(configured_runs_dir(runs_dir), name)
    status = read_status(sweep, is_look=True)
    if watch:
        from hpc_trainer.cli.live import watch as watch_sweep

        try:
            status = watch_sweep(sweep, set(status.states), quiet=as_json)
        except KeyboardInterrupt:
            status = read_status(sweep, is_look=True)
    if as_json:
        print_json(status_json(status))
    else:
        _print_status(status, every_run=every_run)


def status_json(status: SweepStatus) -> dict[str, Any]:
    """Return the stable form of `status --json` (docs/json.md)."""
    goodput = goodputs(status, status.runs)
    metrics = metrics_now(status, status.runs)
    axes = find_axes([run.spec for run in status.runs])
    return {
        "sweep": status.sweep.name,
        "counts": status.counts,
        "runs": [
            {"run_id": run.run_id, "state": run.state.value, "step": run.step, "num_steps": run.num_steps,
             "attempt": len(run.attempts), "job_id": run.job_id, "cause": run.cause,
             "pending_reason": run.pending_reason, "node": run.node, "metrics": metrics[run.run_id][0],
             "metrics_step": metrics[run.run_id][1], "speed": dict(run.speed), "remarks": list(run.remarks),
             "goodput": goodput.get(run.run_id), "axes": axes[run.run_id]}
            for run in status.runs
        ],
        "pools": [
            {"job_id": pool_job(pool.submission), "slots": pool.submission.slots, "at_work": list(pool.at_work),
             "waiting": list(pool.waiting), "places": pool.places, "busy": pool.busy, "pending_reason": pool.reason}
            for pool in status.pools
        ],
        "notes": status.notes,
    }  # fmt: skip


def _print_status(status: SweepStatus, *, every_run: bool) -> None:
    is_long = len(status.specs) > MOST_LINES and not every_run
    print_runs(status, _most_telling(status) if is_long else status.runs)
    if is_long:
        print(as_typed(f"{len(status.specs)} runs; a line for each: hpc-trainer status --all {status.sweep.name}"))
    say(f"Sweep {status.sweep.name}: {counts_line(status.counts)}.")
    for note in (*status.notes, *run_remarks(status)):
        say(f"Note: {as_typed(note)}")
    if status.specs:
        print_next(_next_command(status))
    else:  # the submit was killed, or had no room
        say("None of its runs was submitted: the same `hpc-trainer submit` begins again.")


def run_remarks(status: SweepStatus) -> list[str]:
    """Return the remarks of open runs for the user, at most `_MOST_REMARKS`, and the number of the others."""
    remarks = [f"{run.run_id}: {text}." for run in status.open_runs.values() for text in run.remarks]
    more = [f"{len(remarks) - _MOST_REMARKS} more remarks of runs: hpc-trainer why {status.sweep.name}"]
    return remarks[:_MOST_REMARKS] + (more if len(remarks) > _MOST_REMARKS else [])


def _most_telling(status: SweepStatus) -> list[RunStatus]:
    """Return the most important runs, at most `SHOWN_OF_MORE`: failed runs first, then interrupted and running ones."""
    order = {state: place for place, state in enumerate(_TELLING)}
    runs = [run for run in status.open_runs.values() if run.state in order]
    return sorted(runs, key=lambda run: order[run.state])[:SHOWN_OF_MORE]


_TELLING = (
    RunState.FAILED, RunState.OUT_OF_MEMORY, RunState.UNKNOWN, RunState.NODE_FAIL, RunState.TIMEOUT, RunState.HELD,
    RunState.PREEMPTED, RunState.RUNNING,
)  # fmt: skip


def _next_command(status: SweepStatus) -> str:
    runs = status.open_runs.values()
    failed = next((run for run in runs if run.state.has_failed), None)
    stopped = next((run for run in runs if run.state.needs_submit), None)
    if failed is None and status.has_active:
        return f"status --watch {status.sweep.name}"
    bad = failed or stopped
    return f"why {bad.run_id}" if bad is not None else f"results {status.sweep.name}"


def run_logs(
    name: str | None, sweep: str | None, runs_dir: Path | None,
    *, rank: int | None, follow: bool, tail: int | None, as_json: bool,
) -> None:  # fmt: skip
    """Print a run's logs; without a name, those of a failed run, else of a running one, else of the last started."""
    status, run_ids = select(configured_runs_dir(runs_dir), [name] if name else [], sweep, is_look=True)
    run = _most_interesting(status, run_ids)
    files = log_files(status, run, rank)
    warn(status)
    if as_json:
        print_json({"run_id": run.run_id, "files": [str(path) for path in files]})
        return
    if len(run_ids) > 1:
        print(f"{len(run_ids)} runs fit; this is {run.run_id}.")
    if follow:
        try:
            for line in follow_logs(status, run, rank):
                _print_log(line)
        except KeyboardInterrupt:
            return
    elif not files:
        print(f"{run.run_id} is {run.state.value} and has printed nothing yet.")
    for line in read_logs(files, tail) if not follow else ():
        _print_log(line)


def _print_log(line: str) -> None:
    print(visible_log_line(line), file=unfiltered(sys.stdout), flush=True)


def _most_interesting(status: SweepStatus, run_ids: Sequence[str]) -> RunStatus:
    for state in (RunState.FAILED, RunState.OUT_OF_MEMORY, RunState.RUNNING):
        for run_id in run_ids:
            if status.states[run_id] is state:
                return status.run(run_id)
    return max(map(status.run, run_ids), key=lambda run: run.attempts[-1].start_time if run.attempts else 0.0)


def run_cancel(names: list[str], sweep: str | None, runs_dir: Path | None, *, save: bool, as_json: bool) -> None:
    """Cancel the named runs or sweep. A name is required, because a cancel cannot be undone."""
    if not names and sweep is None:
        raise ConfigError(
            "cancel needs the name of a sweep or of a run: `hpc-trainer sweeps` and `hpc-trainer status` list them."
        )
    status, run_ids = select(configured_runs_dir(runs_dir), names, sweep)
    check_one_each(status, names, sweep)
    warn(status)
    tell_notes([note] if (note := elsewhere_too(status, run_ids, names, sweep)) else ())
    is_whole = len(run_ids) == len(status.specs)
    cancelled = cancel_runs(status, status.open_among(run_ids), save=save, is_whole=is_whole)
    if as_json:
        print_json({"sweep": status.sweep.name, "cancelled": cancelled})
        return
    for run_id in cancelled if len(cancelled) <= MOST_LINES else ():
        print(f"cancelled {run_id}")
    say(_cancelled_words(status, run_ids, len(cancelled)))
    print_next(f"status {status.sweep.name}")


def _cancelled_words(status: SweepStatus, run_ids: Sequence[str], num_cancelled: int) -> str:
    """Return a sentence on the cancelled runs and on the sweep's runs that go on."""
    num_ended = len(run_ids) - num_cancelled
    before = f"; {num_ended} had ended before" if num_ended else ""
    if not num_cancelled:
        return f"Nothing to cancel in {status.sweep.name}: {num_ended} run(s) had ended before."
    if len(run_ids) == len(status.specs):
        return f"Cancelled the sweep {status.sweep.name}: {num_cancelled} run(s){before}."
    named = {*run_ids}
    others = [run for run in status.open_runs.values() if run.state.is_active and run.run_id not in named]
    going = Counter(
        run.state.value for run in others if not exists(status.sweep.run(run.run_id).marker(CANCEL), status.faults)
    )
    left = f"its other runs go on: {counts_line(going)}" if going else "none of its other runs waits or works"
    return f"Cancelled {num_cancelled} of the {len(status.specs)} runs of {status.sweep.name}{before}; {left}."


def run_results(
    name: str | None, runs_dir: Path | None, *, sort: str | None, as_json: bool, every_run: bool = False
) -> None:
    """Print the table of results; `every_run` prints a line for each of any number of runs."""
    status = read_status(find_sweep(configured_runs_dir(runs_dir), name), is_look=True)
    if as_json:
        rows = result_rows(status, typed=True)
        print_json(sort_rows(rows, sort) if sort else rows)
    else:
        print_results(status, sort, every_run=every_run)
        print_next_of_failed(status)
    warn(status)


def print_next_of_failed(status: SweepStatus) -> None:
    """Print the command `why` if a run has failed, which a table of figures does not say."""
    failed = next((run for run in status.open_runs.values() if run.state.has_failed), None)
    if failed is not None:
        print_next(f"why {failed.run_id}")


def print_results(status: SweepStatus, sort: str | None = None, *, every_run: bool = False) -> None:
    """Print the results in the order of the sweep, or best first with `sort` or too many runs; then the best run."""
    rows = result_rows(status)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    usual = next((name for name in ("eval_accuracy", "eval_loss") if name in columns), None)
    by = sort or usual
    ranked = sort_rows(rows, by) if by else rows
    is_long = len(rows) > MOST_LINES and not every_run
    rows = ranked if sort or is_long else rows
    shown = rows[:SHOWN_OF_MORE] if is_long else rows
    print_table(
        [column.upper() for column in columns],
        [[_cell(column, row.get(column)) for column in columns] for row in shown],
        least=_LEAST_OF_RESULTS,
    )
    if len(shown) < len(rows):
        first = f", the first by {by}" if by else ""
        told = (
            f"{len(shown)} of {len(rows)} runs{first}; a line for each: hpc-trainer results --all {status.sweep.name}"
        )
        print(as_typed(told))
    _say_best(ranked, by if not any(isinstance(row.get(by or ""), str) for row in ranked) else usual)
    say(f"Sweep {status.sweep.name}: {counts_line(status.counts)}. Folder: {status.sweep.folder}")


def _say_best(rows: Sequence[dict[str, Any]], metric: str | None) -> None:
    """Print the best run by a metric; print nothing if no run has the metric."""
    best = sort_rows(rows, metric)[0] if metric and rows else {}
    if metric and best.get(metric) is not None:
        say(f" ({best['run_id']})", f"Best {escape(metric)}: [bold]{escape(figure(best[metric]))}[/]")


_LEAST_OF_RESULTS = ("CODE", "ATTEMPTS", "GPU_HOURS", "CO2_G", "J_PER_SAMPLE", "ENERGY_KWH", "METRICS_STEP", "STEP")


def _cell(column: str, value: Any) -> str | RunState:
    if value is None:
        return "-"
    return RunState(value) if column == "state" else figure(axis_value(column, value))


# Table of `status`: one line per run, and the columns that a narrow terminal drops.

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
