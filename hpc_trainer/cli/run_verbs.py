"""status, logs and cancel: commands on submitted runs."""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hpc_trainer.cli.common import (
    Least,
    as_typed,
    axis_value,
    counts_line,
    cut,
    figure,
    narrow_axes,
    print_json,
    print_next,
    print_table,
    say,
    short_duration,
    short_headings,
    throughput_words,
    unfiltered,
    visible_log_line,
    warn,
)  # fmt: skip
from hpc_trainer.cli.options import tell_notes
from hpc_trainer.domains import contributions
from hpc_trainer.errors import ConfigError, SlurmError, valid
from hpc_trainer.operate.control import cancel_runs, hold_runs, is_whole_sweep
from hpc_trainer.operate.find import (
    check_one_each,
    configured_runs_dir,
    elsewhere_too,
    find_sweep,
    names_runs,
    select,
)
from hpc_trainer.operate.logs import follow_logs, log_files, read_logs
from hpc_trainer.operate.results import as_value, chosen_columns, named_apart, where_holds
from hpc_trainer.operate.where import parse_where
from hpc_trainer.record.chain import stages_of
from hpc_trainer.record.layout import OTHER_FOLDER, SweepPaths
from hpc_trainer.record.reading import exists
from hpc_trainer.record.run_figures import goodputs, metrics_now, outcome_metrics, submit_times, waits_since, wall_s
from hpc_trainer.record.run_status import RunStatus
from hpc_trainer.record.spec import find_axes
from hpc_trainer.record.states import CANCEL, RunState
from hpc_trainer.record.status import SweepStatus, read_status
from hpc_trainer.record.submissions import latest_of_each_run
from hpc_trainer.record.turns import pool_job
from hpc_trainer.slurm.queue import array_of, read_starts

_MOST_REMARKS = 5

# With more runs than this, the user gets a summary by state, unless all runs are asked for.
MOST_LINES = 200
SHOWN_OF_MORE = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRuns:
    """Choice of the runs and columns that `status` shows."""

    states: Sequence[str] = ()
    where: str | None = None
    failed: bool = False
    """True: only runs that failed or were interrupted."""
    columns: Sequence[str] = ()

    @property
    def is_some(self) -> bool:
        """True if runs are chosen by a condition."""
        return bool(self.states or self.where or self.failed)

    def of(self, status: SweepStatus) -> list[RunStatus]:
        """Return the chosen runs, in the order of the sweep.

        Raises:
            ConfigError: there is no such state or column.
        """
        names = [name.upper() for name in self.states]
        for name in names:
            if name not in RunState.__members__:
                raise ConfigError(f"--state {name}: there is no such state. {valid(name, RunState.__members__)}")
        fits = [
            run_id for run_id, state in status.states.items()
            if (not names or state.value in names)
            and (not self.failed or state.has_failed or state.is_interrupted)
        ]  # fmt: skip
        runs = [status.run(run_id) for run_id in fits] if len(fits) < len(status.specs) else status.runs
        if self.where is None:
            return runs
        condition = parse_where(self.where)
        if not runs:
            return []
        cells = run_cells(status, runs)
        condition = condition.fitted_to(list(dict.fromkeys(name for row in cells.values() for name in row)))
        return [run for run in runs if condition.holds(cells[run.run_id])]


def run_cells(status: SweepStatus, runs: Sequence[RunStatus]) -> dict[str, dict[str, Any]]:
    """Return run id -> value by column of `--where`: keys of `status --json`, axes as numbers, metrics by name."""
    axes, metrics = find_axes([run.spec for run in runs]), metrics_now(status, runs)
    times = submit_times(status.ledger)
    fixed = {
        run.run_id: {
            **{axis: as_value(text) for axis, text in axes[run.run_id].items()},
            "run_id": run.run_id, "state": run.state.value, "step": run.step, "num_steps": run.num_steps,
            "attempt": len(run.attempts), "job_id": run.job_id, "cause": run.cause, "node": run.node,
            "pending_reason": run.pending_reason, "wall_s": wall_s(run),
            "waiting_s": waiting_s(run, times.get(run.run_id, ())),
        }
        for run in runs
    }  # fmt: skip
    taken = {name for cells in fixed.values() for name in cells}
    return {run.run_id: {**_metric_cells(metrics[run.run_id][0], taken), **fixed[run.run_id]} for run in runs}


