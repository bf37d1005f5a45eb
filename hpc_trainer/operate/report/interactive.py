"""Report as one interactive HTML page: a table to sort and filter, and charts by plotly.js, which the page contains.

The page makes no request. Texts of users are in it as compressed data only, and page.js puts them into elements
as text. Its Content-Security-Policy allows two scripts by their digests, page.js and plotly.js, and no request.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import html
import importlib.util
import json
import math
import shlex
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_trainer.config.schema.output import CheckpointConfig, is_best_small
from hpc_trainer.domains import contributions
from hpc_trainer.errors import HpcTrainerError, visible
from hpc_trainer.operate.report.charts import thinned
from hpc_trainer.operate.report.data import Panel, Report, RunReport, Scaling, Series
from hpc_trainer.operate.report.page import BAD, FIRST_CHARTS, KIND_COLOURS, STYLE
from hpc_trainer.operate.results import BEST, TOLD, ResultTable, as_value
from hpc_trainer.operate.why import because_of, by_cause, explain
from hpc_trainer.record.ledger import TRAINS, WORDS
from hpc_trainer.record.metrics import SPEED
from hpc_trainer.record.reading import Faults, is_finite, read_json
from hpc_trainer.record.run_status import RunStatus
from hpc_trainer.record.spec import RunSpec, leaves
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import SweepStatus
from hpc_trainer.runtime.torch_process import ask

# Runs whose configuration and telemetry the page has, and of which failures are explained; all are in the table.
_MOST_DETAILED, _MOST_EXPLAINED = 1_000, 300
# Numbers of 4 bytes that curves and telemetry may take in the page, so that it stays below 8 MB.
_NUMBERS_OF_CURVES, _NUMBERS_OF_TELEMETRY = 700_000, 300_000
_MOST_LINES, _FEWEST_POINTS = 8, 10
_FEWEST_RUNS, _MOST_METRICS = 8, 6  # of a forest; and forests of a page
_SHOWN_AXES, _SHOWN_METRICS = 5, 3
_EXACT = 2**32
PLOTLY = "plotly"
"""Package that contains plotly.js (extra `report`)."""


@dataclass(frozen=True, slots=True)
class ReportedSweep:
    """A sweep of a page: its status and its report."""

    status: SweepStatus
    report: Report
    table: ResultTable


class _Numbers:
    """Numbers of a page in words of 4 bytes: float32, and uint32 for steps."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._known: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._data) // 4

    def add(self, values: Iterable[float], *, are_steps: bool = False) -> int:
        """Add numbers, unless they are there, and return the place of the first one."""
        words = array("I", (min(int(value), _EXACT - 1) for value in values)) if are_steps else array("f", values)
        if sys.byteorder == "big":
            words.byteswap()
        data = words.tobytes()
        if data not in self._known:
            self._known[data] = len(self)
            self._data += data
        return self._known[data]

    def packed(self) -> bytes:
        """Return all numbers."""
        return bytes(self._data)


def render_interactive(
    sweeps: Sequence[ReportedSweep], importance: Callable[[], Mapping[str, Any]], now: float | None = None
) -> str:
    """Return the page of one sweep, or of several that are compared.

    Args:
        sweeps: the sweeps, ≥ 1.
        importance: returns the result of `asked_importance`; called last.
        now: the time that the page states, in seconds since the epoch; None: the present.
    """
    numbers = _Numbers()
    data = {**_page_data(sweeps, numbers), **importance()}
    made = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time.time() if now is None else now))
    data["made"] = f"made {made} by hpc-trainer report"
    folder = Path(__file__).parent
    script = (folder / "page.js").read_text(encoding="utf-8")
    library = _plotly_js()
    allowed = " ".join(f"'sha256-{_digest(text)}'" for text in (script, library))
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    extra = "".join(part for sweep in sweeps for part in (*sweep.report.studies, *sweep.report.own_sections))
    title = html.escape(" and ".join(sweep.report.sweep for sweep in sweeps))
    packed = {
        "data": json.dumps(_plain(data), separators=(",", ":"), allow_nan=False).encode(),
        "numbers": numbers.packed(), "plotly": library.encode(),
    }  # fmt: skip
    # Base64 has no character that could end the element.
    scripts = "".join(
        f'<script type="text/plain" id="{name}">{_compressed(content)}</script>\n' for name, content in packed.items()
    )
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><title>{title}</title>'
        f"<style>{STYLE}{(folder / 'page.css').read_text(encoding='utf-8')}</style></head><body>\n"
        '<main id="app"><p>This page needs its scripts. <code>hpc-trainer report --plain</code> writes one without.'
        f"</p></main>\n{extra}\n{scripts}"
    )
    page = visible(page.encode("utf-8", "replace").decode("utf-8"))
    return f"{page}<script>{script}</script></body></html>\n"  # as it is: its digest is in the policy


