"""What GPUs and hosts did over the hours of a run, as charts of a report: a line for each rank. No torch."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpc_trainer.operate.report.charts import (
    NUM_COLOURS,
    Line,
    Point,
    figure,
    legend,
    line_chart,
    number,
    percent,
    thinned,
)
from hpc_trainer.runs.monitoring.telemetry import Sample, read_telemetry
from hpc_trainer.runs.states import RunState
from hpc_trainer.state.status import RunStatus, SweepStatus

_MAX_RUNS, _MAX_RANKS, _MAX_POINTS = 3, 32, 200
_GB = 1e9


@dataclass(frozen=True, slots=True)
class _Quantity:
    """What is drawn of a sample; of the host only where no run has it of a device."""

    title: str
    unit: str
    of: Callable[[Sample], float | None]
    words: Callable[[float], str] = number


def _of_device(name: str, factor: float = 1.0) -> Callable[[Sample], float | None]:
    def value(sample: Sample) -> float | None:
        found = None if sample.device is None else getattr(sample.device, name)
        return None if found is None else found * factor

    return value


def _of_host(name: str, factor: float = 1.0) -> Callable[[Sample], float | None]:
    def value(sample: Sample) -> float | None:
        found = None if sample.host is None else getattr(sample.host, name)
        return None if found is None else found * factor

    return value


_OF_DEVICE = (
    _Quantity("GPU utilisation", "share of time", _of_device("utilisation"), percent),
    _Quantity("GPU memory", "GB", _of_device("memory_used", 1 / _GB)),
    _Quantity("GPU temperature", "°C", _of_device("temperature_c")),
    _Quantity("GPU power", "W", _of_device("power_w")),
)
_OF_HOST = (
    _Quantity("Busy cores", "cores", _of_host("cpus")),
    _Quantity("Resident memory", "GB", _of_host("rss_bytes", 1 / _GB)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One quantity of one run."""

    run_id: str
    title: str
    unit: str
    words: Callable[[float], str]
    lines: Sequence[Line]
    more: int
    """Ranks that are grey, for there are no more colours."""


def telemetry_charts(status: SweepStatus) -> list[Chart]:
    """Of the runs at work, else of the newest: those that somebody would look at."""
    begun = [run for run in status.runs if run.attempts]
    at_work = [run for run in begun if run.state is RunState.RUNNING]
    newest = sorted(at_work or begun, key=lambda run: run.attempts[-1].start_time)[-_MAX_RUNS:]
    return [chart for run in newest for chart in charts_of(status, run)]


def charts_of(
    status: SweepStatus, run: RunStatus, *, of_attempt: int | None = None, always_hosts: bool = False
) -> list[Chart]:
    """Of a run, or of one attempt; of hosts where no device tells anything, or always."""
    samples = read_telemetry(
        status.sweep.run(run.run_id), status.faults_of(run.run_id), of_attempt=of_attempt, most_ranks=_MAX_RANKS
    )
    by_line: dict[str, dict[int, list[Sample]]] = {}
    for each in samples:
        uuid = "" if each.device is None or each.device.uuid is None else f" {each.device.uuid[:12]}"
        by_line.setdefault(f"rank {each.rank}{uuid}", {}).setdefault(each.attempt, []).append(each)
    if not samples:
        return []
    begin = min(each.time for each in samples)
    has_device = any(each.device is not None for each in samples)
    found = []
    for quantity in (*_OF_DEVICE, *(_OF_HOST if always_hosts or not has_device else ())):
        lines = [
            Line(name=name, points=points, colour=index if index < NUM_COLOURS else None)
            for index, (name, by_attempt) in enumerate(by_line.items())
            for together in by_attempt.values()  # a line through the time between two would tell of nothing
            if (points := _points(together, quantity, begin))
        ]
        if lines:
            found.append(
                Chart(
                    run_id=run.run_id, title=quantity.title, unit=quantity.unit, words=quantity.words, lines=lines,
                    more=len({each.name for each in lines if each.colour is None}),
                )
            )  # fmt: skip
    return found


def _points(samples: Sequence[Sample], quantity: _Quantity, begin: float) -> list[Point]:
    """(minutes since the first sample, value), few enough for a screen."""
    found = [((each.time - begin) / 60, value) for each in samples if (value := quantity.of(each)) is not None]
    return thinned(found, _MAX_POINTS)


def render_telemetry(charts: Sequence[Chart]) -> str:
    """The section of the page; "" without charts."""
    if not charts:
        return ""
    parts = []
    for run_id in dict.fromkeys(each.run_id for each in charts):
        figures = "".join(_figure(each) for each in charts if each.run_id == run_id)
        parts.append(f'<p class="soft">{html.escape(run_id)}</p><div class="charts">{figures}</div>')
    return f"<h2>GPUs and hosts</h2>{''.join(parts)}\n"


def _figure(chart: Chart) -> str:
    svg = line_chart(
        chart.title, chart.lines, x_label="minutes", y_label=chart.unit, from_zero=True, y_words=chart.words
    )
    names = list({each.name: each for each in chart.lines}.values())
    return figure(chart.title, svg, legend(names, chart.more))
