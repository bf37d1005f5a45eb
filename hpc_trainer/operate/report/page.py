"""Report as one HTML page: inline style and SVG, light and dark, no script, no other file.

Names and values come from configurations and from files that a user's own code wrote. So all text is escaped, and the
page's Content-Security-Policy forbids scripts and every request.
"""

from __future__ import annotations

import html
import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hpc_trainer.config.schema.output import compared_by, is_best_small
from hpc_trainer.errors import visible
from hpc_trainer.operate.report.charts import (
    INK,
    NUM_COLOURS,
    Line,
    bar_chart,
    colours_of,
    figure,
    legend,
    line_chart,
    number,
    parallel_chart,
    percent,
)
from hpc_trainer.operate.report.data import Panel, Report, RunReport, Scaling
from hpc_trainer.operate.results import as_value
from hpc_trainer.record.ledger import WORDS, Kind, RunLedger, duration, ledger_line
from hpc_trainer.record.reading import is_finite

_MOST_RUNS = 40
_WIDTH, _HEIGHT = 600, 18
_NARROW = 34
"""Width in pixels that the label of a share needs."""
_UNKNOWN = "unknown"
# (light, dark): work in blue and green, losses that a user can reduce in warm colours, the rest grey.
KIND_COLOURS = {
    Kind.step: ("#157f5b", "#2f9e77"), Kind.program: ("#157f5b", "#2f9e77"), Kind.data_wait: ("#cf4a12", "#e0703c"),
    Kind.redone: ("#b3315f", "#d45585"), Kind.compile: ("#6e56cf", "#8d78e6"), Kind.evaluation: ("#0969da", "#4593e8"),
    Kind.save_stall: ("#9a6b00", "#c08f2a"), Kind.start_up: ("#5b6570", "#7d8894"),
    Kind.imports: ("#7b8590", "#67727d"), Kind.rendezvous: ("#0b8aa8", "#3aa7c2"), Kind.restore: ("#a43c9f", "#c068bb"),
    Kind.hang: ("#c22d3a", "#e5626b"),
    Kind.shutdown: ("#949ea8", "#525d68"), _UNKNOWN: ("#a9b1b9", "#363f48"),
}  # fmt: skip


def _rules(shade: int) -> str:
    return "".join(f".k-{_name(kind)}{{fill:{colours[shade]}}}" for kind, colours in KIND_COLOURS.items())


def _name(kind: str) -> str:
    return kind.value if isinstance(kind, Kind) else kind


LEDGER_STYLE = (
    "table.ledger td{border:0;padding:3px 8px}table.ledger td.bar{width:60%;min-width:320px}"
    "svg.bar text{fill:#fff;font-size:11px;font-weight:600}svg.box{flex:none;width:12px;height:12px}"
    f"{_rules(0)}@media (prefers-color-scheme:dark){{{_rules(1)}}}"
)


def ledger_section(runs: Sequence[RunReport]) -> str:
    """Return a bar for each run with a ledger, at most 40: those with the longest allocations; else an empty string."""
    ledgers = [(run.run_id, run.ledger) for run in runs if run.ledger is not None and run.ledger.elapsed_s > 0]
    if not ledgers:
        return ""
    longest = {name for name, _ in sorted(ledgers, key=lambda pair: -pair[1].elapsed_s)[:_MOST_RUNS]}
    shown = [(name, ledger) for name, ledger in ledgers if name in longest]
    kinds = [kind for kind in WORDS if any(kind in ledger.seconds for _, ledger in shown)]
    is_unknown = any(ledger.unknown_s > 0 for _, ledger in shown)
    rows = "".join(_ledger_row(run_id, ledger) for run_id, ledger in shown)
    title = (
        "Where the time went" if len(ledgers) <= _MOST_RUNS else f"Where the time went: {_MOST_RUNS} of {len(ledgers)}"
    )
    return (
        f'<h2>{title}</h2><p class="soft">Each second of the allocations of a run, over all attempts; goodput is the '
        f'share of steps whose work was kept.</p><div class="wide"><table class="ledger">{rows}</table></div>'
        f"{_legend(kinds, is_unknown=is_unknown)}\n"
    )


