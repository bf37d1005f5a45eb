"""A sweep as data for a report: its runs, their curves, their steady speed, and how it scales over hardware. No torch.

Reads what `status` reads, and each run's metrics.jsonl.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpc_trainer.operate.advice.advised import next_of_sweep, sweep_lines, tune
from hpc_trainer.operate.axes import find_axes
from hpc_trainer.operate.report.charts import thinned
from hpc_trainer.operate.report.exports import ExportReport
from hpc_trainer.operate.report.telemetry import Chart
from hpc_trainer.operate.results import newest_metrics
from hpc_trainer.operate.signs import last_lines, meaning_of, more_memory
from hpc_trainer.runs.metrics_log import SPEED, WORK, read_metrics
from hpc_trainer.runs.monitoring.stragglers import read_stragglers, straggler_lines
from hpc_trainer.runs.record_values import is_number
from hpc_trainer.state.monitoring.ask_ledger import ask_ledgers
from hpc_trainer.state.monitoring.ledger import RunLedger
from hpc_trainer.state.status import RunStatus, SweepStatus, gpu_hours

WARMUP_STEPS = 20
"""Left out of a run's speed at the start of each attempt: caches, compilers and allocators are cold."""
# More would not show on a screen, and a page of 100 runs stays below 1 MB.
_POINTS_A_CURVE = 200
_LAST_LINES = 4
_MOST_STRAGGLERS = 20
_NOT_DRAWN = frozenset(("step", "time", "lr", "grad_norm", "skipped_steps", *SPEED))
# Axes that a scaling study moves: the machine, and how the batch goes with it.
_SCALED = ("hardware", "train.global_batch_size", "train.micro_batch_size", "train.grad_accum_steps")

