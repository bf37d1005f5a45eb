"""Views of samples of GPUs and hosts: charts of reports, energy in `results`, figures of a live view. No torch.

The samples are read from the run folder (telemetry.py); warnings about GPUs are shown by clues.py.
"""

from __future__ import annotations

import html
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpc_trainer.observe.telemetry import J_PER_KWH, Sample, newest_energy_j, newest_samples, read_telemetry
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
from hpc_trainer.operate.results import Columns
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.reading import Faults, is_number
from hpc_trainer.record.run_status import RunStatus
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import SweepStatus

if TYPE_CHECKING:  # `results` loads this module for its columns of energy, and no report
    from hpc_trainer.operate.report.data import Series
    from hpc_trainer.operate.run_page import PagePart

_MAX_RUNS, _MAX_RANKS, _MAX_POINTS = 3, 32, 200
_GB = 1e9


@dataclass(frozen=True, slots=True)
class _Quantity:
    """Quantity of a sample that a chart shows."""

    title: str
    unit: str
    of: Callable[[Sample], float | None]
    format_value: Callable[[float], str] = number


def _of_device(name: str, factor: float = 1.0) -> Callable[[Sample], float | None]:
    def value(sample: Sample) -> float | None:
        figure = None if sample.device is None else getattr(sample.device, name)
        return None if figure is None else figure * factor

    return value


def _of_host(name: str, factor: float = 1.0) -> Callable[[Sample], float | None]:
    def value(sample: Sample) -> float | None:
        figure = None if sample.host is None else getattr(sample.host, name)
        return None if figure is None else figure * factor

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
    format_value: Callable[[float], str]
    lines: Sequence[Line]
    more: int
    """Number of grey ranks, beyond the last colour."""


def telemetry_charts(status: SweepStatus) -> list[Chart]:
    """Return the charts of the newest running runs, at most 3; if no run is running, of the newest runs."""
    begun = [run for run in status.runs if run.attempts]
    at_work = [run for run in begun if run.state is RunState.RUNNING]
    newest = sorted(at_work or begun, key=lambda run: run.attempts[-1].start_time)[-_MAX_RUNS:]
    return [chart for run in newest for chart in charts_of(status, run)]


def charts_of(
    status: SweepStatus, run: RunStatus, *, of_attempt: int | None = None, always_hosts: bool = False
) -> list[Chart]:
    """Return the charts of a run.

    Args:
        status: the sweep.
        run: the run.
        of_attempt: draw only this attempt; None: all attempts.
        always_hosts: draw hosts, too; otherwise hosts are drawn only if no sample has a device.
    """
    samples = read_telemetry(
        status.sweep.run(run.run_id), status.faults_of(run.run_id), of_attempt=of_attempt, most_ranks=_MAX_RANKS
    )
    by_line: dict[str, dict[int, list[Sample]]] = {}
    for sample in samples:
        uuid = "" if sample.device is None or sample.device.uuid is None else f" {sample.device.uuid[:12]}"
        by_line.setdefault(f"rank {sample.rank}{uuid}", {}).setdefault(sample.attempt, []).append(sample)
    if not samples:
        return []
    begin = min(sample.time for sample in samples)
    has_device = any(sample.device is not None for sample in samples)
    charts = []
    for quantity in (*_OF_DEVICE, *(_OF_HOST if always_hosts or not has_device else ())):
        lines = [
            Line(name=name, points=points, colour=index if index < NUM_COLOURS else None)
            for index, (name, by_attempt) in enumerate(by_line.items())
            for together in by_attempt.values()  # attempts are not joined: there are no samples between them
            if (points := _points(together, quantity, begin))
        ]
        if lines:
            charts.append(
                Chart(
                    run_id=run.run_id, title=quantity.title, unit=quantity.unit, format_value=quantity.format_value,
                    lines=lines, more=len({line.name for line in lines if line.colour is None}),
                )
            )  # fmt: skip
    return charts


def report_series(status: SweepStatus, run: RunStatus) -> list[Series]:
    """Return the charts of a run for the interactive report (hook `report_series`), hosts included."""
    from hpc_trainer.operate.report.data import Series

    return [
        Series(
            title=chart.title, unit=chart.unit, is_share=chart.format_value is percent,
            lines=[(line.name, line.points) for line in chart.lines],
        )
        for chart in charts_of(status, run, always_hosts=True)
    ]  # fmt: skip


def _points(samples: Sequence[Sample], quantity: _Quantity, begin: float) -> list[Point]:
    """Return (minutes since the first sample, value), thinned to some `_MAX_POINTS` points."""
    points = [((sample.time - begin) / 60, value) for sample in samples if (value := quantity.of(sample)) is not None]
    return thinned(points, _MAX_POINTS)


