"""Objects that the functions of `api.py` return: a notebook shows them as tables or text, a prompt as one line."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from hpc_trainer.domains import contributions
from hpc_trainer.errors import visible
from hpc_trainer.operate.formats import frame, has_pandas, html_text
from hpc_trainer.operate.results import BestRun, ResultTable, named_apart
from hpc_trainer.operate.show import SweepColumns, SweepLine
from hpc_trainer.operate.why import Why
from hpc_trainer.record.run_figures import metrics_now, outcome_metrics
from hpc_trainer.record.status import SweepStatus

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")
_CAUSE = 80  # characters of a cause in a table; `why` has all of it


class Best(BestRun):
    """Best trial of a search, which a notebook shows as a table."""

    def _repr_html_(self) -> str:
        row = {"run_id": self.run_id, "trial": self.trial, **self.params, self.metric: self.value}
        return html_text(ResultTable(rows=[row], axes=tuple(self.params), metrics=(self.metric,), costs=()))


class Rows(list[T]):
    """List of dicts or of objects with fields, which a notebook shows as a table."""

    def _repr_html_(self) -> str:
        rows: list[dict[str, Any]] = []
        for item in self:
            if isinstance(item, SweepLine):
                rows.append(_cells_of(item))
            else:
                rows.append(dict(item) if isinstance(item, dict) else dataclasses.asdict(item))  # type: ignore[call-overload]
        return html_text(ResultTable(rows=rows, axes=(), metrics=(), costs=()))


def _cells_of(line: SweepLine) -> dict[str, Any]:
    """Return a sweep's line as `sweeps` of the command line shows it, without its command."""
    contributed: Sequence[SweepColumns] = contributions("sweep_columns")
    cells = {"sweep": line.name, "runs": line.num_runs, "submitted": line.submitted, "by": line.executor}
    for columns in contributed:
        cells.update(zip(map(str.lower, columns.headings), columns.cells(line.more), strict=True))
    return cells


class Sweep(SweepStatus):
    """Status of every run of a sweep, shown as a table by a notebook, and as one line by a Python prompt."""

    def __repr__(self) -> str:
        return f"<Sweep {self.sweep.name}: {', '.join(f'{count} {state}' for state, count in self.counts.items())}>"

    def _repr_html_(self) -> str:
        metrics = {run_id: found for run_id, (found, _) in metrics_now(self, self.runs).items()}
        rows = []
        for run in self.runs:
            row = {"run_id": run.run_id, "state": run.state.value, "step": run.progress, "node": run.node}
            known = metrics[run.run_id]
            told = {**{key: known[key] for key in known.keys() & {"loss"}}, **outcome_metrics(run, known)}
            names = named_apart(told, {*row, "cause"})
            rows.append({**row, **{names[key]: value for key, value in told.items()}})
        columns = list(dict.fromkeys(column for row in rows for column in row))
        for row, run in zip(rows, self.runs, strict=True):
            row["cause"] = run.reason if run.reason is None or len(run.reason) <= _CAUSE else f"{run.reason[:_CAUSE]}.."
        notes = "".join(f"<p>{html.escape(visible(note))}</p>" for note in self.notes)
        table = ResultTable(rows=rows, axes=(), metrics=(), costs=(), chosen=[*columns, "cause"])
        return html_text(table) + notes


class Explanation(Why):
    """Explanation of one run, shown as text by a notebook, and as one line by a Python prompt."""

    def __repr__(self) -> str:
        return f"<Explanation of {self.run_id}: {self.state.value}, {self.diagnosis}: {visible(self.verdict)}>"

    def _repr_html_(self) -> str:
        parts = [f"<p><b>{html.escape(visible(self.run_id))}</b> {self.state.value}: {html.escape(self.verdict)}</p>"]
        for title, lines in (("Because", self.evidence), ("Do", self.advice), ("Story", self.timeline)):
            items = "".join(f"<li>{html.escape(visible(line))}</li>" for line in lines)
            parts.append(f"<p>{title}:</p><ul>{items}</ul>" if lines else "")
        return "".join(parts)


class Text(str):
    """Text of several lines, such as a log, which a notebook and a prompt show as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return visible(str(self))

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(visible(str(self)))}</pre>"


def shown_as(kind: type[T], value: Any) -> T:
    """Return a copy of a dataclass object as `kind`, its subclass that a notebook shows."""
    return kind(**{field.name: getattr(value, field.name) for field in dataclasses.fields(value)})


def as_frame(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> pd.DataFrame | Rows[dict[str, Any]]:
    """Return the rows as a pandas.DataFrame if pandas is installed, else as `Rows`."""
    if has_pandas():
        table: pd.DataFrame = frame(rows, columns)
        return table
    return Rows([{column: row.get(column) for column in columns} for row in rows])
