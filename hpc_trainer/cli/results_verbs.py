"""`hpc-trainer results`: one row a run, chosen, averaged and sorted, as a table or a file."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape

from hpc_trainer.cli import run_verbs
from hpc_trainer.cli.common import (
    Least,
    as_typed,
    axis_value,
    counts_line,
    figure,
    narrow_axes,
    one_line,
    print_json,
    print_table,
    say,
    short_duration,
    short_headings,
    terminal_width,
    warn,
)
from hpc_trainer.errors import ConfigError
from hpc_trainer.operate.find import configured_runs_dir, find_sweep
from hpc_trainer.operate.formats import csv_text, latex_text, markdown_text, shown_cell, shown_columns, write_parquet
from hpc_trainer.operate.results import BEST_STEP, ResultTable, needs_best, result_table
from hpc_trainer.operate.where import Where, parse_where
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import SweepStatus, read_status


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Choice of rows, columns and format that the options of `results` make."""

    sort: str | None = None
    group_by: Sequence[str] = ()
    where: str | None = None
    columns: Sequence[str] = ()
    format: str | None = None
    """`json`, `csv`, `latex` or `markdown`; None: a table for people."""
    parquet: Path | None = None

    @property
    def is_export(self) -> bool:
        """True if every column is wanted, with all digits."""
        return self.format in ("json", "csv") or self.parquet is not None

    def table(self, status: SweepStatus) -> ResultTable:
        """Return the rows that are asked for.

        Raises:
            ConfigError: an option names a column that is not there, or its text cannot be read.
        """
        condition: Where | None = None if self.where is None else parse_where(self.where)
        named = [*self.columns, self.sort or "", *(() if condition is None else condition.names)]
        best = self.is_export or needs_best([name.lstrip("-") for name in named])
        is_typed = self.is_export or bool(self.format)
        table = result_table(status, typed=is_typed, best=best).where(condition).means_over(self.group_by)
        if self.sort is not None:
            table = table.sorted_by(self.sort)
        return table.select(self.columns)


def chosen_format(**formats: bool) -> str | None:
    """Return the one format that was asked for, or None.

    Raises:
        ConfigError: several were asked for.
    """
    chosen = [name for name, is_chosen in formats.items() if is_chosen]
    if len(chosen) > 1:
        raise ConfigError(f"--{' and --'.join(chosen)} are several formats. Give one of them.")
    return chosen[0] if chosen else None


def run_results(
    name: str | None, runs_dir: Path | None, *, sort: str | None, as_json: bool, every_run: bool = False,
    asked: Asked | None = None,
) -> None:  # fmt: skip
    """Print the results as asked; `every_run` prints a line for each of any number of runs."""
    asked = Asked(sort=sort, format="json" if as_json else None) if asked is None else asked
    status = read_status(find_sweep(configured_runs_dir(runs_dir), name), is_look=True)
    table = asked.table(status)
    if asked.parquet is not None:
        write_parquet(table, asked.parquet)
        print(as_typed(f"{len(table.rows)} row(s) of {status.sweep.name} are in {asked.parquet}."))
    elif asked.format == "json":
        wanted = table.chosen
        print_json(
            list(table.rows) if wanted is None else [{column: row.get(column) for column in wanted}
                                                     for row in table.rows]
        )  # fmt: skip
    elif asked.format is not None:
        texts = {"csv": csv_text, "latex": latex_text, "markdown": markdown_text}
        print(texts[asked.format](table), end="")
    else:
        _print(status, table, asked, every_run=every_run)
        run_verbs.print_next_of_failed(status)
    if table.num_left_out and (asked.format or asked.parquet):
        print(f"Note: {_left_out(table)}", file=sys.stderr)
    warn(status)


def _left_out(table: ResultTable) -> str:
    return f"{table.num_left_out} run(s) are not complete: they are not in the means."


def print_results(status: SweepStatus) -> None:
    """Print the results of a sweep that has just ended."""
    _print(status, result_table(status), Asked(), every_run=False)


def _print(status: SweepStatus, table: ResultTable, asked: Asked, *, every_run: bool) -> None:
    """Print the rows in the order of the sweep, or best first with --sort or too many rows; then the best row."""
    columns = table.columns
    usual = table.compared_by
    by = (asked.sort or "").lstrip("-") or usual
    is_long = len(table.rows) > run_verbs.MOST_LINES and not every_run
    ranked = table.rows if asked.sort else table.sorted_by(by).rows if by and (by in columns) else table.rows
    rows = ranked if asked.sort or is_long else table.rows
    shown = rows[: run_verbs.SHOWN_OF_MORE] if is_long else rows
    if rows:
        _print_rows(table, shown)
    elif asked.where is not None:
        say(f"No run of {status.sweep.name} fits --where {asked.where}")
    if len(shown) < len(rows):
        first = f", the first by {by}" if by else ""
        note = f"{len(shown)} of {len(rows)} runs{first}; a line for each: hpc-trainer results --all"
        print(as_typed(f"{note} {status.sweep.name}"))
    is_of_text = any(isinstance(row.get(by or ""), str) for row in ranked)
    _say_best(table, usual if is_of_text else by)
    if table.num_left_out:
        say(_left_out(table))
    say(f"Sweep {status.sweep.name}: {counts_line(status.counts)}. Folder: {status.sweep.folder}")
    if not status.specs and not status.pools:
        say(run_verbs.no_runs_words(status))


