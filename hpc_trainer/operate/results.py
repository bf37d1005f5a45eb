"""Table of results, one row per run: its axes, its metrics, its cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from hpc_trainer.config.trackers import PASSED_OVER
from hpc_trainer.errors import ConfigError, valid
from hpc_trainer.record.metrics import SPEED, newest_metrics_in, read_metrics
from hpc_trainer.record.reading import is_number
from hpc_trainer.record.spec import RunSpec
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import RunStatus, SweepStatus, gpu_hours
from hpc_trainer.record.telemetry import J_PER_KWH, newest_energy_j

# Keys in which the runs of a sweep differ, with one value per run and key: the columns of tables.

_MOST_KEYS = 8


def find_axes(specs: Sequence[RunSpec]) -> dict[str, dict[str, str]]:
    """Return the value of each run on each axis, by run id, whichever commands submitted the runs.

    Axes are the keys that any command swept, and the other keys that commands named and runs differ in. If runs are
    alike on all of these, the keys in which their configurations differ are added: a file has changed. A run has the
    value of its frozen configuration on an axis that it was not submitted with. An axis is absent from runs whose
    configuration has no such key: runs of another model.
    """
    # An app's override that deletes a key (`~callbacks`) has no value; earlier versions stored it among the axes.
    swept = list(dict.fromkeys(axis for spec in specs for axis in spec.axes if "~" not in axis))
    rows: dict[str, dict[str, str | None]] = {spec.run_id: {} for spec in specs}
    for axis in swept:
        typed = _words_as_typed(axis, specs)
        for spec in specs:
            rows[spec.run_id][axis] = _value(spec, axis, typed)
    for key in _named(specs):
        values = [] if key in swept else [_value(spec, key, {}) for spec in specs]
        if len(set(values)) > 1:
            for spec, value in zip(specs, values, strict=True):
                rows[spec.run_id][key] = value
    alike: dict[tuple[str | None, ...], list[RunSpec]] = {}
    for spec in specs:
        alike.setdefault(tuple(rows[spec.run_id].values()), []).append(spec)
    more = dict.fromkeys(key for group in alike.values() if len(group) > 1 for key in _differing(group))
    for spec in specs if more else ():
        rows[spec.run_id] |= {key: _value(spec, key, {}) for key in more}
    return {run_id: {key: value for key, value in row.items() if value is not None} for run_id, row in rows.items()}


def typed_axes(spec: RunSpec, axes: Mapping[str, str]) -> dict[str, Any]:
    """Return a run's row of `find_axes` with its numbers and truth values as the frozen configuration has them."""
    values = {key: _configured(spec, key) for key in axes}
    return {key: values[key] if isinstance(values[key], (bool, int, float)) else text for key, text in axes.items()}


def _named(specs: Sequence[RunSpec]) -> list[str]:
    """Return the keys of overrides that not all runs share, except sections that do not change the computation."""
    overrides_by_run = [dict.fromkeys(spec.overrides) for spec in specs]
    counts = Counter(word for overrides in overrides_by_run for word in overrides)
    keys = dict.fromkeys(word.split("=")[0].lstrip("+~") for word, count in counts.items() if count < len(specs))
    return [key for key in keys if key.split(".")[0] not in PASSED_OVER]


def _words_as_typed(axis: str, specs: Sequence[RunSpec]) -> dict[str, str]:
    """Map a configuration's value to the text that a command had: 0.001 -> 1e-3; empty if all runs have such a text."""
    if all(axis in spec.axes for spec in specs):
        return {}
    return {str(_configured(spec, axis)): spec.axes[axis] for spec in reversed(specs) if axis in spec.axes}


def _value(spec: RunSpec, key: str, typed: Mapping[str, str]) -> str | None:
    if key in spec.axes:
        return spec.axes[key]
    value = _configured(spec, key)
    return None if value is None else typed.get(str(value), _text(value))