def _metric_cells(metrics: Mapping[str, Any], taken: Collection[str]) -> dict[str, Any]:
    """Return the metrics by column, as `results` names them; `taken` are the names of the other columns."""
    return {column: metrics[name] for name, column in named_apart(metrics, taken).items()}


def waiting_s(run: RunStatus, submitted: Sequence[float]) -> float | None:
    """Return for how many seconds a run has been waiting; None if it does not wait."""
    since = waits_since(run, submitted)
    return None if since is None else round(max(0.0, time.time() - since), 1)


def run_status(
    name: str | None, runs_dir: Path | None, *, watch: bool, as_json: bool, every_run: bool = False,
    chosen: ChosenRuns | None = None,
) -> None:  # fmt: skip
    """Show a sweep once, or until it ends with `watch`; `every_run` prints a line for each of any number of runs.

    Raises:
        ConfigError: `chosen` names a state or a column that is not there.
    """
    chosen = ChosenRuns() if chosen is None else chosen
    sweep = find_sweep(configured_runs_dir(runs_dir), name)
    stages = [] if sweep.exists or name is None else stages_of(configured_runs_dir(runs_dir), name)
    if stages:
        _status_of_stages(name or "", stages, watch=watch, as_json=as_json, every_run=every_run)
        return
    status = read_status(sweep, is_look=True)
    if chosen.is_some and watch:
        chosen.of(status)  # an error comes before a long watch
    if watch:
        from hpc_trainer.cli.live import watch as watch_sweep

        try:
            status = watch_sweep(sweep, set(status.states), quiet=as_json)
        except KeyboardInterrupt:
            status = read_status(sweep, is_look=True)
    if as_json:
        print_json(status_json(status, chosen))
    else:
        _print_status(status, chosen, every_run=every_run)


def _status_of_stages(name: str, stages: Sequence[SweepPaths], *, watch: bool, as_json: bool, every_run: bool) -> None:
    """Show the sweeps of a chain's stages, in order."""
    if watch:
        raise ConfigError(
            f"--watch shows one sweep, and {name} is a chain of {', '.join(sweep.name for sweep in stages)}."
        )
    statuses = [read_status(sweep, is_look=True) for sweep in stages]
    if as_json:
        print_json({"chain": name, "stages": [status_json(status) for status in statuses]})
        return
    for status in statuses:
        _print_sweep(status, ChosenRuns(), every_run=every_run)
        print()
    unfinished = next((status for status in statuses if status.has_active or status.open_runs), statuses[-1])
    print_next(_next_command(unfinished))


def status_json(status: SweepStatus, chosen: ChosenRuns | None = None) -> dict[str, Any]:
    """Return the stable form of `status --json` (docs/json.md)."""
    runs = status.runs if chosen is None or not chosen.is_some else chosen.of(status)
    goodput = goodputs(status, runs)
    metrics = metrics_now(status, runs)
    axes = find_axes([run.spec for run in runs])
    times, starts = submit_times(status.ledger), expected_starts(status, runs)
    return {
        "sweep": status.sweep.name,
        "counts": status.counts,
        "runs": [
            {"run_id": run.run_id, "state": run.state.value, "step": run.step, "num_steps": run.num_steps,
             "attempt": len(run.attempts), "job_id": run.job_id, "cause": run.cause,
             "pending_reason": run.pending_reason, "node": run.node, "metrics": metrics[run.run_id][0],
             "metrics_step": metrics[run.run_id][1], "speed": dict(run.speed), "remarks": list(run.remarks),
             "goodput": goodput.get(run.run_id), "axes": axes[run.run_id], "wall_s": round(wall_s(run), 1),
             "waiting_s": waiting_s(run, times.get(run.run_id, ())), "start": starts.get(run.run_id)}
            for run in runs
        ],
        "pools": [
            {"job_id": pool_job(pool.submission), "slots": pool.submission.slots, "at_work": list(pool.at_work),
             "waiting": list(pool.waiting), "places": pool.places, "busy": pool.busy, "pending_reason": pool.reason}
            for pool in status.pools
        ],
        "notes": status.notes,
        **{key: value for lines in _sweep_lines() for key, value in lines.json(status).items()},
    }  # fmt: skip


