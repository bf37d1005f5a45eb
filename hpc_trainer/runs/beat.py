"""heartbeat.json and result.json: reading them without values that no worker writes, and writing the result."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from hpc_trainer.runs.files import write_json
from hpc_trainer.runs.layout import RunPaths
from hpc_trainer.runs.reading import Faults, read_json, tell
from hpc_trainer.runs.record_values import as_count, as_text, as_time, is_number, metric_values
from hpc_trainer.runs.shared_folder import Place
from hpc_trainer.runs.states import DONE

_MOST_REMARKS, _MAX_REMARK = 8, 2_000


def read_heartbeat(path: Place, faults: Faults | None = None) -> dict[str, Any]:
    """Return `step`, `attempt`, `time`, speed, `metrics` and `remarks` of a heartbeat; {} if none can be read."""
    beat = read_json(path, faults)
    if beat is None:
        return {}
    numbers = {key: value for key, value in beat.items() if is_number(value) and math.isfinite(value)}
    fields = _typed(beat, {"step": as_count, "num_steps": as_count, "attempt": as_count, "time": as_time}, path, faults)
    others: dict[str, Any] = {
        key: value for key, value in numbers.items() if key not in ("step", "num_steps", "attempt", "time")
    }
    remarks = beat.get("remarks")
    if isinstance(remarks, dict):
        texts = [(name, text[:_MAX_REMARK]) for name, text in remarks.items() if isinstance(text, str)]
        others["remarks"] = dict(texts[:_MOST_REMARKS])
    return {**others, **fields, **_with_metrics(beat)}


def read_result(path: Place, faults: Faults | None = None) -> dict[str, Any]:
    """Return `step`, `cause`, `reason` and `metrics` of a run that is done; {} if none can be read."""
    result = read_json(path, faults)
    if result is None:
        return {}
    fields = _typed(result, {"step": as_count, "cause": as_text, "reason": as_text}, path, faults)
    return {**fields, **_with_metrics(result)}


def write_result(
    paths: RunPaths, *, step: int, num_steps: int, attempt: int, world_size: int, cause: str, reason: str | None,
    metrics: Mapping[str, float] | None,
) -> None:  # fmt: skip
    """Write the result of a run that is done, and then its DONE marker.

    Args:
        paths: paths of the run.
        step: the last step.
        num_steps: steps of the whole run.
        attempt: number of the last attempt, from 0.
        world_size: number of ranks.
        cause: why the run ended.
        reason: why it ended before `num_steps`; None if it did not.
        metrics: final metrics.
    """
    write_json(
        paths.result,
        {
            "run_id": paths.run_id, "step": step, "num_steps": num_steps, "attempts": attempt + 1,
            "world_size": world_size, "cause": cause, "reason": reason, "metrics": metrics,
        },
    )  # fmt: skip
    # DONE comes last: a reader that sees it relies on the result.
    write_json(paths.marker(DONE), {"time": time.time()})


def _typed(
    record: Mapping[str, Any], kinds: Mapping[str, Callable[[object], Any]], path: Place, faults: Faults | None
) -> dict[str, Any]:
    fields = {}
    for key, convert in kinds.items():
        if record.get(key) is not None:
            try:
                fields[key] = convert(record[key])
            except ValueError as error:
                tell(faults, path, f"{key}: {error}")
    return fields


def _with_metrics(record: Mapping[str, Any]) -> dict[str, Any]:
    metrics = record.get("metrics")
    if not isinstance(metrics, dict):
        return {}
    return {"metrics": metric_values(metrics)}
