"""logs/attempt-NNN.failure.json: the error of the first failing rank, also recorded as the journal's `error`."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hpc_trainer.runs.reading import Faults, read_json
from hpc_trainer.runs.record_values import as_count, as_text, as_time

_FIELDS = {
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
    for key, convert in _FIELDS.items():
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