def _ledger_row(run_id: str, ledger: RunLedger) -> str:
    goodput = "-" if ledger.goodput is None else percent(ledger.goodput)
    summary = f"{duration(ledger.elapsed_s)}, {len(ledger.attempts)} attempt(s), goodput {goodput}"
    name = html.escape(run_id).replace("-", "-<wbr>")
    return f'<tr><td class="id">{name}</td><td class="bar">{_bar(ledger)}</td><td>{summary}</td></tr>'


def _bar(ledger: RunLedger) -> str:
    parts: list[tuple[str, str, float]] = [
        (kind.value, word, ledger.seconds.get(kind, 0.0)) for kind, word in WORDS.items()
    ]
    parts.append((_UNKNOWN, _UNKNOWN, ledger.unknown_s))
    drawn, x = "", 0.0
    for name, word, seconds in parts:
        width = _WIDTH * seconds / ledger.elapsed_s
        if width <= 0:
            continue
        share = percent(seconds / ledger.elapsed_s)
        drawn += f'<rect class="k-{name}" x="{x:.2f}" y="0" width="{width:.2f}" height="{_HEIGHT}">'
        drawn += f"<title>{word}: {duration(seconds)}, {share}</title></rect>"
        if width >= _NARROW:
            middle = f"{seconds / ledger.elapsed_s:.0%}"
            drawn += f'<text class="mid" x="{x + width / 2:.1f}" y="{_HEIGHT / 2}" dy="0.35em">{middle}</text>'
        x += width
    line = html.escape(ledger_line(ledger) or "")
    return f'<svg class="bar" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{line}">{drawn}</svg>'


def _legend(kinds: Sequence[Kind], *, is_unknown: bool) -> str:
    named = [(kind.value, WORDS[kind]) for kind in kinds] + ([(_UNKNOWN, _UNKNOWN)] if is_unknown else [])
    items = "".join(
        f'<li><svg class="box" viewBox="0 0 12 12"><rect class="k-{name}" width="12" height="12"/></svg>{word}</li>'
        for name, word in named
    )
    return f'<ul class="legend">{items}</ul>'


# More lines cannot be told apart, more charts are not read, and the page stays small.
_MAX_LINES, _MAX_CHARTS = 60, 12
_MOST_OF_CAUSE = 1_000
FIRST_CHARTS = ("loss", "eval_loss", "eval_accuracy")
BAD = ("FAILED", "OUT_OF_MEMORY", "NODE_FAIL", "TIMEOUT")

