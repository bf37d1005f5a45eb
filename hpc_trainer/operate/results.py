"""Table of results, one row per run: its axes, its metrics, its cost; chosen, averaged over seeds, and sorted."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_trainer.config.schema.output import CheckpointConfig, compared_by, is_best_small, kept_best, small_is_better
from hpc_trainer.domains import contributions
from hpc_trainer.errors import ConfigError, RunStateError, valid
from hpc_trainer.operate.where import Where, column_named, parse_where
from hpc_trainer.record.ledger import Kind
from hpc_trainer.record.metrics import best_in
from hpc_trainer.record.reading import is_number
from hpc_trainer.record.run_figures import gpu_hours, ledger_of_run, newest_metrics, queue_s, submit_times, wall_s
from hpc_trainer.record.run_status import RunStatus
from hpc_trainer.record.spec import RunSpec, find_axes, typed_axes
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import SweepStatus
from hpc_trainer.record.summaries import stamp_of


@dataclass(frozen=True, slots=True, kw_only=True)
class BestRun:
    """Best trial of a search (hook `best_of`)."""

    sweep: str
    run_id: str
    trial: int
    """Number of the trial, from 0."""
    metric: str
    value: float
    rung: int | None
    """Step of `value` if no trial is complete; None for a complete trial's final value."""
    params: Mapping[str, Any]
    """Value of each axis of the search, by its key."""
    again: Sequence[str]
    """Overrides of `submit` that train this trial again with other seeds."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns that a domain adds to the table (hook `result_columns`)."""

    names: frozenset[str]
    """Names of all columns: a metric with one of these names gets the prefix TOLD."""
    of: Callable[[SweepStatus, RunStatus], Mapping[str, Any]]
    """Returns the known values of a run by column."""
    sums: frozenset[str] = frozenset()
    """Names of the columns that a mean over runs adds up, such as an energy."""


# Fixed columns of every row: a metric with the name of one of them, or of an axis, gets the prefix TOLD.
_COSTS = ("gpu_hours", "core_hours", "wall_s", "queue_s", "redone_s")
_OURS = frozenset({"run_id", "code", "metrics_step", "state", "step", "attempts", "n", "runs", *_COSTS})
TOLD = "metrics."
"""Prefix of a metric's name if another column has that name."""
BEST, BEST_STEP, STD = ".best", ".best_step", ".std"
"""Suffixes of the columns with a metric's best value, the step that had it, and its standard deviation over runs."""