def render_telemetry(charts: Sequence[Chart]) -> str:
    """Return the section of the page; an empty string without charts."""
    if not charts:
        return ""
    parts = []
    for run_id in dict.fromkeys(chart.run_id for chart in charts):
        figures = "".join(_figure(chart) for chart in charts if chart.run_id == run_id)
        parts.append(f'<p class="soft">{html.escape(run_id)}</p><div class="charts">{figures}</div>')
    return f"<h2>GPUs and hosts</h2>{''.join(parts)}\n"


def _figure(chart: Chart) -> str:
    svg = line_chart(
        chart.title, chart.lines, x_label="minutes", y_label=chart.unit, from_zero=True, format_y=chart.format_value
    )
    names = list({line.name: line for line in chart.lines}.values())
    return figure(chart.title, svg, legend(names, chart.more))


def page_part(status: SweepStatus, run: RunStatus) -> PagePart:
    """Return the section of a run's page with charts of GPUs and hosts in the newest attempt."""
    from hpc_trainer.operate.run_page import PagePart

    newest = run.attempts[-1].attempt if run.attempts else 0
    return PagePart(after_logs=render_telemetry(charts_of(status, run, of_attempt=newest, always_hosts=True)))


def energy_columns(status: SweepStatus, run: RunStatus) -> dict[str, Any]:
    """Return `energy_kwh` of all attempts and ranks, `j_per_sample` trained, and `co2_g`; {} if energy is not known."""
    if not run.attempts:
        return {}
    used = newest_energy_j(status.sweep.run(run.run_id), status.faults_of(run.run_id))
    if used is None:
        return {}
    config = run.spec.config
    num_samples = run.step * int(config.get("train", {}).get("global_batch_size") or 0)
    factor = config.get("monitor", {}).get("co2_g_per_kwh")
    return {
        "energy_kwh": round(used / J_PER_KWH, 6),
        **({"j_per_sample": round(used / num_samples, 6)} if num_samples else {}),
        **({"co2_g": round(used / J_PER_KWH * factor, 3)} if is_number(factor) else {}),
    }


_SUMS = frozenset({"energy_kwh", "co2_g"})
ENERGY_COLUMNS = Columns(_SUMS | {"j_per_sample"}, energy_columns, sums=_SUMS)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNow:
    """GPUs of a run at its ranks' latest samples; unknown figures are None.

    `utilisation` (0 to 1) is the mean, `memory_used` is that of the fullest GPU in bytes, `temperature_c` that of the
    hottest, and `power_w` the sum.
    """

    num_gpus: int
    utilisation: float | None
    memory_used: int | None
    memory_total: int | None
    temperature_c: float | None
    power_w: float | None

    def figures(self) -> list[str]:
        """Return the known figures, the most important first: `8 GPUs 97%`, `61.2 of 80 GB`, `64 °C`, `4.1 kW`."""
        name = "GPU" if self.num_gpus == 1 else f"{self.num_gpus} GPUs"
        shown = [name if self.utilisation is None else f"{name} {self.utilisation:.0%}"]
        if self.memory_used is not None:
            total = "" if self.memory_total is None else f" of {self.memory_total / 1e9:.3g}"
            shown.append(f"{self.memory_used / 1e9:.3g}{total} GB")
        if self.temperature_c is not None:
            shown.append(f"{self.temperature_c:.0f} °C")
        if self.power_w is not None:
            shown.append(f"{number(self.power_w)}W" if self.power_w >= 1e3 else f"{self.power_w:.0f} W")
        return shown


def gpu_now(paths: RunPaths, attempt: int) -> GpuNow | None:
    """Return the GPUs of the ranks' latest samples in this attempt; None if no sample has a GPU."""
    devices = [
        sample.device for sample in newest_samples(paths, Faults(), of_attempt=attempt) if sample.device is not None
    ]
    if not devices:
        return None
    busy, power = ([value for value in values if value is not None] for values in (
        (device.utilisation for device in devices), (device.power_w for device in devices)
    ))  # fmt: skip
    return GpuNow(
        num_gpus=len(devices),
        utilisation=statistics.fmean(busy) if busy else None,
        memory_used=max((device.memory_used for device in devices if device.memory_used is not None), default=None),
        memory_total=max((device.memory_total for device in devices if device.memory_total is not None), default=None),
        temperature_c=max(
            (device.temperature_c for device in devices if device.temperature_c is not None), default=None
        ),
        power_w=sum(power) if power else None,
    )


def live_figures(paths: RunPaths, attempt: int) -> list[str]:
    """Return the figures of a run's GPUs for a live view, the most important first; [] if it has none."""
    gpu = gpu_now(paths, attempt)
    return [] if gpu is None else gpu.figures()