class SweepLines(Protocol):
    """Lines about a sweep that a domain adds to `status` (hook `sweep_lines`)."""

    def text(self, status: SweepStatus) -> Sequence[str]:
        """Return the lines; [] if the domain has none for this sweep."""

    def json(self, status: SweepStatus) -> Mapping[str, Any]:
        """Return the keys to add to `status --json`."""


def _sweep_lines() -> Sequence[SweepLines]:
    made: Sequence[SweepLines] = contributions("sweep_lines")
    return made


# At most one `squeue --start` a command, and about few arrays: Slurm prints a line for each element.
_MOST_ARRAYS, _STARTS_TIMEOUT_S = 5, 10.0


def expected_starts(status: SweepStatus, runs: Sequence[RunStatus]) -> dict[str, float]:
    """Return run id -> when Slurm expects a waiting run to start, in seconds since the epoch, if Slurm knows it.

    {} if there are too many runs, or squeue did not answer before: starts are no reason for a second wait.
    """
    jobs = {run.run_id: run.waiting_job for run in runs if run.waiting_job is not None}
    arrays = {array_of(job_id) for job_id in jobs.values()}
    if not jobs or len(runs) > MOST_LINES or len(arrays) > _MOST_ARRAYS or status.is_queue_silent:
        return {}
    try:
        starts = read_starts(list(jobs.values()), timeout_s=_STARTS_TIMEOUT_S)
    except SlurmError:
        return {}  # a courtesy: the states are known without it
    return {run_id: starts[job_id] for run_id, job_id in jobs.items() if job_id in starts}


def _print_status(status: SweepStatus, chosen: ChosenRuns, *, every_run: bool) -> None:
    _print_sweep(status, chosen, every_run=every_run)
    if status.specs:
        print_next(_next_command(status))
    elif status.pools:  # of a search
        print_next(f"status --watch {status.sweep.name}")
    else:  # the submit was killed, or had no room
        say(no_runs_words(status))


def no_runs_words(status: SweepStatus) -> str:
    """Return the folder of a sweep without runs, why none is there, and what to do."""
    return (
        f"{status.sweep.folder} has no runs: its `hpc-trainer submit` was refused or killed before it wrote one. "
        f"Repeat the same submit. {OTHER_FOLDER}"
    )


def _print_sweep(status: SweepStatus, chosen: ChosenRuns, *, every_run: bool) -> None:
    runs = chosen.of(status) if chosen.is_some else None
    num_runs = len(status.specs) if runs is None else len(runs)
    is_long = num_runs > MOST_LINES and not every_run
    if is_long and runs is None:
        _print_summary(status)
        runs = _of_a_person(status)[:SHOWN_OF_MORE]
    elif runs is None:
        runs = status.runs
    print_runs(status, runs[:SHOWN_OF_MORE] if is_long else runs, chosen.columns)
    if chosen.is_some:
        shown = min(num_runs, SHOWN_OF_MORE) if is_long else num_runs
        print(f"{num_runs} of {len(status.specs)} runs match" + (f", the first {shown}." if shown < num_runs else "."))
    elif is_long:
        print(as_typed(f"{num_runs} runs; a line for each: hpc-trainer status --all {status.sweep.name}"))
    say(f"Sweep {status.sweep.name}: {counts_line(status.counts)}.")
    for line in itertools.chain.from_iterable(lines.text(status) for lines in _sweep_lines()):
        say(as_typed(line))
    for note in (*status.notes, *run_remarks(status)):
        say(f"Note: {as_typed(note)}")


_MOST_OF_SUMMARY = 10