@dataclass(frozen=True, kw_only=True)
class ResultTable:
    """Rows of results; a row lacks a column that its run has no value for."""

    rows: Sequence[dict[str, Any]]
    axes: Sequence[str]
    """Columns in which the runs differ."""
    metrics: Sequence[str]
    """Columns of metrics, without those of best values and deviations."""
    costs: Sequence[str]
    """Columns of costs, which a mean over runs adds up."""
    num_left_out: int = 0
    """Number of runs that are not in the means because they are not complete."""
    chosen: Sequence[str] | None = None
    """Columns that the user chose; None: all."""
    kept: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    """How the runs choose their best checkpoint, which shows the direction of that metric."""

    @functools.cached_property  # asked for several times, each in 12 ms for 10,000 rows
    def columns(self) -> list[str]:
        """The columns in the order of a table."""
        every = _columns_of(self.rows)
        return every if self.chosen is None else list(self.chosen)

    @property
    def compared_by(self) -> str | None:
        """The column by which the rows are compared (`config.schema.output.compared_by`); None if there is none."""
        shown = {name.removeprefix(TOLD): name for name in self.metrics if name in self.columns}
        metric = compared_by(self.kept, shown)
        return None if metric is None else shown[metric]

    def where(self, condition: Where | None) -> ResultTable:
        """Return the table with the rows that fulfil the condition.

        Raises:
            ConfigError: the condition names a column that no row has.
        """
        if condition is None or not self.rows:
            return self
        fitted = condition.fitted_to(self.columns)
        rows = [row for row in self.rows if fitted.holds(self._as_values(row))]
        return dataclasses.replace(self, rows=rows)

    def _as_values(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the row with numbers in place of the texts that a user typed on an axis."""
        return {**row, **{axis: as_value(row[axis]) for axis in self.axes if isinstance(row.get(axis), str)}}

    def sorted_by(self, key: str) -> ResultTable:
        """Return the table sorted by a column, best first; see `sort_rows`."""
        return dataclasses.replace(self, rows=sort_rows(self.rows, key, least_is_best=self._least_is_best))

    def _least_is_best(self, column: str) -> bool:
        metric = column.removesuffix(STD).removesuffix(BEST)
        if metric not in self.metrics:
            return False
        return column.endswith(STD) or is_best_small(self.kept, metric.removeprefix(TOLD))

    def select(self, columns: Sequence[str]) -> ResultTable:
        """Return the table with these columns in this order; `all` stands for every column.

        Raises:
            ConfigError: no row has one of the columns.
        """
        if not columns:
            return self
        return dataclasses.replace(self, chosen=chosen_columns(columns, self.columns) if self.rows else [*columns])

    def means_over(self, axes: Sequence[str]) -> ResultTable:
        """Return a row for each group of runs that differ only in these axes.

        A row has the mean of each metric over the group's complete runs, its standard deviation (over n - 1) if at
        least two runs have it, `n`, the number of complete runs, `runs`, the number of all, and the sums of the costs
        of all.

        Raises:
            ConfigError: the runs do not differ in one of `axes`.
        """
        if not axes or not self.rows:
            return self
        named = {axis: column_named(axis, self.axes) for axis in axes}
        for axis, column in named.items():
            if column is None:
                differ = valid(axis, self.axes) if self.axes else "They differ in nothing."
                raise ConfigError(f"--group-by {axis}: the runs do not differ in it. {differ}")
        kept = [axis for axis in self.axes if axis not in named.values()]
        groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for row in self.rows:
            groups.setdefault(tuple(row.get(key) for key in (*kept, "code")), []).append(row)
        rows = [self._mean_row(kept, group) for group in groups.values()]
        return dataclasses.replace(self, rows=rows, axes=kept, num_left_out=sum(row["runs"] - row["n"] for row in rows))

    def _mean_row(self, kept: Sequence[str], group: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        complete = [row for row in group if row["state"] == RunState.COMPLETED.value]
        means: dict[str, Any] = {}
        for column in (name for metric in self.metrics for name in (metric, f"{metric}{BEST}")):
            values = [float(row[column]) for row in complete if is_number(row.get(column))]
            if values:
                means[column], means[f"{column}{STD}"] = _mean_and_deviation(values)
        known = [cost for cost in self.costs if any(row.get(cost) is not None for row in group)]
        costs = {cost: round(math.fsum(row.get(cost) or 0.0 for row in group), 6) for cost in known}
        first = group[0]
        return {
            **{axis: first[axis] for axis in kept if axis in first},
            **({"code": first["code"]} if "code" in first else {}), **means,
            "n": len(complete), "runs": len(group),
            "state": ", ".join(f"{count} {state}" for state, count in Counter(row["state"] for row in group).items()),
            "attempts": sum(row["attempts"] for row in group), **costs,
        }  # fmt: skip


def _mean_and_deviation(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean, and the standard deviation over n - 1; None for one value, and for values that are not finite.

    Runs diverge: an exact sum of infinities of both signs, or of values near the largest float, is an error.
    """
    with contextlib.suppress(OverflowError):
        if all(map(math.isfinite, values)):
            return math.fsum(values) / len(values), statistics.stdev(values) if len(values) > 1 else None
    return sum(values) / len(values), None


def as_value(text: str) -> Any:
    """Return the number or the truth value that a text stands for; other texts unchanged."""
    if text in ("true", "false"):
        return text == "true"
    number = _number(text)
    return text if number is None else number


def result_table(status: SweepStatus, *, typed: bool = False, best: bool = False) -> ResultTable:
    """Return the table of all runs.

    `code` is present if runs have different code: the first 12 digits of the digest of the frozen code, or None if
    nothing was frozen. `metrics_step` is present if a run has not completed and its metrics are of another step.

    Args:
        status: the sweep.
        typed: return numbers and booleans of the configuration as such, not as the user typed them.
        best: add the best value of each metric, and its step, which needs the whole metrics.jsonl of each run.
    """
    runs = [status.run(run_id) for run_id in status.specs]
    axes = find_axes([run.spec for run in runs])
    contributed: Sequence[Columns] = contributions("result_columns")
    names = list(dict.fromkeys(axis for row in axes.values() for axis in row))
    newest = {run.run_id: newest_metrics(status, run) for run in runs}
    logged = dict.fromkeys(name for metrics, _ in newest.values() for name in metrics)
    taken = _OURS.union(*(columns.names for columns in contributed), names)
    taken |= {f"{name}{end}" for name in logged for end in (BEST, BEST_STEP, STD)}
    columns = named_apart(logged, taken)
    if typed:
        axes = {run.run_id: typed_axes(run.spec, axes[run.run_id]) for run in runs}
    codes = {run.run_id: run.submission.code for run in runs if run.submission is not None}
    varies = len(set(codes.values())) > 1
    times, kept = submit_times(status.ledger), kept_by(run.spec for run in runs)
    known_by = sorted(name for domain in contributed for name in domain.names)
    rows = [
        {
            "run_id": run.run_id,
            **axes[run.run_id],
            **({"code": (codes.get(run.run_id) or "")[:12] or None} if varies else {}),
            **_outcome(status, run, *newest[run.run_id], columns, best=kept if best else None),
            **_cost(status, run, times.get(run.run_id, ()), contributed, known_by),
        }
        for run in runs
    ]
    if status.summaries is not None:
        status.summaries.save()
    costs = [*_COSTS, *(name for domain in contributed for name in sorted(domain.sums))]
    return ResultTable(rows=rows, axes=names, metrics=list(columns.values()), costs=costs, kept=kept)


def named_apart(metrics: Iterable[str], taken: Collection[str]) -> dict[str, str]:
    """Return the column of each metric: its name, with the prefix TOLD if another column may have that name.

    The seed and the keys of `params` count as columns also where the runs do not differ in them. A name that has the
    prefix already gets another one, so that no two metrics share a column.
    """
    return {name: f"{TOLD}{name}" if _is_taken(name, taken) else name for name in metrics}


def _is_taken(name: str, taken: Collection[str]) -> bool:
    while name.startswith(TOLD) and name not in taken:
        name = name.removeprefix(TOLD)
    return name in taken or name == "seed" or name.startswith("params.")


def kept_by(specs: Iterable[RunSpec]) -> CheckpointConfig:
    """Return how runs choose their best checkpoint, from the first run with a readable configuration."""
    first = next((spec for spec in specs if not spec.is_lost), None)
    return kept_best({} if first is None else first.config.get("checkpoint", {}))


def runs_where(status: SweepStatus, run_ids: Sequence[str], condition: Where) -> list[str]:
    """Return the runs whose row in the table of results fulfils a condition.

    Raises:
        ConfigError: the condition names a column that the table does not have.
    """
    table = result_table(status, best=needs_best(condition.names)).where(condition)
    chosen = {row["run_id"] for row in table.rows}
    return [run_id for run_id in run_ids if run_id in chosen]


def where_holds(status: SweepStatus, run_ids: Sequence[str], where: str | None, option: str = "--where") -> list[str]:
    """Return the runs that fulfil a condition; all of them without one.

    Args:
        status: the sweep.
        run_ids: the runs.
        where: text of the condition.
        option: name of the option, for messages.

    Raises:
        ConfigError: the condition cannot be read, or names an unknown column.
        RunStateError: no run fulfils it.
    """
    if where is None:
        return [*run_ids]
    chosen = runs_where(status, run_ids, parse_where(where, option))
    if not chosen:
        raise RunStateError(f"{option} {where}: none of the {len(run_ids)} run(s) of {status.sweep.name} fulfils it.")
    return chosen


def _outcome(
    status: SweepStatus, run: RunStatus, metrics: Mapping[str, Any], step: int | None, columns: Mapping[str, str], *,
    best: CheckpointConfig | None,
) -> dict[str, Any]:  # fmt: skip
    """Return a run's newest metrics by column, its best ones from `best`, and their step if it is another one."""
    bests = _best_values(status, run, list(metrics), best) if best is not None and run.attempts else {}
    outcome: dict[str, Any] = {}
    for name, value in metrics.items():
        outcome[columns[name]] = value
        if name in bests:
            outcome[f"{columns[name]}{BEST}"], outcome[f"{columns[name]}{BEST_STEP}"] = bests[name]
    return {**outcome, **({} if step in (None, run.step) else {"metrics_step": step})}


def _best_values(
    status: SweepStatus, run: RunStatus, names: Sequence[str], how: CheckpointConfig
) -> Mapping[str, tuple[float, int]]:
    """Return name -> (best value, its step), from the run's summary if metrics.jsonl has not changed since."""
    paths = status.sweep.run(run.run_id)
    is_small = functools.partial(is_best_small, how)
    is_usual = all(is_small(name) == small_is_better(name) for name in names)  # else kept values are the other ends
    kept = status.summaries.figures(run.run_id) if status.summaries is not None else None
    if kept is None or not is_usual:
        return best_in(paths.metrics, names, is_small, last=run.step, faults=status.faults_of(run.run_id))
    stamp = list(stamp_of(paths.place, "metrics.jsonl") or ())
    if kept.get("metrics_stamp") == stamp and kept["best"].keys() >= set(names):
        best: Mapping[str, tuple[float, int]] = {name: value for name, value in kept["best"].items() if value}
        return best
    num_faults = len(status.faults)
    best = best_in(paths.metrics, names, is_small, last=run.step, faults=status.faults_of(run.run_id))
    if len(status.faults) == num_faults and status.summaries is not None:
        figures = {"metrics_stamp": stamp, "best": {name: best.get(name) for name in names}}
        status.summaries.add_figures(run.run_id, figures)
    return best


def _cost(
    status: SweepStatus, run: RunStatus, submitted: Sequence[float], contributed: Sequence[Columns],
    known_by: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    shape, seconds, waited = run.spec.shape, wall_s(run), queue_s(run, submitted)
    cores = shape.num_nodes * shape.tasks_per_node * shape.cpus_per_task
    return {
        "state": run.state.value,
        "step": run.step if run.num_steps or run.step else None,  # a program that reported no step
        "gpu_hours": round(gpu_hours(run), 6),
        "attempts": len(run.attempts),
        "core_hours": round(cores * seconds / 3600, 6),
        "wall_s": round(seconds, 1),
        "queue_s": None if waited is None else round(waited, 1),
        **_read_figures(status, run, contributed, known_by),
    }


def _read_figures(
    status: SweepStatus, run: RunStatus, contributed: Sequence[Columns], known_by: Sequence[str]
) -> Mapping[str, Any]:
    """Return the redone seconds and the columns of domains, which need further files, or a summary of them."""
    kept = status.summaries.figures(run.run_id) if status.summaries is not None else None
    if kept is not None and kept.get("columns") == known_by:
        values: Mapping[str, Any] = kept["values"]
        return values
    num_faults = len(status.faults)
    figures = {"redone_s": _redone_s(status, run)}
    for columns in contributed:
        figures.update(columns.of(status, run))
    if kept is not None and status.summaries is not None and len(status.faults) == num_faults:
        status.summaries.add_figures(run.run_id, {"columns": known_by, "values": figures})
    return figures


def _redone_s(status: SweepStatus, run: RunStatus) -> float | None:
    """Return the seconds of steps that were lost and repeated; None if no file says how the time was spent."""
    if len(run.attempts) < 2 and not any(attempt.guarded for attempt in run.attempts):
        return 0.0  # the usual case, in which the ledger's files need not be read
    ledger = ledger_of_run(status, run)
    return None if ledger is None else round(ledger.seconds.get(Kind.redone, 0.0), 1)


def chosen_columns(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the columns with these names, in this order and once each; `all` stands for every column.

    A heading of a table, in upper case or short (`RUN`, `wall`), is a name of its column too (`column_named`).

    Raises:
        ConfigError: there is no such column.
    """
    columns: dict[str, None] = {}
    for name in names:
        if name == "all" and name not in known:
            columns |= dict.fromkeys(known)
            continue
        column = column_named(name, known)
        if column is None:
            raise ConfigError(f"--columns {name}: there is no such column. {valid(name, known)}")
        columns[column] = None
    return [*columns]


def sort_rows(
    rows: Sequence[dict[str, Any]], key: str, *, least_is_best: Callable[[str], bool] | None = None
) -> list[dict[str, Any]]:
    """Return the rows sorted by a column, best first; rows without a value come last.

    Columns whose smallest value is the best ascend, and all others descend.

    Args:
        rows: the rows.
        key: the column; with `-` before its name the order is reversed.
        least_is_best: function that returns True if a column's smallest value is the best; None: its name decides.

    Raises:
        ConfigError: no row has the column.
    """
    columns = _columns_of(rows)
    is_reversed = key.startswith("-") and key not in columns
    typed = key[1:] if is_reversed else key
    name = column_named(typed, columns) if rows else typed
    if name is None:
        raise ConfigError(f"--sort {typed}: there is no such column. {valid(typed, columns)}")
    ascends = (least_is_best or small_is_better)(name) is not is_reversed
    numbers = [(_number(row.get(name)), row) for row in rows]
    numeric = [(number, row) for number, row in numbers if number is not None]
    best_first = sorted(numeric, key=lambda pair: pair[0], reverse=not ascends)
    texts = [row for number, row in numbers if number is None and isinstance(row.get(name), str)]
    rest = [row for number, row in numbers if number is None and not isinstance(row.get(name), str)]
    by_text = sorted(texts, key=lambda row: str(row[name]), reverse=is_reversed)
    return [*(row for _, row in best_first), *by_text, *rest]


def _columns_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    alike = dict.fromkeys(map(tuple, rows))  # most of 10,000 rows have the same columns
    return list(dict.fromkeys(column for columns in alike for column in columns))


def needs_best(names: Collection[str]) -> bool:
    """Return True if one of these columns is of a metric's best value, or all columns are asked for."""
    return any(name == "all" or name.removesuffix(STD).endswith((BEST, BEST_STEP)) for name in names)


def _number(value: Any) -> float | None:
    """Return a value as a number, also text such as `1e-3`; None if it is not a number."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return None if math.isnan(number) else number