def _configured(spec: RunSpec, key: str) -> Any:
    """Return a value of the frozen configuration; for a section, the name of the choice."""
    value: Any = spec.config
    for part in key.lstrip("+~").split("@")[0].replace("/", ".").split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value.get("name") if isinstance(value, Mapping) else "null" if value is None else value


def _differing(specs: Sequence[RunSpec]) -> list[str]:
    """Return keys in which the configurations differ, at most `_MOST_KEYS`; a section with another name counts once."""
    runs = [dict(leaves(spec.config, without=PASSED_OVER)) for spec in specs]
    keys = [key for key in dict.fromkeys(key for config in runs for key in config) if _differs(key, runs)]
    renamed = {key.removesuffix(".name") for key in keys if key.count(".") == 1 and key.endswith(".name")}
    keys = list(dict.fromkeys(key.split(".")[0] if key.split(".")[0] in renamed else key for key in keys))
    return keys[:_MOST_KEYS]


def _differs(key: str, runs: Sequence[Mapping[str, Any]]) -> bool:
    first, *others = (config.get(key, ...) for config in runs)
    return any(type(value) is not type(first) or value != first for value in others)


def leaves(tree: Mapping[str, Any], path: str = "", without: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of a configuration, except its sections `without`; an empty mapping is a value."""
    for key, value in tree.items():
        if key in without:
            continue
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


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


_MOST_RUNS = 200

# Metrics of one moment of training; a table of results shows the outcome.
_PASSING = ("lr", "grad_norm", "loss", *SPEED)

# Fixed columns of every row: a metric with the name of one of them, or of an axis, gets the prefix TOLD.
_OURS = frozenset({"run_id", "code", "metrics_step", "state", "step", "gpu_hours", "attempts"})
_OF_ENERGY = frozenset({"energy_kwh", "j_per_sample", "co2_g"})
TOLD = "metrics."
"""Prefix of a metric's name if another column has that name."""


def result_rows(status: SweepStatus, *, typed: bool = False) -> list[dict[str, Any]]:
    """Return a flat dict for each run: run_id, axes, metrics, state, step, cost.

    `code` is present if runs have different code: the first 12 digits of the digest of the frozen code, or None if
    nothing was frozen. `metrics_step` is present if a run has not completed and its metrics are of another step.

    Args:
        status: the sweep.
        typed: return numbers and booleans of the configuration as such, not as the user typed them.
    """
    axes = find_axes([run.spec for run in status.runs])
    taken = _OURS | _OF_ENERGY | {key for row in axes.values() for key in row}
    if typed:
        axes = {run.run_id: typed_axes(run.spec, axes[run.run_id]) for run in status.runs}
    codes = {run.run_id: run.submission.code for run in status.runs if run.submission is not None}
    varies = len(set(codes.values())) > 1
    return [
        _row(
            status,
            run,
            axes[run.run_id],
            {"code": (codes.get(run.run_id) or "")[:12] or None} if varies else {},
            taken,
        )
        for run in status.runs
    ]


def _row(
    status: SweepStatus, run: RunStatus, axes: Mapping[str, Any], code: Mapping[str, str | None], taken: Collection[str]
) -> dict[str, Any]:
    told, step = newest_metrics(status, run)
    metrics = {f"{TOLD}{name}" if name in taken else name: value for name, value in told.items()}
    return {
        "run_id": run.run_id,
        **axes,
        **code,
        **metrics,
        **({} if step in (None, run.step) else {"metrics_step": step}),
        "state": run.state.value,
        "step": None if run.progress == "-" else run.step,  # a program that reported no step
        "gpu_hours": round(gpu_hours(run), 4),
        "attempts": len(run.attempts),
        **energy_columns(status, run),
    }


def newest_metrics(
    status: SweepStatus, run: RunStatus, records: Iterable[Mapping[str, Any]] | None = None
) -> tuple[dict[str, Any], int | None]:
    """Return the metrics of the outcome, and their step; None if the step is not known.

    For a run that has stopped, these are the newest in its metrics.jsonl up to its step: its heartbeat may be older.

    Args:
        records: the records of the run's metrics.jsonl, if the caller has read them.
    """
    if run.state is RunState.COMPLETED or not run.attempts:
        return outcome_metrics(run), run.step if run.state is RunState.COMPLETED else None
    if records is None:
        records = read_metrics(status.sweep.run(run.run_id).metrics, status.faults_of(run.run_id))
    newest, _ = _up_to(run.step, records)
    metrics = outcome_metrics(run, {key: value for key, (value, _) in newest.items()})
    return (metrics, max(newest[key][1] for key in metrics)) if metrics else (outcome_metrics(run), None)


def _up_to(last: int, records: Iterable[Mapping[str, Any]]) -> tuple[dict[str, tuple[Any, int]], frozenset[str]]:
    """Return each metric's newest (value, step) up to step `last`, and the names of metrics logged after `last`."""
    newest: dict[str, tuple[Any, int]] = {}
    later = set[str]()
    for record in records:
        step = record["step"]
        values = {key: value for key, value in record.items() if key not in ("step", "time")}
        if step > last:
            later |= values.keys()
        else:
            newest |= {key: (value, step) for key, value in values.items()}
    return newest, frozenset(later)


def outcome_metrics(run: RunStatus, metrics: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return those of the run's metrics, or of `metrics`, that tell an outcome; for a program all except speed."""
    passing = _passing(run)
    return {key: value for key, value in (run.metrics if metrics is None else metrics).items() if key not in passing}


def _passing(run: RunStatus) -> Sequence[str]:
    return _PASSING if run.spec.num_steps else SPEED  # 0: a program, whose loss may be its only metric


def metrics_now(status: SweepStatus, runs: Sequence[RunStatus]) -> dict[str, tuple[dict[str, Any], int | None]]:
    """Return for each run id its newest metrics, and the step of its outcome if that differs from the run's step.

    A stopped run is at the step that it saved, while its metrics come from its last heartbeat, at another step. So the
    end of its metrics.jsonl is read, but not with more than 200 runs: a look at 10,000 runs must not read such files.
    """
    stopped = (run for run in runs if run.attempts and run.state not in (RunState.RUNNING, RunState.COMPLETED))
    by_run = {} if len(runs) > _MOST_RUNS else {run.run_id: _where_it_stopped(status, run) for run in stopped}
    return {run.run_id: by_run.get(run.run_id) or (dict(run.metrics), None) for run in runs}


def _where_it_stopped(status: SweepStatus, run: RunStatus) -> tuple[dict[str, Any], int | None]:
    records = newest_metrics_in(status.sweep.run(run.run_id).metrics, status.faults_of(run.run_id))
    newest, later = _up_to(run.step, records)
    of_heartbeat = {key: value for key, value in run.metrics.items() if key in newest or key not in later}
    metrics = of_heartbeat | {key: value for key, (value, _) in newest.items()}
    telling = outcome_metrics(run, metrics) or metrics.keys() & {"loss"}
    step = max((newest[key][1] for key in telling if key in newest), default=None)
    return metrics, None if step == run.step else step


def sort_rows(rows: Sequence[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Return the rows sorted by a column, best first: losses ascend, other columns descend; rows without a value last.

    Raises:
        ConfigError: no row has the column.
    """
    columns = list(dict.fromkeys(column for row in rows for column in row))
    if rows and key not in columns:
        raise ConfigError(f"--sort {key}: there is no such column. {valid(key, columns)}")
    lower_is_better = key.endswith("loss")
    numbers = [(_number(row.get(key)), row) for row in rows]
    numeric = [(number, row) for number, row in numbers if number is not None]
    best_first = sorted(numeric, key=lambda pair: pair[0], reverse=not lower_is_better)
    texts = [row for number, row in numbers if number is None and isinstance(row.get(key), str)]
    rest = [row for number, row in numbers if number is None and not isinstance(row.get(key), str)]
    return [*(row for _, row in best_first), *sorted(texts, key=lambda row: str(row[key])), *rest]


def _number(value: Any) -> float | None:
    """Return a value as a number, also text such as `1e-3`; None if it is not a number."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return None if math.isnan(number) else number