def _print_summary(status: SweepStatus) -> None:
    """Print the number of runs by array and state, and the nodes with the most running and failed runs."""
    submitted = latest_of_each_run(status.ledger.submissions)
    by_array: dict[str, Counter[str]] = {}
    for run_id, state in status.states.items():
        job_id = submitted[run_id][0].job_id if run_id in submitted else None
        by_array.setdefault(_short_job(job_id), Counter())[state.value] += 1
    by_node: dict[str, Counter[str]] = {}
    for run in status.open_runs.values():
        if run.node is not None and (run.state is RunState.RUNNING or run.state in _OF_A_PERSON):
            by_node.setdefault(run.node, Counter())[run.state.value] += 1
    for title, counts in (("ARRAY", by_array), ("NODE", by_node)):
        first = [*counts.items()][:_MOST_OF_SUMMARY] if title == "ARRAY" else _worst(counts)[:_MOST_OF_SUMMARY]
        if counts:
            print_table(
                [title, "RUNS", "STATES"], [[name, str(sum(of.values())), counts_line(of)] for name, of in first]
            )
        if len(first) < len(counts):
            print(f"and {len(counts) - len(first)} more {title.lower()}s")


def _worst(counts: Mapping[str, Counter[str]]) -> list[tuple[str, Counter[str]]]:
    """Return the nodes; those with the most runs that are not at work come first."""
    return sorted(counts.items(), key=lambda pair: pair[1][RunState.RUNNING.value] - sum(pair[1].values()))


def _of_a_person(status: SweepStatus) -> list[RunStatus]:
    """Return the runs that need the user's attention, failed ones first; if there are none, the running ones."""
    order = {state: place for place, state in enumerate(_OF_A_PERSON)}
    runs = [run for run in status.open_runs.values() if run.state in order]
    runs = runs or [run for run in status.open_runs.values() if run.state is RunState.RUNNING]
    return sorted(runs, key=lambda run: order.get(run.state, 0))


_OF_A_PERSON = (
    RunState.FAILED, RunState.OUT_OF_MEMORY, RunState.UNKNOWN, RunState.NODE_FAIL, RunState.TIMEOUT, RunState.HELD,
    RunState.PREEMPTED,
)  # fmt: skip


def run_remarks(status: SweepStatus) -> list[str]:
    """Return the remarks of open runs for the user, at most `_MOST_REMARKS`, and the number of the others."""
    remarks = [f"{run.run_id}: {text}." for run in status.open_runs.values() for text in run.remarks]
    more = [f"{len(remarks) - _MOST_REMARKS} more remarks of runs: hpc-trainer why {status.sweep.name}"]
    return remarks[:_MOST_REMARKS] + (more if len(remarks) > _MOST_REMARKS else [])


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
        print(f"{len(run_ids)} runs match; this is {run.run_id}.")
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


def run_cancel(
    names: list[str], sweep: str | None, runs_dir: Path | None, *, save: bool, as_json: bool, where: str | None = None
) -> None:
    """Cancel the named runs or sweep. A name is required, because a cancel cannot be undone."""
    if not names and sweep is None:
        raise ConfigError(
            "cancel needs the name of a sweep or of a run: `hpc-trainer sweeps` and `hpc-trainer status` list them."
        )
    folder = configured_runs_dir(runs_dir)
    stages = stages_of(folder, names[0]) if len(names) == 1 and not SweepPaths(folder / names[0]).exists else []
    if stages:
        _cancel_stages(names[0], stages, save=save, as_json=as_json)
        return
    status, run_ids = select(folder, names, sweep)
    check_one_each(status, names, sweep)
    warn(status)
    tell_notes([note] if (note := elsewhere_too(status, run_ids, names, sweep)) else ())
    run_ids = where_holds(status, run_ids, where)
    is_whole = where is None and is_whole_sweep(status, run_ids, names_runs=names_runs(status.sweep, names, sweep))
    cancelled = cancel_runs(status, status.open_among(run_ids), save=save, is_whole=is_whole)
    if as_json:
        print_json({"sweep": status.sweep.name, "cancelled": cancelled})
        return
    for run_id in cancelled if len(cancelled) <= MOST_LINES else ():
        print(f"cancelled {run_id}")
    say(_cancelled_words(status, run_ids, len(cancelled), is_whole=is_whole))
    print_next(f"status {status.sweep.name}")