STYLE = (
    """
:root{color-scheme:light dark;--bg:#fff;--ink:#1b1f24;--soft:#5b6570;--line:#d9dee3;--card:#f6f8fa;
--good:#1a7f37;--bad:#c22d3a;--wait:#8a5d00;
--c0:#0969da;--c1:#cf4a12;--c2:#157f5b;--c3:#a43c9f;--c4:#9a6b00;--c5:#0b8aa8;--c6:#6e56cf;--c7:#b3315f;--rest:#b4bcc4}
@media (prefers-color-scheme:dark){:root{--bg:#0f1317;--ink:#e4e9ee;--soft:#98a4b0;--line:#2c353e;--card:#171d23;
--good:#4cc26e;--bad:#ff7b80;--wait:#e0b354;
--c0:#6cb2ff;--c1:#ff9563;--c2:#4fd0a2;--c3:#e491df;--c4:#e8bd54;--c5:#5fd0ea;--c6:#b0a0ff;--c7:#ff86ab;--rest:#4b5661}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1240px;padding:24px 20px 60px;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
h1{font-size:26px;line-height:1.25;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:19px;margin:36px 0 8px}h3{font-size:15px;margin:0 0 6px;overflow-wrap:anywhere}
p{margin:4px 0 12px}code{overflow-wrap:anywhere}
.soft{color:var(--soft)}.note{border-left:3px solid var(--wait);padding:2px 0 2px 12px}
.wide{overflow-x:auto;border:1px solid var(--line);border-radius:8px;position:relative;left:50%;
transform:translateX(-50%);width:max-content;min-width:100%;max-width:calc(100vw - 56px);font-size:14px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:6px 8px;text-align:left;white-space:nowrap;border-top:1px solid var(--line)}
th{white-space:normal;vertical-align:bottom}
tr:first-child>th{border-top:0}th{color:var(--soft);font-weight:600;font-size:13px;background:var(--card)}
td.num,th.num{text-align:right}td.cause{white-space:normal;overflow-wrap:anywhere;border-top:0;padding-top:0}
td.id{white-space:normal;min-width:15em;font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:13px}
.good{color:var(--good)}.bad{color:var(--bad)}.wait{color:var(--wait)}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,420px),1fr));gap:18px}
figure{margin:0;padding:14px;border:1px solid var(--line);border-radius:8px;background:var(--card)}
svg{width:100%;height:auto;display:block}svg text{font-size:12px;fill:var(--soft)}
svg text.value{fill:var(--ink);font-weight:600}
.mid{text-anchor:middle}.end{text-anchor:end}
.grid{stroke:var(--line);stroke-width:1}.axis{stroke:var(--soft);stroke-width:1}
polyline,svg.key line{fill:none;stroke-width:2;stroke-linejoin:round}
polyline.rest,svg.key .rest{stroke:var(--rest);stroke-width:1}circle.rest{fill:var(--rest)}
polyline.ink,svg.key .ink{stroke:var(--ink)}circle.ink{fill:var(--ink)}
polyline.ideal,svg.key .ideal{stroke:var(--soft);stroke-width:1.5;stroke-dasharray:6 5}
.legend{list-style:none;margin:8px 0 0;padding:0;display:flex;flex-wrap:wrap;gap:2px 16px;font-size:13px}
.legend li{display:flex;align-items:center;gap:6px;overflow-wrap:anywhere}
svg.key{flex:none;width:22px;height:10px}
"""
    + "".join(
        f"polyline.c{index},svg.key .c{index}{{stroke:var(--c{index})}}circle.c{index}{{fill:var(--c{index})}}"
        for index in range(NUM_COLOURS)
    )
    + LEDGER_STYLE
)


def render_page(report: Report, now: float | None = None, importance: Mapping[str, Any] | None = None) -> str:
    """Return the whole page.

    Args:
        report: the sweep.
        now: the time that the page states, in seconds since the epoch; None: the present.
        importance: the result of `find_importance`; None if it was not called.
    """
    made = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time.time() if now is None else now))
    counts = ", ".join(f"{count} {state}" for state, count in sorted(report.counts.items())) or "no runs"
    notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in report.notes)
    scaling = "".join(_scaling(study) for study in report.scaling)
    name = html.escape(report.sweep)
    return whole_page(
        report.sweep,
        f'<h1>{name}</h1><p class="soft">{html.escape(counts)} · made {made} by hpc-trainer report</p>{notes}\n'
        f"{_advice(report.advice, report.next)}{scaling}{''.join(report.studies)}{_panels(report)}"
        f"{_parameters(report, importance or {})}{_charts(report)}"
        f"{ledger_section(report.runs)}{''.join(report.sections)}<h2>Runs</h2>{_runs_table(report.runs)}\n",
    )


def whole_page(title: str, body: str, style: str = "") -> str:
    """Return a page in the report's style: `body` is HTML with all text escaped; `style` extends the style sheet."""
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{html.escape(title)}</title><style>{STYLE}{style}</style></head><body>\n{body}</body></html>\n"
    )
    # Half a surrogate pair, which JSON may hold, cannot be written to a file. A control character is not legal in HTML,
    # and would control the terminal of a user who prints the page.
    return visible(page.encode("utf-8", "replace").decode("utf-8"))


