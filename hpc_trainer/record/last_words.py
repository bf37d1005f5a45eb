"""Last output of a job that ended before or outside Python; record/signs.py has the meanings of lines.

A job may print any text: the text is matched here, and escaped where it is shown (cli/common.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.reading import Faults, is_there, read_ends
from hpc_trainer.record.run_folder import RunFolder

NOT_STARTED = "not started"
"""Cause that the local queue records for such a run, and the key of its verdict."""
SETUP_ENDED = "hpc_trainer: the job ends at cluster.setup line"
"""Beginning of the line that a shell prints when a line of cluster.setup fails; its number and status follow."""

_SETUP = re.compile(rf"{SETUP_ENDED} (\d+): exit status (\d+)")
_SYNTAX = "syntax error"
_TAIL_BYTES = 8192
_MAX_CHARS, _MAX_LINES = 500, 12
_LOGS_TO = " logs to "
"""Part of the last line that a rank prints into its job's output, before it writes into its own log."""
# Beginnings of Slurm's lines about the end itself, which do not name its cause.
_NOT_THE_CAUSE = ("slurmstepd", "srun: error", "srun: Job step aborted", "srun: launch/slurm", "srun: Terminating")


def words_before_the_worker(
    folder: RunFolder, setup: Sequence[str], num_of_environment: int, faults: Faults
) -> Mapping[str, Any]:
    """Return a record like a rank's failure for a job that ended before its worker began.

    Args:
        folder: the run's folder.
        setup: the lines of cluster.environment and cluster.setup.
        num_of_environment: how many of these are of cluster.environment.
        faults: gets a fault for output that cannot be read.

    Returns:
        `cause`, a one-line `message` that names the cause, and `output`, the last lines.
    """
    lines = _printed(folder, faults)
    by_setup = words_of_setup(lines, setup, num_of_environment)
    if by_setup is not None:
        return by_setup
    own = [line for line in _since_logs(lines) if not _SETUP.match(line)]
    shown = [line for line in lines if not line.startswith(_NOT_THE_CAUSE)] or lines
    if _has_sign(own):
        shown = own
    elif shown and _LOGS_TO in shown[-1]:  # the rank already wrote into its own log, whose first line names the job
        said = _tail(folder.paths.logs / _log_name(shown[-1]), faults)
        shown = own = [line for line in said if f": job {folder.job_id}, start " not in line] or shown
    message = "the job ended before the worker began"
    if shown:
        return _failure_before_start(f"{message}: {_most_telling(shown)}", own)
    printed = _output_of(folder)
    if not is_there(printed):  # Slurm creates the file on the node when the job starts
        blind = "does the node see this folder at the same path, and may it write there?"
        return _failure_before_start(f"{message}, and its node has made no {printed}: {blind}", own)
    return _failure_before_start(f"{message}.", own)


def words_of_setup(lines: Sequence[str], setup: Sequence[str], num_of_environment: int = 0) -> Mapping[str, Any] | None:
    """Return the record of `words_before_the_worker` if a line before the ranks ended the newest start, else None."""
    ends = [index for index, line in enumerate(lines) if _SETUP.match(line)]
    if not ends or any(_LOGS_TO in line for line in lines[ends[-1] :]):
        return None
    match = _SETUP.match(lines[ends[-1]])
    assert match is not None
    number, status = int(match[1]), int(match[2])
    said = lines[: ends[-1]]
    earlier = [index for index, line in enumerate(said) if _LOGS_TO in line or line.startswith(_NOT_THE_CAUSE)]
    said = [line for line in said[earlier[-1] + 1 if earlier else 0 :] if not _SETUP.match(line)]
    why = _most_telling(said) if said else f"exit status {status}"
    if any(_SYNTAX in line for line in said[-2:]):  # the number is of the line before; bash's own message is right
        return _failure_before_start(f"bash cannot parse cluster.setup: {why}", said)
    line = f"`{setup[number - 1]}`" if 0 < number <= len(setup) else f"exit status {status}"
    number -= num_of_environment
    where = f"cluster.setup line {number}" if number > 0 else "a line of cluster.environment"
    return _failure_before_start(f"{where} failed: {line}: {why}", said)


def words_of_death(folder: RunFolder, faults: Faults) -> Mapping[str, Any]:
    """Return a record like a rank's failure for a worker that recorded no error, from the output; {} if it has none."""
    lines = _printed(folder, faults)
    said = _since_logs(lines)
    if not _has_sign(said) and len(said) < len(lines):
        log = _tail(folder.paths.logs / _log_name(lines[-len(said) - 1]), faults)
        said = [*log, *said] if _has_sign(log) else said
    return {"message": _most_telling(said)[:_MAX_CHARS], "output": _last(said)} if said else {}


def _failure_before_start(message: str, said: Sequence[str]) -> Mapping[str, Any]:
    return {"cause": NOT_STARTED, "message": message[:_MAX_CHARS], "output": _last(said)}


def _last(lines: Sequence[str]) -> str:
    return "\n".join(line[:_MAX_CHARS] for line in lines[-_MAX_LINES:])


def _most_telling(lines: Sequence[str]) -> str:
    """Return the newest line with a sign, else the newest line that is not Slurm's, else the newest line."""
    with_sign = [line for line in lines if _has_sign([line])]
    others = [line for line in lines if not line.startswith(_NOT_THE_CAUSE)]
    return (with_sign or others or [*lines])[-1]


def _has_sign(lines: Sequence[str]) -> bool:
    from hpc_trainer.record.tracebacks import sign_of  # late: only failed runs need the table of signs

    return sign_of(lines) is not None


def _printed(folder: RunFolder, faults: Faults) -> list[str]:
    return _tail(_output_of(folder), faults)


def _output_of(folder: RunFolder) -> Path:
    """Return the output file of the job's batch shell."""
    return SweepPaths(folder.paths.folder.parent).scripts / f"{folder.job_id}.out"


def _since_logs(lines: Sequence[str]) -> list[str]:
    """Return the lines after the last one in which a rank announced its own log; all lines if there is none."""
    begin = max((index + 1 for index, line in enumerate(lines) if _LOGS_TO in line), default=0)
    return [*lines[begin:]]


def _log_name(line: str) -> str:
    return Path(line.rpartition(_LOGS_TO)[2]).name


def _tail(path: Path, faults: Faults) -> list[str]:
    """Return the non-empty lines at the end of a text file; [] if there is no file."""
    text = read_ends(path, faults, last=_TAIL_BYTES)[1].decode(errors="replace")
    return [line.strip() for line in text.splitlines() if line.strip()]
