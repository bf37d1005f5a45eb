"""One run on one HTML page: verdict, evidence, advice, attempts, logs and metrics, with sections of domains."""

from __future__ import annotations

import html
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc_trainer.domains import contributions
from hpc_trainer.operate.logs import log_files
from hpc_trainer.operate.report.charts import Line, figure, line_chart
from hpc_trainer.operate.report.data import Curve, curves_of
from hpc_trainer.operate.report.page import whole_page
from hpc_trainer.operate.why import Why
from hpc_trainer.record.metrics import read_metrics
from hpc_trainer.record.reading import Faults, read_ends
from hpc_trainer.record.run_status import RunStatus
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import SweepStatus

_BAD = (RunState.FAILED, RunState.OUT_OF_MEMORY, RunState.NODE_FAIL, RunState.TIMEOUT)
_MAX_CHARTS = 12
_MAX_LINE = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Last lines of a rank's log."""

    name: str
    lines: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePart:
    """Sections that a domain adds to the page (hook `page_parts`), as HTML with all text escaped."""

    before_logs: str = ""
    after_logs: str = ""
    style: str = ""
    """Rules that the sections add to the style sheet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPage:
    """Content of the page."""

    why: Why
    logs: Sequence[Log] = ()
    curves: Mapping[str, Curve] = field(default_factory=dict)
    parts: Sequence[PagePart] = ()
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
        f"{''.join(part.before_logs for part in page.parts)}{_logs(page.logs)}"
        f"{''.join(part.after_logs for part in page.parts)}{_metrics(page.curves)}"
    )
    return whole_page(why.run_id, body, "".join(part.style for part in page.parts))


def _list(title: str, lines: Sequence[str]) -> str:
    return f"<h2>{title}</h2>{html_list(lines)}\n" if lines else ""


def html_list(lines: Sequence[str]) -> str:
    """Return lines of text as an HTML list; very long lines are cut."""
    return "<ul>" + "".join(f"<li>{html.escape(line[:_MAX_LINE])}</li>" for line in lines) + "</ul>"


def _logs(logs: Sequence[Log]) -> str:
    parts = [folded(f"{log.name}, the last {len(log.lines)} lines", log.lines) for log in logs if log.lines]
    return f"<h2>Logs</h2>{''.join(parts)}\n" if parts else ""


def folded(title: str, lines: Sequence[str]) -> str:
    """Return lines of text under a title that unfolds them."""
    text = html.escape("\n".join(line[:_MAX_LINE] for line in lines))
    return f"<details><summary>{html.escape(title)}</summary><pre>{text}</pre></details>"


def _metrics(curves: Mapping[str, Curve]) -> str:
    charts = [
        figure(name, line_chart(name, [Line(name=name, points=curve, colour=0)], x_label="step", y_label=""), "")
        for name, curve in list(curves.items())[:_MAX_CHARTS]
    ]
    return f'<h2>Metrics</h2><div class="charts">{"".join(charts)}</div>\n' if charts else ""


_LOGS, _LOG_LINES, _LOG_BYTES = 16, 40, 64_000


def gather_page(status: SweepStatus, run: RunStatus, why: Why) -> RunPage:
    """Return the content of the run's page; files that cannot be read become notes on the page."""
    paths, faults = status.sweep.run(run.run_id), status.faults_of(run.run_id)
    newest = run.attempts[-1].attempt if run.attempts else 0
    files = [path for path in log_files(status, run, None) if path.name.startswith(f"attempt-{newest:03d}.")]
    return RunPage(
        why=why,
        logs=[Log(name=path.name, lines=_last_lines(path, faults)) for path in files[:_LOGS]],
        curves=curves_of(read_metrics(paths.metrics, faults)),
        parts=[part_of(status, run) for part_of in contributions("page_parts")],
        notes=[*status.faults],
    )


def _last_lines(path: Path, faults: Faults) -> list[str]:
    return read_ends(path, faults, last=_LOG_BYTES)[1].decode(errors="replace").splitlines()[-_LOG_LINES:]