def run_hold(names: list[str], sweep: str | None, runs_dir: Path | None, *, save: bool, as_json: bool) -> None:
    """Hold the named runs or sweep."""
    status, run_ids, is_whole = select_to_hold("hold", names, sweep, runs_dir)
    done = hold_runs(status, status.open_among(run_ids), save=save, is_whole=is_whole)
    if as_json:
        print_json(
            {"sweep": status.sweep.name, **{key: list(value) for key, value in dataclasses.asdict(done).items()}}
        )
        return
    for note in done.notes:
        say(f"Note: {as_typed(note)}")
    what = f"{len(done.held)} run(s) of {status.sweep.name}"
    is_held = is_whole and exists(status.sweep.hold, status.faults)
    nothing = f"Held {status.sweep.name}, of which no run waits" if is_held else f"Nothing of {status.sweep.name} waits"
    parts = [f"Held {what}" if done.held else nothing]
    parts += [f"{len(done.saving)} save a checkpoint and exit"] if done.saving else []
    later = ", and none of them restarts" if is_whole else ""
    parts += [f"{len(done.at_work)} at work continue (--save holds them too){later}"] if done.at_work else []
    say("; ".join(parts) + ".")
    what = status.sweep.name if is_whole else " ".join(names)
    print_next(f"release {what}" if done.held or done.saving or is_held else f"status {status.sweep.name}")


def select_to_hold(
    verb: str, names: Sequence[str], sweep: str | None, runs_dir: Path | None
) -> tuple[SweepStatus, list[str], bool]:
    """Return the status of the named sweep, the ids of the named runs, and True if they are the whole sweep.

    Raises:
        ConfigError: nothing is named.
    """
    if not names and sweep is None:
        raise ConfigError(f"{verb} needs the name of a sweep or of a run: `hpc-trainer sweeps` and `status` list them.")
    status, run_ids = select(configured_runs_dir(runs_dir), names, sweep)
    check_one_each(status, names, sweep)
    warn(status)
    tell_notes([note] if (note := elsewhere_too(status, run_ids, names, sweep)) else ())
    return status, run_ids, not names_runs(status.sweep, names, sweep)


def _cancel_stages(name: str, stages: Sequence[SweepPaths], *, save: bool, as_json: bool) -> None:
    """Cancel all stages of a chain, the last first, so that no stage sees that one before it was cancelled."""
    cancelled: dict[str, list[str]] = {}
    for sweep in reversed(stages):
        status = read_status(sweep)
        warn(status)
        cancelled[sweep.name] = cancel_runs(status, [*status.open_runs.values()], save=save, is_whole=True)
    if as_json:
        listed = [{"sweep": sweep.name, "cancelled": cancelled[sweep.name]} for sweep in stages]
        print_json({"chain": name, "stages": listed})
        return
    for sweep in stages:
        print(f"cancelled {len(cancelled[sweep.name])} run(s) of {sweep.name}")
    print_next(f"status {name}")


def _cancelled_words(status: SweepStatus, run_ids: Sequence[str], num_cancelled: int, *, is_whole: bool) -> str:
    """Return a sentence on the cancelled runs, and on the sweep's runs that continue."""
    num_ended = len(run_ids) - num_cancelled
    before = f"; {num_ended} had ended before" if num_ended else ""
    if not num_cancelled:
        if is_whole and status.pools:
            return f"Cancelled the slots of {status.sweep.name}, which draws no further trial{before}."
        return f"Nothing to cancel in {status.sweep.name}: {num_ended} run(s) had ended before."
    if is_whole:
        return f"Cancelled the sweep {status.sweep.name}: {num_cancelled} run(s){before}."
    named = {*run_ids}
    others = [run for run in status.open_runs.values() if run.state.is_active and run.run_id not in named]
    going = Counter(
        run.state.value for run in others if not exists(status.sweep.run(run.run_id).marker(CANCEL), status.faults)
    )
    left = f"its other runs continue: {counts_line(going)}" if going else "none of its other runs waits or works"
    return f"Cancelled {num_cancelled} of the {len(status.specs)} runs of {status.sweep.name}{before}; {left}."


def print_next_of_failed(status: SweepStatus) -> None:
    """Print the command `why` if a run has failed: a table of figures does not show the reason."""
    failed = next((run for run in status.open_runs.values() if run.state.has_failed), None)
    if failed is not None:
        print_next(f"why {failed.run_id}")


# Table of `status`: one line per run, and the columns that a narrow terminal drops.

