"""logs/attempt-NNN.failure.json: the first failing rank's error, as the journal's `error` too."""

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
# A line of a traceback, and the line of code below it. Of a SyntaxError it names no function.
_FRAME = re.compile(r'^ *File "([^"<][^"]*)", line (\d+)(?:, in (.+))?\n(?: *(?!File ")(\S.*))?', re.MULTILINE)
_INSTALLED = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python3(?:\.\d+)?/")
_OURS = str(Path(__file__).parents[1])
_MAX_CODE = 200


def read_failure(path: Path, faults: Faults | None = None) -> dict[str, Any]:
    """The record of a failure file; {} if there is none that can be read."""
    return read_error(read_json(path, faults) or {})


def read_error(record: object) -> dict[str, Any]:
    """An error as a worker records it, without values that no worker writes."""
    if not isinstance(record, Mapping):
        return {}
    found = dict(record)
    for key, convert in _FIELDS.items():
        if key in found:
            with contextlib.suppress(ValueError):
                found[key] = convert(found[key])
                continue
            del found[key]
    if not isinstance(found.get("memory", {}), dict):
        del found["memory"]
    return found


def own_frame(text: str, trust: Iterable[str] = ()) -> str | None:
    """`train.py:7 in loss: raise ValueError(x)`: the innermost frame of a person's own code in a traceback's text.

    Their own is what is neither ours nor installed, and what they trust. None if no frame is.
    """
    files = {name: str(getattr(sys.modules.get(name), "__file__", None) or "") for name in trust}
    trusted = [os.path.join(os.path.dirname(file), "") for file in files.values() if file]  # noqa: PTH118, PTH120
    frames = [each for each in _FRAME.finditer(text) if _is_own(each[1], trusted)]
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
    """Less the folder that it was imported from: of frozen code that is a copy."""
    places = [os.path.join(each, "") for each in sys.path if each and file.startswith(os.path.join(each, ""))]  # noqa: PTH118
    return file[len(max(places, key=len, default="")) :]