def _plotly_js() -> str:
    spec = importlib.util.find_spec(PLOTLY)
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _compressed(data: bytes) -> str:
    return base64.b64encode(gzip.compress(data, 6, mtime=0)).decode()


def _plain(value: Any) -> Any:
    """Return a value as JSON that browsers read: numbers that are not finite become texts."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


# --- data of the page ---


def _page_data(sweeps: Sequence[ReportedSweep], numbers: _Numbers) -> dict[str, Any]:
    tables = [sweep.table for sweep in sweeps]
    axes = list(dict.fromkeys(axis for table in tables for axis in table.axes))
    metrics = list(dict.fromkeys(name for table in tables for name in table.metrics))
    runs: list[dict[str, Any]] = []
    reports: list[RunReport] = []
    described = []
    places: dict[tuple[int, str], int] = {}
    for number, (sweep, table) in enumerate(zip(sweeps, tables, strict=True)):
        base, config_of = _configurations(sweep.status)
        described.append(_sweep(sweep, base))
        for row, report in zip(table.rows, sweep.report.runs, strict=True):
            places[number, report.run_id] = len(runs)
            run = sweep.status.run(report.run_id)
            runs.append(_run(number, run, report, row, axes, config_of.get(report.run_id), table.kept))
            reports.append(report)
    if len(sweeps) > 1:
        for described_run in runs:
            described_run["cells"].setdefault("sweep", sweeps[described_run["sweep"]].report.sweep)
    _add_telemetry(sweeps, runs, places, numbers)
    ranking = [*filter(None, (table.compared_by for table in tables)), *metrics]
    metric = next((name for name in ranking if name in metrics), None)
    is_up = metric is not None and _is_best_small(metric, tables)
    ranked_by = sweeps[0].report.ranked_by
    if ranked_by is not None and ranked_by[0] in metrics:
        metric, is_up = ranked_by
    known = [(run["cells"][metric], place) for place, run in enumerate(runs) if is_finite(run["cells"].get(metric))]
    if ranked_by is not None:  # a paused trial has trained less, and `best` takes it only if none is complete
        complete = RunState.COMPLETED.value
        known = [pair for pair in known if runs[pair[1]]["cells"]["state"] == complete] or known
    best = None if not known else min(known, key=lambda pair: pair[0] if is_up else -pair[0])[1]
    explained = [_failures(number, sweep.status, places) for number, sweep in enumerate(sweeps)]
    return {
        "sweeps": described, "runs": runs, "axes": axes, "columns": _columns(runs, tables, axes, metrics),
        "curves": _curves(reports, numbers), "metric": metric, "best": best, "first": best or 0,
        "sort": "run_id" if metric is None else metric, "is_up": metric is None or is_up, "bad": BAD,
        "kinds": [{"name": kind.value, "words": words, "light": KIND_COLOURS[kind][0], "dark": KIND_COLOURS[kind][1]}
                  for kind, words in WORDS.items()],
        "panels": [_panel(number, sweep, panel, places) for number, sweep in enumerate(sweeps)
                   for panel in sweep.report.panels],
        "failures": [group for groups in explained for group in groups], "nodes": _nodes(sweeps),
        "scaling": [_scaling(number, study, places) for number, sweep in enumerate(sweeps)
                    for study in sweep.report.scaling],
    }  # fmt: skip


def _sweep(sweep: ReportedSweep, base: Mapping[str, Any]) -> dict[str, Any]:
    report = sweep.report
    faults = Faults()
    written = read_json(sweep.status.sweep.sweep, faults) or {}
    command, code = written.get("command"), written.get("code")
    revision = code.get("git_revision") if isinstance(code, Mapping) else None
    return {
        "name": report.sweep, "notes": [*report.notes, *faults], "advice": report.advice, "next": report.next,
        "config": base,
        "command": shlex.join(["hpc-trainer", *map(str, command[1:])]) if isinstance(command, list) else None,
        "revision": revision,
    }  # fmt: skip


def _configurations(status: SweepStatus) -> tuple[dict[str, Any], dict[str, tuple[dict[str, Any], list[str]]]]:
    """Return the first run's configuration, and for each run the values that differ and the keys that it lacks."""
    base: dict[str, Any] = {}
    others: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for spec in list(status.specs.values())[:_MOST_DETAILED]:
        values = _configuration(spec)
        base = base or values
        others[spec.run_id] = (
            {key: value for key, value in values.items() if key not in base or base[key] != value},
            [key for key in base if key not in values],
        )
    return base, others