_MUCH_WAIT = 0.05  # of a step
_MOST_OF_CAUSE = 120
_QUIET_S = 60.0
_AXES, _NARROW_AXES = "", "narrow"  # placeholders for one column per axis of the runs
_COLUMNS = (
    "RUN", "STATE", "STEP", "ETA", _AXES, "SPEED", "GOODPUT", "ATTEMPTS", "TIME", "JOB", "NODE", "METRICS", "CAUSE",
)  # fmt: skip
_NAMES = {name: name.lower() for name in _COLUMNS if name} | {"RUN": "run_id", "JOB": "job_id", "TIME": "wall_s"}
"""Names of the columns in `--columns`, by heading: those of `results` and of `status --json`."""
_FIRST = -1  # placeholder for the width of the first metric of each run
_NAMES = {name: name.lower() for name in _COLUMNS if name} | {"RUN": "run_id", "JOB": "job_id", "TIME": "wall_s"}
"""Names of the columns in `--columns`, by heading: those of `results` and of `status --json`."""
_FIRST = -1  # placeholder for the width of the first metric of each run
_GIVES_WAY: Sequence[Least] = (
    ("CAUSE", 60), "JOB", "ATTEMPTS", "TIME", "NODE", "GOODPUT", "SPEED", ("RUN", 20), ("CAUSE", 40),
    ("METRICS", _FIRST), ("CAUSE", 24), ("RUN", 16), _NARROW_AXES, ("CAUSE", 18), ("RUN", 12), ("CAUSE", 12),
    "METRICS", "CAUSE", "ETA", _AXES, "STEP",
)  # fmt: skip
"""Columns that a narrow terminal drops, or cuts to a width, in this order. The user must be able to tell the runs
apart: so the state, the step and the run's axes stay longest, then ETA, causes and metrics, then the figures of its
work."""


def print_runs(status: SweepStatus, runs: Sequence[RunStatus], chosen: Sequence[str] = ()) -> None:
    """Print a line for each of these runs; print nothing without runs.

    Args:
        status: the sweep.
        runs: the runs.
        chosen: the columns to print, by heading, axis or metric; all if empty.

    Raises:
        ConfigError: `chosen` names a column that is not there.
    """
    if not runs:
        return
    metrics, axes = metrics_now(status, runs), find_axes([run.spec for run in runs])
    keys = list(dict.fromkeys(key for run in runs for key in axes[run.run_id]))
    cells = _cells(status, runs, metrics)
    if chosen:
        _print_chosen(chosen, keys, [
            {**_metric_cells({key: figure(value) for key, value in metrics[run.run_id][0].items()},
                             {*keys, *_NAMES.values()}),
             **axes[run.run_id], **{_NAMES[heading]: cell for heading, cell in cells[run.run_id].items()}}
            for run in runs
        ])  # fmt: skip
        return
    headings = [key.upper() for key in keys]
    columns = [*_each(_COLUMNS, {name: name for name in _COLUMNS}, headings)]
    texts = [[str(axis_value(key, axes[run.run_id].get(key, "-"))) for run in runs] for key in keys]
    rows = [
        [*_each(_COLUMNS, cells[run.run_id], of_axes)]
        for run, of_axes in zip(runs, zip(*texts, strict=True) if texts else [()] * len(runs), strict=True)
    ]
    short = short_headings(headings, _COLUMNS)
    print_table(columns, rows, least=_gives_way(headings, texts, cells.values(), short), short=short)


def _cells(
    status: SweepStatus, runs: Sequence[RunStatus], metrics: Mapping[str, tuple[Mapping[str, Any], int | None]]
) -> dict[str, dict[str, Any]]:
    """Return run id -> heading -> cell of the columns that every sweep has."""
    goodput = goodputs(status, runs)
    times, starts = submit_times(status.ledger), expected_starts(status, runs)
    return {
        run.run_id: {
            "RUN": run.run_id, "STATE": run.state, "STEP": run.progress, "ETA": short_duration(run.eta_s),
            "SPEED": speed_words(run.speed),
            "GOODPUT": f"{goodput[run.run_id]:.0%}" if run.run_id in goodput else "-",
            "ATTEMPTS": str(len(run.attempts)), "TIME": _time(run, times.get(run.run_id, ())),
            "JOB": _short_job(run.job_id), "NODE": _nodes(run), "METRICS": _metrics(run, *metrics[run.run_id]),
            "CAUSE": _cause(run, starts.get(run.run_id)),
        }
        for run in runs
    }  # fmt: skip


