"""Lines of a failed run's output that tell why it ended: its last traceback, what led to it, and the sign they show.

A job may print any text: the text is matched here, and escaped where it is shown (cli/common.py).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from hpc_trainer.record.signs import SIGNS, Sign

_MAX_CHARS, _MAX_FOUND = 500, 80
_RANK = re.compile(r"^\[rank\d+\]: ")
_TRACEBACK = re.compile(r"Traceback \(most recent call last\)")
# Errors of a program that only passes on the failure of another one, which is told above it.
_PASSED_ON = re.compile(
    r"ChildFailedError|CalledProcessError|ProcessRaisedException|ProcessExitedException|the program ended with|"
    r"Primary job terminated|BrokenProcessPool"
)
_DIRECT_CAUSE = "the direct cause of the following exception"
_WARNING = re.compile(r"\bWARNING\b|Warning: |\[W\d|level=warn|(?i:\bretrying\b)")
_ABORTED = re.compile(r"ended with SIGABRT|^Aborted\b|what\(\):|terminate called")
_SAYS_WHY, _LINES_ABOVE = re.compile(r"terminate called|OMP: Error"), 3


def sign_of(lines: Iterable[str]) -> Sign | None:
    """Return the sign that the newest telling line shows, with `matched`, `line` and `says` filled in, or None.

    If the output ends with a traceback, only its error counts: earlier lines did not end the run.
    """
    lines = _without_ranks(lines)
    sign = next(_signs_in(_telling(lines), lines), None)
    if sign is None:
        return None
    for pattern, name in sign.unless:
        if any(re.search(pattern, line) for line in lines):
            other = next(each for each in SIGNS if each.name == name)
            return replace(other, matched=sign.matched, line=sign.line)
    if _ABORTED.search(sign.line):
        reasons = _signs_in(_before_abort(lines), lines)
        return next((reason for reason in reasons if reason.name != sign.name), sign)
    return sign


def _signs_in(chosen: Sequence[str], lines: Sequence[str]) -> Iterator[Sign]:
    """Yield the sign of each chosen line that has one, the newest line first."""
    for line in reversed(chosen):
        for sign in SIGNS:
            match = re.search(sign.pattern, line[:_MAX_CHARS])  # compiled when first reached
            if match is not None:
                named = next((group for group in match.groups() if group), "")[:_MAX_FOUND]
                shown = named if sign.finds is None else sign.finds(lines)
                yield replace(sign, says=sign.says.replace("{found}", shown), matched=named, line=line)
                break


def _before_abort(lines: Sequence[str]) -> list[str]:
    """Return the lines in which a program that aborted says why: its library's error and the lines just above it."""
    ends = [index for index, line in enumerate(lines) if _SAYS_WHY.search(line)]
    return [line for line in lines[max(0, ends[-1] - _LINES_ABOVE) :] if not _WARNING.search(line)] if ends else []


_NEAR_THE_END = 10


def last_error(lines: Sequence[str]) -> str | None:
    """Return the line `ValueError: ..` of a traceback with which a program ended; None if it did not end with one."""
    lines = _without_ranks(lines)
    for begin, end in reversed(_tracebacks(lines)):
        error = _error_of(lines, begin, end)
        if error is None:
            return None
        if _PASSED_ON.search(lines[error]):
            continue
        return lines[error].strip()[:_MAX_CHARS] if end - error <= _NEAR_THE_END else None
    return None


def last_traceback(lines: Sequence[str]) -> Sequence[str]:
    """Return the traceback of the error with which a program ended, with its causes; all lines if there is none."""
    lines = _without_ranks(lines)
    return lines[_beginning(lines) :]


def _without_ranks(lines: Iterable[str]) -> list[str]:
    """Return the lines without torch's prefix for the rank that printed them."""
    return [_RANK.sub("", line) for line in lines]


def _tracebacks(lines: Sequence[str]) -> list[tuple[int, int]]:
    """Return for each traceback its first line and the first line of what may follow it."""
    begins = [index for index, line in enumerate(lines) if _TRACEBACK.search(line)]
    return [*itertools.pairwise([*begins, len(lines)])]


def _error_of(lines: Sequence[str], begin: int, end: int) -> int | None:
    """Return the index of the line that names the error of a traceback; None if it is missing."""
    return next((index for index in range(begin + 1, end) if lines[index][:1].strip()), None)


def _beginning(lines: Sequence[str]) -> int:
    """Return where the traceback begins that ended the run, or the first of its causes; 0 if there is none."""
    for begin, end in reversed(_tracebacks(lines)):
        error = _error_of(lines, begin, end)
        is_passed_on = error is None or _PASSED_ON.search(lines[error])
        if not is_passed_on and not _has_cause_above(lines, begin):
            return begin
    return 0


def _telling(lines: Sequence[str]) -> list[str]:
    """Return the lines that may show why a run ended: no warnings, nothing above the last error's traceback."""
    has_frames = any(map(_TRACEBACK.search, lines))
    lines_left = [line for line in lines[_beginning(lines) :] if not (has_frames and line[:2] == "  ")]
    return [line for line in lines_left if not _WARNING.search(line)]


def _has_cause_above(lines: Sequence[str], index: int) -> bool:
    """Return True if the error of the traceback that begins at `index` was caused by that of the traceback above it."""
    return any(_DIRECT_CAUSE in line for line in lines[max(0, index - 3) : index])


def with_causes(lines: Sequence[str], most: int) -> list[str]:
    """Return the last `most` lines, and above them the chain of tracebacks that led to the last one, without frames."""
    first = max(0, len(lines) - most)
    chain: list[str] = []
    for begin, end in reversed(_tracebacks(lines)):
        index = _error_of(lines, begin, end)
        if begin < first:
            error = [line for line in lines[begin + 1 : min(end, first)] if line.strip() and not line[:1].isspace()]
            chain = [lines[begin], *error, *chain]
        is_passed_on = index is not None and _PASSED_ON.search(lines[index])
        if not is_passed_on and not _has_cause_above(lines, begin):
            break
    return [*chain, *lines[first:]]


def found_in(lines: Sequence[str], line: str) -> Iterator[int]:
    """Yield the numbers, counted from 1, of the lines that are or contain this one, the newest first."""
    wanted = line.strip()
    for index in range(len(lines) - 1, -1, -1):
        if wanted and wanted in lines[index]:
            yield index + 1
