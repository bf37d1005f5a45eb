"""HTML page of one run: verdict, evidence, advice, attempts, last actions of ranks, logs, telemetry, metrics.

Like the report's page, it uses no other file, has no script, and escapes all text.
"""

from __future__ import annotations

import html
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hpc_trainer.operate.inside.hang import join, seconds, size
from hpc_trainer.operate.inside.lanes import LANES_STYLE, MOST_LANES, lanes
from hpc_trainer.operate.report.charts import Line, figure, line_chart
from hpc_trainer.operate.report.data import Curve
from hpc_trainer.operate.report.page import table, whole_page
from hpc_trainer.operate.report.telemetry import Chart, render_telemetry
from hpc_trainer.operate.why import Why
from hpc_trainer.runs.monitoring.flight import Flight
from hpc_trainer.runs.states import RunState

_BAD = (RunState.FAILED, RunState.OUT_OF_MEMORY, RunState.NODE_FAIL, RunState.TIMEOUT)
_COLLECTIVES, _RANKS_LISTED, _MAX_CHARTS = 6, 8, 12
_MAX_LINE = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Last lines of a rank's log."""

    name: str
    lines: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPage:
    """Content of the page."""

    why: Why
    flights: Mapping[int, Flight] = field(default_factory=dict)
    logs: Sequence[Log] = ()
    curves: Mapping[str, Curve] = field(default_factory=dict)
    telemetry: Sequence[Chart] = ()
    notes: Sequence[str] = ()


def render_run_page(page: RunPage, now: float | None = None) -> str:
    """Return the whole page. `now` is the time that the page states, in seconds since the epoch; None: the present."""
    why = page.why
    made = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time.time() if now is None else now))
    tone = "good" if why.state is RunState.COMPLETED else "bad" if why.state in _BAD else ""
    notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in page.notes)
    body = (
        f'<h1>{html.escape(why.run_id)}</h1><p class="soft"><span class="{tone}">{html.escape(why.state.value)}</span>'
        f"{'' if why.cause is None else ' · ' + html.escape(why.cause)} · made {made} by hpc-trainer why</p>{notes}"
        f'<p class="verdict">{html.escape(why.verdict)}</p>'
        f"{_list('Because', [*([] if why.frame is None else [why.frame]), *why.evidence])}"
        f"{_list('Do', why.advice)}{_list('Story', why.timeline)}"
        f"{_last_moments(page.flights)}{_stacks(page.flights)}{_logs(page.logs)}{render_telemetry(page.telemetry)}"
        f"{_metrics(page.curves)}"
    )
    return whole_page(why.run_id, body, LANES_STYLE)


def _list(title: str, lines: Sequence[str]) -> str:
    return f"<h2>{title}</h2>{_items(lines)}\n" if lines else ""


def _items(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{html.escape(line[:_MAX_LINE])}</li>" for line in lines) + "</ul>"


def _last_moments(flights: Mapping[int, Flight]) -> str:
    if not flights:
        return ""
    more = "" if len(flights) <= MOST_LANES else f" The first {MOST_LANES} of {len(flights)} ranks."
    return (
        f'<h2>What the ranks did last</h2><p class="soft">Each rank\'s newest step stands beside it.{more}</p>'
        f"<figure>{lanes(flights)}</figure>{_items(join(flights).lines)}{_collectives(flights)}\n"
    )


def _collectives(flights: Mapping[int, Flight]) -> str:
    rows = []
    for flight in list(flights.values())[:_RANKS_LISTED]:
        for call in flight.collectives[-_COLLECTIVES:]:
            what = f"{call.name}{' (to one rank)' if call.is_p2p else ''}"
            state = f"in it for {seconds(flight.time - call.begin)}" if call.is_open else "over"
            rows.append(
                [f"rank {flight.rank}", call.group, str(call.seq), what, call.shape or "-", size(call.num_bytes),
                 "-" if call.step is None else str(call.step), seconds(flight.time - call.begin), state]
            )  # fmt: skip
    if not rows:
        return ""
    columns = ["Rank", "Group", "Number", "Collective", "Tensors", "Size", "Step", "Before the end", "State"]
    left = len(flights) - _RANKS_LISTED
    more = f'<p class="soft">{left} more ranks are in their files.</p>' if left > 0 else ""
    return f"<h3>The last collectives</h3>{table(columns, rows, first_num=len(columns))}{more}"


def _stacks(flights: Mapping[int, Flight]) -> str:
    parts = [
        _folded(f"rank {flight.rank} on {flight.node}: {flight.why}", flight.stack)
        for flight in list(flights.values())[:MOST_LANES]
        if flight.stack
    ]
    return f"<h2>Where their code was</h2>{''.join(parts)}\n" if parts else ""


def _logs(logs: Sequence[Log]) -> str:
    parts = [_folded(f"{log.name}, the last {len(log.lines)} lines", log.lines) for log in logs if log.lines]
    return f"<h2>Logs</h2>{''.join(parts)}\n" if parts else ""


def _folded(title: str, lines: Sequence[str]) -> str:
    text = html.escape("\n".join(line[:_MAX_LINE] for line in lines))
    return f"<details><summary>{html.escape(title)}</summary><pre>{text}</pre></details>"


def _metrics(curves: Mapping[str, Curve]) -> str:
    charts = [
        figure(name, line_chart(name, [Line(name=name, points=curve, colour=0)], x_label="step", y_label=""), "")
        for name, curve in list(curves.items())[:_MAX_CHARTS]
    ]
    return f'<h2>Metrics</h2><div class="charts">{"".join(charts)}</div>\n' if charts else ""
