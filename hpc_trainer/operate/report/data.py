"""Data of a sweep's report: runs, curves, steady speed, and scaling over hardware. Does not import torch.

The sources are those of `status`, and each run's metrics.jsonl.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpc_trainer.config.schema.output import CheckpointConfig
from hpc_trainer.domains import contributions
from hpc_trainer.errors import ConfigError
from hpc_trainer.operate.report.charts import thinned
from hpc_trainer.operate.results import kept_by
from hpc_trainer.operate.why import advice_values, last_lines, meaning_of
from hpc_trainer.record.ledger import RunLedger
from hpc_trainer.record.metrics import SPEED, WORK, sampled_metrics
from hpc_trainer.record.reading import is_number
from hpc_trainer.record.run_figures import ask_ledgers, gpu_hours, newest_metrics
from hpc_trainer.record.run_status import RunStatus
from hpc_trainer.record.spec import find_axes
from hpc_trainer.record.status import SweepStatus
from hpc_trainer.record.turns import pool_job, use_of

WARMUP_STEPS = 20
"""Steps at the start of each attempt that speeds leave out: caches, compilers and allocators are cold."""
# More points would not show on a screen, and a page of 100 runs stays below 1 MB.
POINTS_A_CURVE = 200
# A run's lines of metrics that are parsed at most: of 500 runs with 2,000 each, all of them would take 10 s.
_MOST_RECORDS, _LEAST_RECORDS, _ALL_RECORDS = 2_000, 200, 100_000
_LAST_LINES = 4
_SPEED = frozenset(SPEED)
_NOT_DRAWN = frozenset(("step", "time", "lr", "grad_norm", "skipped_steps", *SPEED))
# Axes that a scaling study varies: the hardware, and the batch with it.
_SCALED = ("hardware", "train.global_batch_size", "train.micro_batch_size", "train.grad_accum_steps")

Curve = list[tuple[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """Run of a report. `speed` has medians over `num_windows` spans between logged steps after warm-up, or is {}."""

    run_id: str
    hardware: str
    ranks: int
    gpu_type: str | None
    global_batch_size: int
    axes: Mapping[str, str]
    state: str
    cause: str | None
    step: int
    num_steps: int
    attempts: int
    gpu_hours: float
    metrics: Mapping[str, Any]
    speed: Mapping[str, float]
    num_windows: int
    curves: Mapping[str, Curve]
    metrics_step: int | None = None
    """Step of `metrics`; None if it is not known."""
    last_lines: Sequence[str] = ()
    """Last lines that the job or program of a failed run printed."""
    hint: str | None = None
    """Meaning of `last_lines` or of the error, and a remedy."""
    ledger: RunLedger | None = None
    """Use of the run's time; None if it is not known."""
    is_sampled: bool = False
    """True if not all records of the run were parsed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPoint:
    """One run relative to the run with the fewest ranks: `efficiency` is `speedup` by the ratio of ranks."""

    run_id: str
    hardware: str
    ranks: int
    global_batch_size: int
    step_time_s: float | None
    throughput: float
    speedup: float
    efficiency: float
    data_wait_share: float | None
    mfu: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Runs that differ in hardware and batch. `kind`: strong (one global batch), weak (one batch a rank), mixed."""

    kind: str
    unit: str
    axes: Mapping[str, str]
    points: list[ScalingPoint]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dots:
    """Points of a panel, each of a run."""

    name: str
    points: Sequence[tuple[float, float]]
    run_ids: Sequence[str]
    """Run of each point."""
    is_faint: bool = False
    """True for values that are not final."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Heights of one colour in a panel of stacked bars, one for each of its categories."""

    name: str
    heights: Sequence[int]
    tone: str
    """Variable of the style sheet that is the colour: c0, good, bad, wait or rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Chart of a whole sweep that a domain adds to both pages: a line and dots, or stacked bars."""

    section: str
    title: str
    note: str
    x_label: str
    y_label: str
    line: tuple[str, Sequence[tuple[float, float]]] | None = None
    """Name and points of a line that belongs to no run."""
    dots: Sequence[Dots] = ()
    categories: Sequence[str] = ()
    """Names of the bars, from left to right; () if there are none."""
    bars: Sequence[Bars] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportPart:
    """Addition of a domain to a report (hooks `report_parts`, `report_options`); its fields are those of `Report`."""

    notes: Sequence[str] = ()
    advice: Sequence[str] = ()
    next: str | None = None
    section: str = ""
    content: Mapping[str, Any] = field(default_factory=dict)
    panels: Sequence[Panel] = ()
    ranked_by: tuple[str, bool] | None = None
    """Metric that ranks the runs, and whether smaller values are better; None leaves the choice to the page."""
    has_series: bool = False
    """True if the hook `report_series` has the content of `section`; the interactive page then leaves the section
    out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Chart of one run over minutes (hook `report_series`), which the interactive page draws when it is asked for."""

    title: str
    unit: str
    lines: Sequence[tuple[str, Sequence[tuple[float, float]]]]
    """Name and points of each line."""
    is_share: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Content of a report; `notes` say what is missing and why."""

    sweep: str
    counts: Mapping[str, int]
    runs: list[RunReport]
    scaling: list[Scaling]
    notes: list[str] = field(default_factory=list)
    studies: Sequence[str] = ()
    """Sections of domains for their options, after the scaling studies, as HTML with all text escaped."""
    content: Mapping[str, Any] = field(default_factory=dict)
    """Keys that domains add to `report --json` for their options."""
    advice: Sequence[str] = ()
    """Suggestions for these runs, without duplicates."""
    next: str | None = None
    """Arguments after `hpc-trainer` that carry out the first suggestion; None if there is no such command."""
    sections: Sequence[str] = ()
    """Sections of domains, as HTML with all text escaped."""
    own_sections: Sequence[str] = ()
    """Sections of `sections` that the interactive page shows too; it draws the others itself."""
    kept: CheckpointConfig = field(default_factory=CheckpointConfig)
    """How the runs choose their best checkpoint, which shows the direction of that metric."""
    panels: Sequence[Panel] = ()
    """Charts of the whole sweep by domains."""
    ranked_by: tuple[str, bool] | None = None
    """Metric that ranks the runs, and whether smaller values are better; None if no domain knows."""


def build_report(
    status: SweepStatus, *, warmup_steps: int = WARMUP_STEPS, options: Mapping[str, Any] | None = None,
    most_points: int = POINTS_A_CURVE,
) -> Report:  # fmt: skip
    """Read the metrics of every run of `status` and return the report's data.

    Args:
        status: the sweep.
        warmup_steps: steps at the start of each attempt that are left out of speeds, ≥ 0.
        options: values of the options of `report` that domains read (hook `report_options`).
        most_points: points of a curve; a longer curve gets means of neighbours.

    Raises:
        ConfigError: an option has a value, and no domain of this installation reads it. Domains raise errors too.
    """
    studies = _studies(options or {})
    axes = find_axes([run.spec for run in status.runs])
    unasked: list[str] = []
    ledgers = ask_ledgers(status, status.runs, unasked)
    most = most_records(len(status.specs))
    runs = [
        dataclasses.replace(
            _run(status, run, axes[run.run_id], warmup_steps, most, most_points), ledger=ledgers.get(run.run_id)
        )
        for run in status.runs
    ]
    scaling = find_scaling(runs)
    parts: list[ReportPart] = [part_of(status) for part_of in contributions("report_parts")]
    notes = [*status.notes, *unasked, *_pool_notes(status), *(note for part in parts for note in part.notes)]
    num_sampled = sum(run.is_sampled for run in runs)
    if num_sampled:
        notes.append(f"curves and speeds of {num_sampled} long run(s) are from about {most} of their records each.")
    slow = [run.run_id for run in runs if not run.speed and run.step]
    if slow and len({run.ranks for run in runs}) > 1:
        listed = ", ".join(slow[:5]) + (" .." if len(slow) > 5 else "")
        notes.append(
            f"{len(slow)} run(s) have no speed yet ({listed}): the first {warmup_steps} steps of each attempt are "
            "left out. Train longer, log more often (monitor.log_every_steps), or give --warmup-steps."
        )
    notes += [_other_gpus(study, runs) for study in scaling if len(_gpus(study, runs)) > 1]
    return Report(
        sweep=status.sweep.name, counts=status.counts, runs=runs, scaling=scaling, notes=notes,
        advice=[line for part in parts for line in part.advice],
        next=next((part.next for part in parts if part.next is not None), None),
        sections=[part.section for part in parts],
        kept=kept_by(status.specs.values()), own_sections=[part.section for part in parts if not part.has_series],
        studies=[part.section for part in studies],
        panels=[panel for part in parts for panel in part.panels],
        ranked_by=next((part.ranked_by for part in parts if part.ranked_by is not None), None),
        content={key: value for part in studies for key, value in part.content.items()},
    )  # fmt: skip


def _pool_notes(status: SweepStatus) -> Iterator[str]:
    """Yield a note on each pool: the share of time for which its places had a run."""
    for pool in status.ledger.submissions:
        held_s, busy_s = use_of(status.sweep, pool) if pool.is_pool else (0.0, 0.0)
        if held_s > 0:
            yield (
                f"Pool {pool_job(pool)}: {pool.slots} slot(s) of {max(1, pool.per_node)} place(s) took "
                f"{held_s / 3600:.3g} place-hours, and used {min(1.0, busy_s / held_s):.0%} of that time."
            )


def _studies(options: Mapping[str, Any]) -> list[ReportPart]:
    """Return the sections that domains add to a report for their options, also for options that are not given."""
    readers = {name: read for group in contributions("report_options") for name, read in group.items()}
    unread = next((name for name, value in options.items() if value and name not in readers), None)
    if unread is not None:
        raise ConfigError(f"--{unread}: no part of this installation reads it. Leave it out.")
    return [read(options.get(name) or ()) for name, read in readers.items()]


def most_records(num_runs: int) -> int:
    """Return the number of metrics lines of each kind that are parsed for each run of a report of `num_runs` runs."""
    return min(_MOST_RECORDS, max(_LEAST_RECORDS, _ALL_RECORDS // max(1, num_runs)))


def _run(
    status: SweepStatus, run: RunStatus, axes: Mapping[str, str], warmup_steps: int, most: int, most_points: int
) -> RunReport:
    faults = status.faults_of(run.run_id)
    records, gap = sampled_metrics(status.sweep.run(run.run_id).metrics, most, faults)
    resumed = [attempt.resumed_step or 0 for attempt in run.attempts]
    speed, num_windows = steady_speed(records, resumed, warmup_steps)
    metrics, metrics_step = newest_metrics(status, run, records)
    shape = run.spec.shape
    return RunReport(
        run_id=run.run_id,
        hardware=run.spec.hardware,
        ranks=shape.world_size,
        gpu_type=shape.gpu_type,
        global_batch_size=int(run.spec.config["train"]["global_batch_size"] or 0),
        axes=axes,
        state=run.state.value,
        cause=run.warning or run.reason,
        step=run.step,
        num_steps=run.num_steps,
        attempts=len(run.attempts),
        gpu_hours=round(gpu_hours(run), 4),
        metrics=metrics,
        metrics_step=metrics_step,
        speed={} if run.spec.is_lost else speed,  # the number of ranks is not known
        num_windows=num_windows,
        curves=curves_of(records, most_points),
        is_sampled=gap > 1,
        last_lines=last_lines(run)[-_LAST_LINES:] if run.state.has_failed else [],
        hint=_hint(run),
    )


def _hint(run: RunStatus) -> str | None:
    meaning = meaning_of(run)
    if meaning is None:
        return None
    return f"{meaning.says}: {meaning.advice[0].format(**advice_values(run, meaning))}"


def _number(value: object) -> float | None:
    """Return a finite number, else None; metrics.jsonl may hold any value."""
    if type(value) is float:  # as most values are
        return value if math.isfinite(value) else None
    if not isinstance(value, (int, float)) or not is_number(value) or not math.isfinite(value):
        return None
    return float(value)


def steady_speed(
    records: Iterable[Mapping[str, Any]], resumed_steps: Sequence[int], warmup_steps: int
) -> tuple[dict[str, float], int]:
    """Return the median of each speed over spans that begin after the warm-up, and the number of these spans.

    Args:
        records: records of metrics.jsonl, in order.
        resumed_steps: the step at which each attempt began.
        warmup_steps: steps after each of these that are left out.
    """
    by_key: dict[str, list[float]] = {}
    any_resumed = any(resumed_steps)
    before = num_windows = 0
    for record in records:
        if "steps_per_s" not in record and "samples_per_s" not in record:
            continue  # a record of an evaluation
        step = record["step"]
        base = 0 if not any_resumed else max((resumed for resumed in resumed_steps if resumed < step), default=0)
        begin, before = max(base, before), step
        if begin < base + warmup_steps:
            continue
        num_windows += 1
        for key in _SPEED.intersection(record):
            value = _number(record[key])
            if value is not None:
                by_key.setdefault(key, []).append(value)
    return {key: statistics.median(by_key[key]) for key in SPEED if key in by_key}, num_windows


def curves_of(records: Sequence[Mapping[str, Any]], most_points: int = POINTS_A_CURVE) -> dict[str, Curve]:
    """Return each metric of metrics.jsonl over the steps: at most some `most_points` points, means of neighbours."""
    curves: dict[str, Curve] = {}
    for record in records:
        for key, value in record.items():
            number = None if key in _NOT_DRAWN else _number(value)
            if number is not None:
                curves.setdefault(key, []).append((record["step"], number))
    return {key: thinned(curve, most_points) for key, curve in curves.items()}


def find_scaling(runs: Sequence[RunReport]) -> list[Scaling]:
    """Return a sweep's scaling studies: runs with equal axes except hardware and batch, with at least two rank counts.

    Throughput is in the best unit that all runs of a study have; runs without a speed are left out.
    """
    groups: dict[tuple[tuple[str, str], ...], list[RunReport]] = {}
    for run in runs:
        if any(run.speed.get(key) for key in WORK):
            axes = {key: value for key, value in run.axes.items() if not _is_scaled(key)}
            groups.setdefault(tuple(sorted(axes.items())), []).append(run)
    studies = (_scaling(dict(axes), group) for axes, group in groups.items() if len({run.ranks for run in group}) > 1)
    return [study for study in studies if study is not None]


def _is_scaled(axis: str) -> bool:
    return axis in _SCALED or axis.startswith("hardware.")


def _scaling(axes: Mapping[str, str], group: list[RunReport]) -> Scaling | None:
    key = next((unit for unit in WORK if all(run.speed.get(unit) for run in group)), None)
    if key is None:
        return None
    ordered = sorted(group, key=lambda run: run.ranks)
    least = ordered[0]
    kind = "mixed"
    if len({run.global_batch_size for run in ordered}) == 1:
        kind = "strong"
    elif len({run.global_batch_size / run.ranks for run in ordered}) == 1:
        kind = "weak"
    points = [
        ScalingPoint(
            run_id=run.run_id,
            hardware=run.hardware,
            ranks=run.ranks,
            global_batch_size=run.global_batch_size,
            step_time_s=run.speed.get("step_time_s"),
            throughput=run.speed[key],
            speedup=run.speed[key] / least.speed[key],
            efficiency=run.speed[key] / least.speed[key] * least.ranks / run.ranks,
            data_wait_share=run.speed.get("data_wait_share"),
            mfu=run.speed.get("mfu"),
        )
        for run in ordered
    ]
    return Scaling(kind=kind, unit=WORK[key], axes=axes, points=points)


def _gpus(scaling: Scaling, runs: Sequence[RunReport]) -> set[str | None]:
    mine = {point.run_id for point in scaling.points}
    return {run.gpu_type for run in runs if run.run_id in mine}


def _other_gpus(scaling: Scaling, runs: Sequence[RunReport]) -> str:
    listed = ", ".join(sorted(str(gpu_type) for gpu_type in _gpus(scaling, runs)))
    return f"the {scaling.kind} scaling compares different GPUs ({listed}): their efficiency cannot be compared."
