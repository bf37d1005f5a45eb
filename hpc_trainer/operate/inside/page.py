"""One run on one HTML page: verdict, evidence, advice, attempts, flight records, logs, telemetry and metrics."""

from __future__ import annotations

import dataclasses
import html
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc_trainer.operate.inside.hang import LANES_STYLE, MOST_LANES, join, lanes, seconds, size
from hpc_trainer.operate.logs import log_files
from hpc_trainer.operate.report.charts import Line, figure, line_chart
from hpc_trainer.operate.report.data import Curve, curves_of
from hpc_trainer.operate.report.page import table, whole_page
from hpc_trainer.operate.report.telemetry import Chart, charts_of, render_telemetry
from hpc_trainer.operate.why import Why, explain
from hpc_trainer.record.flight import Flight, read_flights
from hpc_trainer.record.journal import read_heartbeat
from hpc_trainer.record.metrics import read_metrics
from hpc_trainer.record.reading import Faults, read_ends
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import RunStatus, SweepStatus

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


# States without anything to explain: the run ended as it should.
_AT_PEACE = (RunState.COMPLETED, RunState.CANCELLED)
# Seconds by which the clocks of two nodes may differ.
_CLOCKS_S = 30.0
_LOGS, _LOG_LINES, _LOG_BYTES = 16, 40, 64_000


def flights_of(status: SweepStatus, run: RunStatus) -> dict[int, Flight]:
    """Return the flight records of the newest attempt's end, by rank; {} if there are none or the run is well."""
    newest = run.attempts[-1] if run.attempts else None
    if newest is None or run.state in _AT_PEACE or (run.state.is_active and not newest.has_ended):
        return {}
    paths = status.sweep.run(run.run_id)
    flights = read_flights(paths, newest.attempt, status.faults_of(run.run_id))
    # A rank that was silent for long and then continued has left a record that does not describe the end.
    beat = float(read_heartbeat(paths.heartbeat, Faults()).get("time", 0.0))
    return {rank: flight for rank, flight in flights.items() if flight.time > beat - _CLOCKS_S}


def explain_hang(status: SweepStatus, run: RunStatus, flights: Mapping[int, Flight]) -> Why:
    """Return the explanation of `explain`, led by the joint reading of the flight records, with that rank's log."""
    joined = join(flights)
    why = explain(status, run, rank=joined.rank)
    return why if joined.says is None else dataclasses.replace(why, evidence=[joined.says, *why.evidence])


def gather_page(status: SweepStatus, run: RunStatus, why: Why, flights: Mapping[int, Flight]) -> RunPage:
    """Return the content of the run's page; files that cannot be read become notes on the page."""
    paths, faults = status.sweep.run(run.run_id), status.faults_of(run.run_id)
    newest = run.attempts[-1].attempt if run.attempts else 0
    files = [path for path in log_files(status, run, None) if path.name.startswith(f"attempt-{newest:03d}.")]
    return RunPage(
        why=why,
        flights=flights,
        logs=[Log(name=path.name, lines=_last_lines(path, faults)) for path in files[:_LOGS]],
        curves=curves_of(read_metrics(paths.metrics, faults)),
        telemetry=charts_of(status, run, of_attempt=newest, always_hosts=True),
        notes=[*status.faults],
    )


def _last_lines(path: Path, faults: Faults) -> list[str]:
    return read_ends(path, faults, last=_LOG_BYTES)[1].decode(errors="replace").splitlines()[-_LOG_LINES:]