def _print_rows(table: ResultTable, rows: Sequence[dict[str, Any]]) -> None:
    """Print the table; on a terminal, print values that all rows share in lines above it."""
    columns = [column for column in shown_columns(table) if table.chosen is not None or _is_telling(table, column)]
    width = terminal_width()
    if width is not None and table.chosen is None and len(table.rows) > 1:
        alike = [column for column in columns if _is_alike(table, column)]
        shared = [f"{_heading(column, table).lower()}={_text(column, table.rows[0])}" for column in alike]
        for line in textwrap.wrap(f"All: {one_line(' '.join(shared))}", width) if shared else ():
            say(line)
        columns = [column for column in columns if column not in alike]
    headings = [_heading(column, table).upper() for column in columns]
    cells = [[_cell(column, row) for column in columns] for row in rows]
    axes = [_heading(column, table).upper() for column in columns if column in table.axes]
    short = short_headings(axes, headings)
    print_table(headings, cells, least=_gives_way(table, columns, cells, short), short=short)


def _gives_way(
    table: ResultTable, columns: Sequence[str], cells: Sequence[Sequence[str | RunState]], short: Mapping[str, str]
) -> list[Least]:
    """Return the columns that a narrow terminal drops or cuts, the least useful first.

    The state stays, and longest of the others the metric by which the runs are compared, then their axes.
    """
    axes = [column for column in columns if column in table.axes]
    texts = [[str(row[columns.index(axis)]) for row in cells] for axis in axes]
    narrow = narrow_axes([_heading(axis, table).upper() for axis in axes], texts, short)
    first = _heading(columns[0], table).upper()
    fixed = {columns[0], "state", table.compared_by, *_LEAST, *axes}
    metrics = [_heading(column, table).upper() for column in columns if column not in fixed]
    identity: list[Least] = [(first, 20), (first, 12), *narrow] if columns[0] == "run_id" else narrow
    costs = [_heading(column, table).upper() for column in _LEAST if column in columns]
    return [
        *costs,
        *identity,
        *metrics[::-1],
        *(_heading(axis, table).upper() for axis in axes[::-1] if axis != columns[0]),
    ]


_LEAST = (
    "code", "queue_s", "core_hours", "redone_s", "attempts", "gpu_hours", "co2_g", "j_per_sample", "energy_kwh",
    "metrics_step", "wall_s", "step",
)  # fmt: skip
"""Columns that a narrow terminal drops, in this order."""
_TIMES = {"wall_s": "wall", "queue_s": "queue", "redone_s": "redone"}


def _is_telling(table: ResultTable, column: str) -> bool:
    """Return True if a column is shown by default: GPU-hours, else core-hours; redone time unless it is 0."""
    if column in ("gpu_hours", "core_hours"):
        has_gpus = any(row.get("gpu_hours") for row in table.rows)
        return has_gpus is (column == "gpu_hours")
    return column != "redone_s" or any(row.get(column) for row in table.rows)


def _is_alike(table: ResultTable, column: str) -> bool:
    if column == "run_id" or column.removesuffix(BEST_STEP) in table.metrics or column.rpartition(".")[0] in (
        table.metrics
    ):  # fmt: skip
        return False
    return len({_text(column, row) for row in table.rows}) == 1


def _heading(column: str, table: ResultTable) -> str:
    """Return the short name of a column of times, unless a metric or an axis has that name."""
    short = _TIMES.get(column, column)
    return column if short in (*table.metrics, *table.axes) else short


def _cell(column: str, row: Mapping[str, Any]) -> str | RunState:
    value = row.get(column)
    is_state = column == "state" and isinstance(value, str) and value in RunState.__members__
    return RunState(value) if is_state else _text(column, row)


def _text(column: str, row: Mapping[str, Any]) -> str:
    if column in _TIMES:
        return short_duration(row.get(column))
    return shown_cell({**row, column: axis_value(column, row.get(column))}, column)


def _say_best(table: ResultTable, metric: str | None) -> None:
    """Print the best row by a metric; print nothing if no row has the metric."""
    ranked = table.sorted_by(metric).rows if metric and table.rows and metric in table.columns else []
    best = ranked[0] if ranked else {}
    if metric and best.get(metric) is not None:
        axes = " ".join(f"{axis}={best[axis]}" for axis in table.axes if axis in best)
        whose = best.get("run_id", axes)
        say(f" ({whose})" if whose else "", f"Best {escape(metric)}: [bold]{escape(figure(best[metric]))}[/]")