def _configuration(spec: RunSpec) -> dict[str, Any]:
    """Return every key of a run's configuration with its value; {} if it cannot be read."""
    return {} if spec.is_lost else dict(leaves(spec.config))


def _axis_value(value: Any) -> Any:
    return as_value(value) if isinstance(value, str) else value


def _run(
    number: int, run: RunStatus, report: RunReport, row: Mapping[str, Any], axes: Sequence[str],
    config: tuple[dict[str, Any], list[str]] | None, kept: CheckpointConfig,
) -> dict[str, Any]:  # fmt: skip
    cells = {key: value for key, value in row.items() if key not in axes}
    # Runs of another sweep of the page need not differ in its axes.
    values = _configuration(run.spec) if any(axis not in row for axis in axes) else {}
    cells |= {axis: _axis_value(row.get(axis, values.get(axis))) for axis in axes}
    cells["hardware"] = report.hardware
    cells["node"] = run.node
    cells |= {key: value for key, value in report.speed.items() if key in ("tokens_per_s", "samples_per_s", "mfu")}
    cells |= _best_values(report, kept)
    ledger = report.ledger
    if ledger is not None and ledger.goodput is not None:
        cells["goodput"] = round(ledger.goodput, 4)
    cause = report.cause if report.hint is None else f"{report.cause}; {report.hint}"
    return {
        "id": report.run_id, "sweep": number, "cells": cells, "cause": None if report.cause == "done" else cause,
        "lines": report.last_lines, "node": ", ".join(dict.fromkeys(attempt.node for attempt in run.attempts)),
        "gpus": run.spec.shape.num_nodes * run.spec.shape.gpus_per_node, "overrides": " ".join(run.spec.overrides),
        "code": None if run.submission is None or run.submission.code is None else run.submission.code[:12],
        "config": {} if config is None else config[0], "lacks": [] if config is None else config[1], "series": [],
        "ledger": None if ledger is None else {
            "elapsed_s": round(ledger.elapsed_s, 1),
            "good_s": round(math.fsum(ledger.seconds.get(kind, 0.0) for kind in TRAINS), 1),
            "seconds": {kind.value: round(seconds, 1) for kind, seconds in ledger.seconds.items()},
        },
    }  # fmt: skip


def _best_values(report: RunReport, kept: CheckpointConfig) -> dict[str, float]:
    """Return the best value of each metric by `ResultTable.kept`, unless only a part of the run's records was read."""
    if report.is_sampled:
        return {}
    return {
        f"{name}{BEST}": (min if is_best_small(kept, name) else max)(value for _, value in curve)
        for name, curve in report.curves.items()
    }


def _is_best_small(column: str, tables: Sequence[ResultTable]) -> bool:
    """Return True if the smallest value of a metric's column is the best, by the first table that has the metric."""
    metric = column.removesuffix(BEST)
    kept = next((table.kept for table in tables if metric in table.metrics), tables[0].kept)
    return is_best_small(kept, metric.removeprefix(TOLD))