def _print_chosen(chosen: Sequence[str], keys: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Print these columns. Raises ConfigError if one of them is not there."""
    known = list(dict.fromkeys(name for name in (*_NAMES.values(), *keys, *(name for row in rows for name in row))))
    names = chosen_columns(chosen, known)
    typed = {column: name for name in chosen if name != "all" for column in chosen_columns([name], known)}
    headings = [typed.get(name, name).upper() for name in names]
    print_table(headings, [[row.get(name, "-") for name in names] for row in rows])


def _gives_way(
    headings: Sequence[str], texts: Sequence[Sequence[str]], cells: Collection[Mapping[str, Any]],
    short: Mapping[str, str],
) -> list[Least]:  # fmt: skip
    """Return `_GIVES_WAY` for the axes with these headings and texts."""
    first = max(len(str(row["METRICS"]).partition(" ")[0]) for row in cells) + 1
    least: list[Least] = []
    for step in _GIVES_WAY:
        if step == _NARROW_AXES:
            least += narrow_axes(headings, texts, short)
        elif step == _AXES:
            least += headings[::-1]
        else:
            least.append(("METRICS", first) if step == ("METRICS", _FIRST) else step)
    return least


def _each(names: Sequence[Any], known: Mapping[Any, Any], of_axes: Sequence[Any]) -> Iterator[Any]:
    """Yield the value of each name, and the values of the axes in place of `_AXES`."""
    for name in names:
        if name == _AXES:
            yield from of_axes
        else:
            yield known[name]


def _metrics(run: RunStatus, metrics: Mapping[str, Any], step: int | None) -> str:
    shown = outcome_metrics(run, metrics) or {key: metrics[key] for key in ("loss",) if key in metrics}
    pairs = [f"{key}={figure(value)}" for key, value in shown.items()]
    return " ".join([*pairs, *([] if step is None or not pairs else [f"(of step {step})"])]) or "-"


def speed_words(speed: Mapping[str, float]) -> str:
    """Return the speed as `482k tokens/s mfu 42%`, or samples/s or steps/s; with the wait for data if that is much."""
    throughput = throughput_words(speed)
    figures = [] if throughput is None else [throughput]
    figures += [f"mfu {speed['mfu']:.0%}"] if "mfu" in speed else []
    waits = speed.get("data_wait_share", 0.0)
    return " ".join([*figures, *([f"data wait {waits:.0%}"] if waits >= _MUCH_WAIT else [])]) or "-"


def _time(run: RunStatus, submitted: Sequence[float]) -> str:
    """Return for how long a run has worked in all attempts, or `waits 2h05m` for one that waits."""
    waiting = waiting_s(run, submitted)
    if waiting is not None:
        return f"waits {short_duration(waiting)}"
    return short_duration(wall_s(run)) if run.attempts else "-"


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


def _cause(run: RunStatus, start: float | None = None) -> str:
    """Return why a run is not at work or complete; `start` is when Slurm expects a waiting run to start."""
    if start is not None:
        return f"{_cause(run)}; expected {_moment(start)}".removeprefix("-; ")
    if run.warning is not None:
        return run.warning
    if run.state is RunState.RUNNING and (run.age_s or 0.0) >= _QUIET_S:  # the run may hang: its speed is old
        return f"last sign of life {short_duration(run.age_s)} ago"
    if run.state is RunState.COMPLETED or run.reason is None or run.reason.upper() == run.state.value:
        return "-"
    age = f" ({short_duration(run.age_s)} ago)" if run.state is RunState.UNKNOWN and run.age_s is not None else ""
    return cut(run.reason, _MOST_OF_CAUSE) + age


def _moment(time_: float) -> str:
    """Return a time of today as `14:05`, and other times as `2026-11-26 14:05`."""
    local = time.localtime(time_)
    is_today = local[:3] == time.localtime()[:3]
    return time.strftime("%H:%M" if is_today else "%Y-%m-%d %H:%M", local)
