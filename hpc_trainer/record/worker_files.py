"""Small files that a worker writes about its run: heartbeat, result, failures, and the weights it began with.

heartbeat.json and result.json; logs/attempt-NNN.failure.json, the error of the first failing rank, which the journal's
`error` repeats; first_weights.json, what a run with `init_from` began with.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpc_trainer.config.name_patterns import listed
from hpc_trainer.record.files import write_json
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.reading import (
    Faults,
    Kinds,
    as_count,
    as_table,
    as_text,
    as_time,
    is_number,
    metric_values,
    parsed_file,
    read_json,
    tell,
    tuple_of,
    typed,
)
from hpc_trainer.record.shared_folder import Place
from hpc_trainer.record.states import DONE

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


_FAILURE = {
    "rank": as_count, "node": as_text, "exit_code": as_count, "type": as_text, "message": as_text,
    "traceback": as_text, "output": as_text, "time": as_time, "cause": as_text, "start": as_text, "frame": as_text,
}  # fmt: skip
# A line of a traceback, and the line of code below it. The line of a SyntaxError names no function.
_FRAME = re.compile(r'^ *File "([^"<][^"]*)", line (\d+)(?:, in (.+))?\n(?: *(?!File ")(\S.*))?', re.MULTILINE)
_INSTALLED = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python3(?:\.\d+)?/")
_OURS = str(Path(__file__).parents[1])
_MAX_CODE = 200


def read_failure(path: Path, faults: Faults | None = None) -> dict[str, Any]:
    """Return the record of a failure file; {} if there is no readable file."""
    return read_error(read_json(path, faults) or {})


def read_error(record: object) -> dict[str, Any]:
    """Return an error without values that no worker writes; {} if `record` is no mapping."""
    if not isinstance(record, Mapping):
        return {}
    error = dict(record)
    for key, convert in _FAILURE.items():
        if key in error:
            with contextlib.suppress(ValueError):
                error[key] = convert(error[key])
                continue
            del error[key]
    if not isinstance(error.get("memory", {}), dict):
        del error["memory"]
    return error


def own_frame(text: str, trust: Iterable[str] = ()) -> str | None:
    """Return the innermost frame of the user's own code in a traceback's text; None if there is none.

    An example: `train.py:7 in loss: raise ValueError(x)`. Code is the user's own if it is neither hpc_trainer's nor
    installed, or if it is trusted.

    Args:
        text: the text of a traceback.
        trust: names of trusted modules.
    """
    files = {name: str(getattr(sys.modules.get(name), "__file__", None) or "") for name in trust}
    trusted = [os.path.join(os.path.dirname(file), "") for file in files.values() if file]  # noqa: PTH118, PTH120
    frames = [frame for frame in _FRAME.finditer(text) if _is_own(frame[1], trusted)]
    if not frames:
        return None
    file, line, function, code = frames[-1].groups()
    where = f"{_short_path(file)}:{line}" + (f" in {function}" if function else "")
    return f"{where}: {code.strip()[:_MAX_CODE]}" if code else where


def _is_own(file: str, trusted: Iterable[str]) -> bool:
    if file.startswith(tuple(trusted)):
        return True
    return _INSTALLED.search(file) is None and not file.startswith(os.path.join(_OURS, ""))  # noqa: PTH118


def _short_path(file: str) -> str:
    """Return the path without the `sys.path` folder of its import, which for frozen code is a copy of the user's."""
    places = [os.path.join(place, "") for place in sys.path if place and file.startswith(os.path.join(place, ""))]  # noqa: PTH118
    return file[len(max(places, key=len, default="")) :]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstWeights:
    """Weights that `init_from` loaded, and those that it did not. Names are the model's, except in `unused`."""

    path: str
    digest: str
    loaded: Mapping[str, str] = field(default_factory=dict)
    """Name in the model -> name in the file."""
    converted: Sequence[str] = ()
    """Names in `loaded` whose number format in the file differs."""
    begin_anew: Sequence[str] = ()
    """Names that `init_from.include` and `exclude` leave out."""
    unused: Sequence[str] = ()
    """Names in the file that the model does not have, or that were left out."""

    def line(self) -> str:
        """Return the sentence for the log, `show` and `why`."""
        parts = [f"{len(self.loaded)} weights and buffers are from {self.path}"]
        if self.converted:
            parts.append(f"{len(self.converted)} of them in another number format")
        if self.begin_anew:
            parts.append(f"{listed(self.begin_anew)} began anew")
        if self.unused:
            parts.append(f"not used: {listed(self.unused)}")
        return f"init_from: {'; '.join(parts)}."


def write_first_weights(paths: RunPaths, found: FirstWeights) -> None:
    """Write the file; raise OSError if the file system refused."""
    write_json(paths.first_weights, asdict(found))


def read_first_weights(paths: RunPaths, faults: Faults | None = None) -> FirstWeights | None:
    """Return the record of a run; None if it started without `init_from`, has none yet, or the file is unreadable."""
    reported = Faults() if faults is None else faults
    return parsed_file(
        paths.first_weights, lambda record: FirstWeights(**typed(record, _NEEDED_FIELDS, _OTHER_FIELDS)), reported
    )


def _as_names(value: object) -> dict[str, str]:
    return {name: as_text(there) for name, there in as_table(value).items()}


_as_list = tuple_of(as_text)
_NEEDED_FIELDS = {"path": as_text, "digest": as_text}
_OTHER_FIELDS = {"loaded": _as_names, "converted": _as_list, "begin_anew": _as_list, "unused": _as_list}


OVERHEATED, DEVICE_FAILED = "overheated", "device_failed"
MOVE_CAUSES = frozenset((OVERHEATED, DEVICE_FAILED))
"""Causes of attempts that ended so that the run leaves a node."""
MAX_MOVES = 3
"""Largest number of moves since a user submitted the run: if four nodes in a row fail, the nodes are not the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Move of a run away from one node, which one attempt asked for."""

    node: str
    """Slurm's name of the node that the run must not get again."""
    cause: str
    """One of `MOVE_CAUSES`."""
    why: str
    """Line for the user, such as `the GPU of rank 3 on n7 lowers its clocks (..)`."""
    time: float
    """Time of the request, in seconds since the epoch."""

    @property
    def text(self) -> str:
        """Line for the user: the cause, the node and the reason."""
        return f"{self.cause}, it leaves {self.node}: {self.why}"


def write_move(paths: RunPaths, attempt: int, move: Move) -> None:
    """Replace the file; raise OSError if the file system refused."""
    write_json(paths.move(attempt), asdict(move), sync=False)


def read_move(paths: RunPaths, attempt: int, faults: Faults | None = None) -> Move | None:
    """Return the move of an attempt; None if there is none, or it cannot be read."""
    return parsed_file(paths.move(attempt), lambda record: Move(**typed(record, _MOVE)), faults)


_MOVE: Kinds = {"node": as_text, "cause": as_text, "why": as_text, "time": as_time}