def _columns(
    runs: Sequence[Mapping[str, Any]], tables: Sequence[ResultTable], axes: Sequence[str], metrics: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the table's columns in order; the most-read columns are shown at first."""
    names = list(dict.fromkeys(name for run in runs for name in run["cells"]))
    differs = {name for name in names if len({str(run["cells"].get(name)) for run in runs}) > 1}
    first = [
        "run_id", "sweep", *(["hardware"] if "hardware" not in axes else []), *axes, "state", "step", *metrics,
        *(f"{metric}{BEST}" for metric in metrics), "goodput", *SPEED, "gpu_hours", "wall_s", "queue_s", "attempts",
    ]  # fmt: skip
    ordered = [name for name in dict.fromkeys(first) if name in names]
    ordered += [name for name in names if name not in ordered]
    shown = {"run_id", "state", "step", "goodput", "attempts" if "attempts" in differs else "state"}
    shown |= {"gpu_hours" if any(run["cells"].get("gpu_hours") for run in runs) else "wall_s"}
    shown |= {*axes[:_SHOWN_AXES], *metrics[:_SHOWN_METRICS]} | ({"hardware", "sweep"} & differs)
    costs = {cost for table in tables for cost in table.costs} | {"step", "attempts"}
    return [
        {
            "name": name, "kind": "axis" if name in axes else "metric" if name in metrics else "other",
            "num": any(is_finite(run["cells"].get(name)) for run in runs), "shown": name in shown,
            "up": name in costs or name in axes or name in ("run_id", "sweep", "state", "node", "hardware")
            or ((name in metrics or name.endswith(BEST)) and _is_best_small(name, tables)),
        }
        for name in ordered
    ]  # fmt: skip


def _curves(reports: Sequence[RunReport], numbers: _Numbers) -> dict[str, dict[int, tuple[int, int, int]]]:
    """Return metric -> run -> places of its steps and values, and their count."""
    total = sum(len(curve) for report in reports for curve in report.curves.values())
    share = min(1.0, _NUMBERS_OF_CURVES / max(1, total))
    names = list(dict.fromkeys(name for report in reports for name in report.curves))
    ordered = [name for name in FIRST_CHARTS if name in names]
    ordered += [name for name in names if name not in ordered]
    curves: dict[str, dict[int, tuple[int, int, int]]] = {name: {} for name in ordered}
    for place, report in enumerate(reports):
        for name, curve in report.curves.items():
            points = curve if share == 1.0 else thinned(curve, max(50, int(share * len(curve))))
            steps = numbers.add((step for step, _ in points), are_steps=True)
            curves[name][place] = steps, numbers.add(value for _, value in points), len(points)
    return curves


def _add_telemetry(
    sweeps: Sequence[ReportedSweep], runs: Sequence[dict[str, Any]], places: Mapping[tuple[int, str], int],
    numbers: _Numbers,
) -> None:  # fmt: skip
    detailed = list(places.items())[:_MOST_DETAILED]
    share = _NUMBERS_OF_TELEMETRY // max(1, len(detailed))
    for (number, run_id), place in detailed:
        status = sweeps[number].status
        charts: list[Series] = [
            chart for find in contributions("report_series") for chart in find(status, status.run(run_id))
        ]
        count = sum(min(_MOST_LINES, len(chart.lines)) for chart in charts)
        most = max(_FEWEST_POINTS, share // max(1, 2 * count))
        runs[place]["series"] = [_series(chart, most, numbers) for chart in charts]


def _series(chart: Series, most: int, numbers: _Numbers) -> dict[str, Any]:
    lines = []
    for name, points in chart.lines[:_MOST_LINES]:
        kept = thinned(points, most)
        minutes, values = numbers.add(at for at, _ in kept), numbers.add(value for _, value in kept)
        lines.append({"name": name, "x": minutes, "y": values, "n": len(kept)})
    more = len(chart.lines) - len(lines)
    title = f"{chart.title} ({len(lines)} of {len(chart.lines)} lines)" if more else chart.title
    return {"title": title, "unit": chart.unit, "is_share": chart.is_share, "lines": lines}


def _panel(number: int, sweep: ReportedSweep, panel: Panel, places: Mapping[tuple[int, str], int]) -> dict[str, Any]:
    """Return a chart of a whole sweep by a domain; each dot names the place of its run."""
    return {
        "section": panel.section, "title": panel.title, "note": panel.note, "sweep": sweep.report.sweep,
        "x": panel.x_label, "y": panel.y_label, "line": panel.line, "categories": panel.categories,
        "dots": [
            {"name": dots.name, "faint": dots.is_faint, "points": dots.points,
             "runs": [places.get((number, run_id)) for run_id in dots.run_ids]}
            for dots in panel.dots
        ],
        "bars": [{"name": bars.name, "tone": bars.tone, "heights": bars.heights} for bars in panel.bars],
    }  # fmt: skip


def _scaling(number: int, study: Scaling, places: Mapping[tuple[int, str], int]) -> dict[str, Any]:
    where = "".join(f" · {key}={value}" for key, value in study.axes.items())
    points = [
        {name: getattr(point, name) for name in ("hardware", "ranks", "global_batch_size", "throughput", "speedup",
         "efficiency", "data_wait_share")} | {"run": places[number, point.run_id]}
        for point in study.points
    ]  # fmt: skip
    return {"title": f"{study.kind.capitalize()} scaling{where}", "unit": study.unit, "points": points}


# --- failures ---


def _failures(number: int, status: SweepStatus, places: Mapping[tuple[int, str], int]) -> list[dict[str, Any]]:
    """Return groups of runs that need the user's attention, with equal explanations by `why`; the largest first."""
    chosen = [run for run in status.open_among(status.specs) if _needs_user(run.state)][:_MOST_EXPLAINED]
    groups = by_cause([explain(status, run, asks_slurm=False) for run in chosen])
    return [
        {
            "state": group[0].state.value, "verdict": group[0].verdict, "advice": group[0].advice,
            "because": [*because_of(group), *([f"its last line: {group[0].said}"] if group[0].said else [])],
            "runs": [places[number, why.run_id] for why in group],
        }
        for group in sorted(groups, key=lambda group: -len(group))
    ]  # fmt: skip


def _needs_user(state: RunState) -> bool:
    return state.has_failed or state.is_interrupted or state is RunState.UNKNOWN


def _nodes(sweeps: Sequence[ReportedSweep]) -> list[dict[str, Any]]:
    """Return the nodes on which an attempt failed, with causes; the node with most of them first."""
    causes: dict[str, Counter[str]] = {}
    for sweep in sweeps:
        for run in sweep.status.open_runs.values():
            for attempt in run.attempts:
                if attempt.state is not None and attempt.state.has_failed:
                    causes.setdefault(attempt.node, Counter())[attempt.cause or attempt.state.value] += 1
    return [
        {
            "name": node,
            "count": counts.total(),
            "causes": ", ".join(f"{count} {cause}" for cause, count in counts.items()),
        }
        for node, counts in sorted(causes.items(), key=lambda item: -item[1].total())
    ]


# --- importance ---


@contextlib.contextmanager
def asked_importance(tables: Sequence[ResultTable]) -> Iterator[Future[Mapping[str, Any]]]:
    """Yield a future of each axis's importance for each metric; a separate process computes the importance."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(find_importance, tables)


def find_importance(tables: Sequence[ResultTable]) -> Mapping[str, Any]:
    """Return the importance of each axis for each metric, and notes on it; {} with too few runs."""
    rows = [row for table in tables for row in table.rows]
    axes = dict.fromkeys(axis for table in tables for axis in table.axes)
    metrics = list(dict.fromkeys(name for table in tables for name in table.metrics))
    varied = [axis for axis in axes if len({str(row.get(axis)) for row in rows}) > 1]
    asked = {}
    for metric in metrics[:_MOST_METRICS]:
        whole = [row for row in rows if row["state"] == RunState.COMPLETED.value and is_finite(row.get(metric))]
        if len(whole) >= _FEWEST_RUNS and len({row[metric] for row in whole}) > 1:
            columns = [[_plain(_axis_value(row.get(axis))) for row in whole] for axis in varied]
            asked[metric] = {"columns": columns, "targets": [float(row[metric]) for row in whole]}
    if not asked or not varied:
        return {}
    try:
        answered = ask("hpc_trainer.worker.importance", "importance", {"metrics": asked})
    except (HpcTrainerError, OSError) as error:
        return {"importance": {}, "importance_note": f"not known: {error}"}
    importance = {
        metric: sorted(
            ({"axis": axis, "share": share, "std": std} for axis, (share, std) in zip(varied, pairs, strict=True)),
            key=lambda one: -float(one["share"]),
        )
        for metric, pairs in answered.items()
    }
    note = "Share of each axis in a random forest's decisions, over complete runs; bars show how much trees differ."
    return {"importance": importance, "importance_note": note}