# --- scaling ---


def _scaling(scaling: Scaling) -> str:
    where = "".join(f" · {key}={value}" for key, value in scaling.axes.items())
    batch = {
        "strong": f"one global batch of {scaling.points[0].global_batch_size} samples, shared by all ranks",
        "weak": f"{scaling.points[0].global_batch_size // scaling.points[0].ranks} samples a rank and step",
        "mixed": "the batch is neither constant nor in proportion to the ranks",
    }[scaling.kind]
    base = scaling.points[0].ranks
    ranks = sorted({float(point.ranks) for point in scaling.points})
    speedup = [
        Line(name="ideal", points=[(count, count / base) for count in ranks], colour=None, is_ideal=True),
        Line(
            name="speed-up",
            points=[(point.ranks, point.speedup) for point in scaling.points],
            colour=INK,
            has_dots=True,
        ),
    ]
    efficiency = [
        Line(name="ideal", points=[(count, 1.0) for count in ranks], colour=None, is_ideal=True),
        Line(
            name="efficiency", points=[(point.ranks, point.efficiency) for point in scaling.points], colour=INK,
            has_dots=True,
        ),
    ]  # fmt: skip
    charts = (
        figure(
            f"Speed-up over {base} rank{'s' if base > 1 else ''}",
            line_chart("speed-up", speedup, x_label="ranks", y_label="speed-up", is_log=True, x_ticks=ranks),
            legend(speedup),
        ),
        figure(
            "Parallel efficiency",
            line_chart(
                "parallel efficiency", efficiency, x_label="ranks", y_label="of ideal", from_zero=True, is_log_x=True,
                x_ticks=ranks, format_y=percent,
            ),
            legend(efficiency),
        ),
    )  # fmt: skip
    has_mfu = any(point.mfu is not None for point in scaling.points)
    title = f"{scaling.kind.capitalize()} scaling{where}"
    rows = [
        [
            point.hardware, str(point.ranks), str(point.global_batch_size),
            "-" if point.step_time_s is None else f"{1000 * point.step_time_s:.4g} ms",
            f"{number(point.throughput)} {scaling.unit}", f"{point.speedup:.2f}", percent(point.efficiency),
            "-" if point.data_wait_share is None else percent(point.data_wait_share),
            *(["-" if point.mfu is None else percent(point.mfu)] if has_mfu else []),
        ]
        for point in scaling.points
    ]  # fmt: skip
    columns = ["Hardware", "Ranks", "Global batch", "Step", "Throughput", "Speed-up", "Efficiency", "Data wait"]
    columns += ["MFU"] if has_mfu else []
    return (
        f'<h2>{html.escape(title)}</h2><p class="soft">{html.escape(batch)}; medians after the warm-up</p>'
        f'<div class="charts">{"".join(charts)}</div><p></p>{table(columns, rows, first_num=1)}\n'
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, first_num: int) -> str:
    """Return a table of text; columns from `first_num` on are aligned as numbers."""
    head = "".join(
        f"<th{' class=num' if index >= first_num else ''}>{html.escape(column)}</th>"
        for index, column in enumerate(columns)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{' class=num' if index >= first_num else ''}>{html.escape(cell)}</td>"
            for index, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


# --- curves ---


def _charts(report: Report) -> str:
    runs = report.runs
    names = list(dict.fromkeys(name for run in runs for name in run.curves))
    ordered = [name for name in FIRST_CHARTS if name in names]
    ordered += [name for name in names if name not in ordered]
    colours = _colours(report)
    charts = [_curves(name, report, colours) for name in ordered[:_MAX_CHARTS]]
    left = ordered[_MAX_CHARTS:]
    more = f'<p class="soft">Not drawn: {html.escape(", ".join(left))}.</p>' if left else ""
    return f'<h2>Curves</h2><div class="charts">{"".join(charts)}</div>{more}\n' if charts else ""


def _best_first(report: Report) -> list[RunReport]:
    """Sort by the last value of the metric that ranks them, so that a run has the same colour in all charts."""
    drawn = {name for run in report.runs for name, curve in run.curves.items() if curve}
    name = compared_by(report.kept, drawn)
    if name is None:
        return list(report.runs)
    return [*_by_last_value(name, report), *(run for run in report.runs if not run.curves.get(name))]


def _by_last_value(name: str, report: Report) -> list[RunReport]:
    """Sort runs by the last value of a metric, the best first; runs without a value are left out."""
    sign = 1 if is_best_small(report.kept, name) else -1
    runs = (run for run in report.runs if run.curves.get(name))
    return sorted(runs, key=lambda run: sign * run.curves[name][-1][1])


def _curves(name: str, report: Report, colours: Mapping[str, int]) -> str:
    """Draw one metric of all runs: coloured runs, the best first in the legend; the others grey."""
    best = _by_last_value(name, report)
    # A coloured run is always drawn, whatever its place in this chart.
    drawn = sorted(best, key=lambda run: run.run_id not in colours)[:_MAX_LINES]
    lines = [Line(name=_label(run), points=run.curves[name], colour=colours.get(run.run_id)) for run in drawn]
    title = name if len(best) <= _MAX_LINES else f"{name}: {_MAX_LINES} of {len(best)} runs"
    more = sum(line.colour is None for line in lines)
    return figure(title, line_chart(name, lines, x_label="step", y_label=""), legend(lines, more))


def _colours(report: Report) -> Mapping[str, int]:
    """Return the colour of each run that has one: the same in all charts."""
    runs = _best_first(report)
    if report.ranked_by is not None:
        name, is_small = report.ranked_by
        known = [run for run in report.runs if is_finite(run.metrics.get(name))]
        runs = sorted(known, key=lambda run: run.metrics[name] if is_small else -run.metrics[name])
    return colours_of([run.run_id for run in runs])


# --- charts of the whole sweep by domains, and the parameters of its runs ---


def _panels(report: Report) -> str:
    sections = dict.fromkeys(panel.section for panel in report.panels)
    colours, labels = _colours(report), {run.run_id: _label(run) for run in report.runs}
    return "".join(
        f'<h2>{html.escape(section)}</h2><div class="charts">'
        f"{''.join(_panel(panel, colours, labels) for panel in report.panels if panel.section == section)}</div>\n"
        for section in sections
    )


def _panel(panel: Panel, colours: Mapping[str, int], labels: Mapping[str, str]) -> str:
    note = f'<p class="soft">{html.escape(panel.note)}</p>'
    if panel.bars:
        stacks = [(bars.name, bars.tone, bars.heights) for bars in panel.bars]
        key = "".join(
            f'<li><svg class="box" viewBox="0 0 12 12"><rect style="fill:var(--{bars.tone})" width="12" height="12"/>'
            f"</svg>{html.escape(bars.name)}</li>"
            for bars in panel.bars
        )
        svg = bar_chart(panel.title, panel.categories, stacks, panel.y_label)
        return figure(panel.title, svg, f'<ul class="legend">{key}</ul>{note}')
    lines = [] if panel.line is None else [Line(name=panel.line[0], points=panel.line[1], colour=INK)]
    # A dot of its own for each run: it has the run's colour, as in all charts, but grey where the value is not final.
    dots = [
        Line(
            name=f"{labels.get(run_id, run_id)} ({group.name})", points=[point], is_scattered=True,
            colour=None if group.is_faint else colours.get(run_id),
        )
        for group in panel.dots
        for point, run_id in zip(group.points, group.run_ids, strict=True)
    ]  # fmt: skip
    svg = line_chart(panel.title, [*lines, *dots], x_label=panel.x_label, y_label=panel.y_label)
    return figure(panel.title, svg, f"{legend(lines)}{note}")


def _parameters(report: Report, importance: Mapping[str, Any]) -> str:
    """Return charts (importance, parallel coordinates, a slice for each axis); "" if no metric ranks the runs."""
    if report.ranked_by is None:
        return ""
    name = report.ranked_by[0]
    runs = [run for run in report.runs if is_finite(run.metrics.get(name))]
    axes = list(dict.fromkeys(axis for run in runs for axis in run.axes))
    if not axes:
        return ""
    colours = _colours(report)
    scales = {
        axis: _AxisScale([as_value(run.axes[axis]) if axis in run.axes else None for run in runs]) for axis in axes
    }
    charts = [_importance(importance, name)] if name in importance.get("importance", {}) else []
    uprights = {**scales, name: _AxisScale([run.metrics[name] for run in runs])}
    lines = []
    for row, run in enumerate(runs):
        places = [(at, scale.place(row)) for at, scale in enumerate(uprights.values())]
        points = [(at, place) for at, place in places if place is not None]
        title = f"{_label(run)}: {number(run.metrics[name])}"
        lines.append(Line(name=title, points=points, colour=colours.get(run.run_id)))
    columns = [(axis, *scale.ends()) for axis, scale in uprights.items()]
    charts.append(figure("Parallel coordinates", parallel_chart("Parallel coordinates", columns, lines), ""))
    for axis, scale in scales.items():
        dots = [
            Line(name=_label(run), points=[(at, run.metrics[name])], colour=colours.get(run.run_id), is_scattered=True)
            for run, at in zip(runs, scale.values, strict=True)
            if at is not None
        ]
        svg = line_chart(
            f"Slice: {axis}", dots, x_label=axis, y_label=name, is_log_x=scale.is_log, x_ticks=scale.ticks,
            x_names=scale.names,
        )  # fmt: skip
        charts.append(figure(f"Slice: {axis}", svg, ""))
    return f'<h2>Parameters</h2><div class="charts">{"".join(charts)}</div>\n'


class _AxisScale:
    """Numbers of an axis' values: as they are, or places of values that are no numbers among their sorted names."""

    def __init__(self, values: Sequence[Any]) -> None:
        known = [value for value in values if value is not None]
        self.names: Sequence[str] = ()
        self.ticks: Sequence[float] = ()
        self.is_log = False
        if not all(is_finite(value) for value in known):
            self.names = sorted({str(value) for value in known})
            self.ticks = list(range(len(self.names)))
            self.values = [None if value is None else float(self.names.index(str(value))) for value in values]
        else:
            self.values = [None if value is None else float(value) for value in values]
        self._known = [value for value in self.values if value is not None] or [0.0]
        if not self.names and min(self._known) > 0 and max(self._known) >= 10 * min(self._known):
            self.is_log = True
            low, high = (math.log10(bound) for bound in (min(self._known), max(self._known)))
            self.ticks = [10.0**power for power in range(math.ceil(low), math.floor(high) + 1)] or [min(self._known)]

    def place(self, row: int) -> float | None:
        """Return the place of a run's value between the smallest (0) and the largest one (1); None without a value."""
        value, low, high = self.values[row], min(self._known), max(self._known)
        if value is None or low == high:
            return None if value is None else 0.5
        if self.is_log:
            return math.log(value / low) / math.log(high / low)
        return (value - low) / (high - low)

    def ends(self) -> tuple[str, str]:
        """Return the labels of the smallest and of the largest value."""
        if self.names:
            return self.names[0], self.names[-1] if len(self.names) > 1 else ""
        low, high = min(self._known), max(self._known)
        return number(low), "" if low == high else number(high)


def _importance(importance: Mapping[str, Any], name: str) -> str:
    shares = importance["importance"][name]
    rows = [[str(one["axis"]), f"{one['share']:.2f}", f"{one['std']:.2f}"] for one in shares]
    note = '<p class="soft">Share of each axis in a random forest\'s decisions, over complete runs.</p>'
    return figure(f"Importance for {name}", table(["Axis", "Share", "± of trees"], rows, first_num=1), note)


def _label(run: RunReport) -> str:
    return " ".join(f"{key}={value}" for key, value in run.axes.items()) or run.run_id


# --- advice ---


def _advice(lines: Sequence[str], command: str | None) -> str:
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    typed = "" if command is None else f"<p>Next: <code>{html.escape(f'hpc-trainer {command}')}</code></p>"
    return f"<h2>Advice</h2><ul>{items}</ul>{typed}\n" if items else ""


# --- runs ---


def _runs_table(runs: Sequence[RunReport]) -> str:
    axes = list(dict.fromkeys(axis for run in runs for axis in run.axes if axis != "hardware"))
    metrics = list(dict.fromkeys(name for run in runs for name in run.metrics))
    speeds = [key for key in ("tokens_per_s", "samples_per_s") if any(key in run.speed for run in runs)][:1]
    has_mfu = any("mfu" in run.speed for run in runs)
    columns = [
        ("Run", ""), ("Hardware", ""), *((axis, "num") for axis in axes), ("State", ""), ("Step", "num"),
        *((name, "num") for name in metrics), *((key.replace("_per_s", "/s"), "num") for key in speeds),
        *([("MFU", "num")] if has_mfu else []), ("GPU-hours", "num"), ("Attempts", "num"),
    ]  # fmt: skip
    head = "".join(f'<th class="{kind}">{_breakable(name)}</th>' for name, kind in columns)
    body = "".join(_row(run, axes, metrics, speeds, has_mfu) + _cause(run, len(columns)) for run in runs)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _row(run: RunReport, axes: Sequence[str], metrics: Sequence[str], speeds: Sequence[str], has_mfu: bool) -> str:
    cells = [("id", run.run_id), ("", run.hardware), *(("num", run.axes.get(axis, "-")) for axis in axes)]
    cells += [(_tone(run.state), run.state), ("num", f"{run.step}/{run.num_steps}")]
    cells += [("num", metric_text(run.metrics, name)) for name in metrics]
    cells += [("num", number(run.speed[key]) if key in run.speed else "-") for key in speeds]
    if has_mfu:
        cells.append(("num", percent(run.speed["mfu"]) if "mfu" in run.speed else "-"))
    cells += [("num", f"{run.gpu_hours:.4g}"), ("num", str(run.attempts))]
    first, *others = (f'<td class="{kind}">{html.escape(str(text))}</td>' for kind, text in cells)
    return f"<tr>{first.replace('-', '-<wbr>')}{''.join(others)}</tr>"


def _cause(run: RunReport, num_columns: int) -> str:
    """Return an extra table row with the run's cause: a sentence in a column would displace other columns."""
    remarks = [] if run.cause is None or run.cause in ("done", "early_stop") else [run.cause[:_MOST_OF_CAUSE]]
    remarks += [] if run.hint is None else [run.hint]
    if run.metrics and run.metrics_step not in (None, run.step):
        remarks.append(f"metrics of step {run.metrics_step}")
    if not remarks:
        return ""
    lines = "".join(f"<br>{html.escape(line)}" for line in run.last_lines)
    return f'<tr><td class="cause soft" colspan="{num_columns}">{html.escape(" · ".join(remarks))}{lines}</td></tr>'


def _breakable(name: str) -> str:
    """Return a heading that may break after a dot or an underscore."""
    return re.sub(r"([._])", r"\1<wbr>", html.escape(name))


def _tone(state: str) -> str:
    return "good" if state == "COMPLETED" else "bad" if state in BAD else "wait" if state != "RUNNING" else ""


def metric_text(metrics: Mapping[str, Any], name: str) -> str:
    value = metrics.get(name)
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)[:40]