Curve = list[tuple[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """One run. `speed`: medians after the warm-up of `num_windows` spans between logged steps; {} if it has none."""

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
    """The step that `metrics` are of, where it is known."""
    last_lines: Sequence[str] = ()
    """What the job or the program of a run that failed printed last."""
    hint: str | None = None
    """What these, or its error, mean, and what helps."""
    ledger: RunLedger | None = None
    """Where the time went; None: nobody knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPoint:
    """One run against the one with the fewest ranks: `speedup` of its throughput, and `efficiency`, that a rank."""

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
    """Runs that differ in hardware alone. `kind`: strong (one global batch), weak (one batch a rank), or mixed."""

    kind: str
    unit: str
    axes: Mapping[str, str]
    points: list[ScalingPoint]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a report shows; `notes` says what is missing and why."""

    sweep: str
    counts: Mapping[str, int]
    runs: list[RunReport]
    scaling: list[Scaling]
    notes: list[str] = field(default_factory=list)
    exports: Sequence[ExportReport] = ()
    """What else the page shows: exports that somebody named."""
    advice: Sequence[str] = ()
    """What `tune` says of these runs, alike lines once."""
    next: str | None = None
    """The words after `hpc-trainer` that follow the first of them."""
    telemetry: Sequence[Chart] = ()
    """What GPUs and hosts did."""


def build_report(status: SweepStatus, *, warmup_steps: int = WARMUP_STEPS) -> Report:
    """Reads the metrics of every run of `status`.

    Args:
        warmup_steps: at the start of each attempt, left out of speeds, ≥ 0.
    """
    axes = find_axes([run.spec for run in status.runs])
    unasked: list[str] = []
    ledgers = ask_ledgers(status, status.runs, unasked)
    runs = [
        dataclasses.replace(_run(status, run, axes[run.run_id], warmup_steps), ledger=ledgers.get(run.run_id))
        for run in status.runs
    ]
    scaling = find_scaling(runs)
    stragglers = [
        f"{run.run_id}: {line}"
        for run in runs
        for line in straggler_lines(read_stragglers(status.sweep.run(run.run_id), status.faults_of(run.run_id)))
    ]
    notes = [*status.notes, *unasked, *stragglers[:_MOST_STRAGGLERS]]
    slow = [run.run_id for run in runs if not run.speed and run.step]
    if slow and len({run.ranks for run in runs}) > 1:
        listed = ", ".join(slow[:5]) + (" .." if len(slow) > 5 else "")
        notes.append(
            f"{len(slow)} run(s) have no speed yet ({listed}): the first {warmup_steps} steps of each attempt are "
            "left out. Train longer, log more often (monitor.log_every_steps), or give --warmup-steps."
        )
    notes += [_other_gpus(each, runs) for each in scaling if len(_gpus(each, runs)) > 1]
    tuned = tune(status, [*status.specs])[0]
    return Report(
        sweep=status.sweep.name, counts=status.counts, runs=runs, scaling=scaling, notes=notes,
        advice=sweep_lines(tuned), next=next_of_sweep(tuned, status.sweep.name),
    )  # fmt: skip


def _run(status: SweepStatus, run: RunStatus, axes: Mapping[str, str], warmup_steps: int) -> RunReport:
    records = read_metrics(status.sweep.run(run.run_id).metrics, status.faults_of(run.run_id))
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
        speed={} if run.spec.is_lost else speed,  # of how many ranks, nobody knows
        num_windows=num_windows,
        curves=curves_of(records),
        last_lines=last_lines(run)[-_LAST_LINES:] if run.state.has_failed else [],
        hint=_hint(run),
    )


def _hint(run: RunStatus) -> str | None:
    meaning = meaning_of(run)
    if meaning is None:
        return None
    words = {"run": run.run_id, "found": meaning.found, "memory": more_memory(run.spec.shape)}
    return f"{meaning.says}: {meaning.advice[0].format(**words)}"


def _number(value: object) -> float | None:
    """A finite number; metrics.jsonl may hold anything."""
    if not isinstance(value, (int, float)) or not is_number(value) or not math.isfinite(value):
        return None
    return float(value)


def steady_speed(
    records: Iterable[Mapping[str, Any]], resumed_steps: Sequence[int], warmup_steps: int
) -> tuple[dict[str, float], int]:
    """The median of each figure of speed over spans that begin after the warm-up, and how many spans there were.

    Args:
        records: lines of metrics.jsonl, in order.
        resumed_steps: where each attempt began.
        warmup_steps: after each of those, left out.
    """
    found: dict[str, list[float]] = {}
    before = num_windows = 0
    for record in records:
        if "steps_per_s" not in record and "samples_per_s" not in record:
            continue  # an evaluation's line
        step = record["step"]
        base = max((each for each in resumed_steps if each < step), default=0)
        begin, before = max(base, before), step
        if begin < base + warmup_steps:
            continue
        num_windows += 1
        for key in SPEED:
            value = _number(record.get(key))
            if value is not None:
                found.setdefault(key, []).append(value)
    return {key: statistics.median(values) for key, values in found.items()}, num_windows


def curves_of(records: Sequence[Mapping[str, Any]]) -> dict[str, Curve]:
    """Each metric over the steps, of the lines of metrics.jsonl: at most some 200 points, means of neighbours."""
    curves: dict[str, Curve] = {}
    for record in records:
        for key, value in record.items():
            number = None if key in _NOT_DRAWN else _number(value)
            if number is not None:
                curves.setdefault(key, []).append((record["step"], number))
    return {key: thinned(curve, _POINTS_A_CURVE) for key, curve in curves.items()}


def find_scaling(runs: Sequence[RunReport]) -> list[Scaling]:
    """The scaling studies in a sweep: runs with equal axes but for hardware and batch, on two numbers of ranks or more.

    Throughput is in the best unit that all runs of a study have; runs without a speed are left out.
    """
    groups: dict[tuple[tuple[str, str], ...], list[RunReport]] = {}
    for run in runs:
        if any(run.speed.get(key) for key in WORK):
            axes = {key: value for key, value in run.axes.items() if not _is_scaled(key)}
            groups.setdefault(tuple(sorted(axes.items())), []).append(run)
    found = (_scaling(dict(axes), group) for axes, group in groups.items() if len({run.ranks for run in group}) > 1)
    return [each for each in found if each is not None]


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
    listed = ", ".join(sorted(str(each) for each in _gpus(scaling, runs)))
    return f"the {scaling.kind} scaling compares different GPUs ({listed}): efficiency says nothing then."
