"""Slurm's queue (squeue), read once for all jobs of a command, and the match of jobs to submissions."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpc_trainer.errors import UnclearError
from hpc_trainer.slurm.commands import run_slurm

# A header and a mark at the end of each row: without them an empty or truncated answer would look complete.
_END = "|end"
_QUEUE_FORMAT = f"%i|%T|%N|%r|%k|%j{_END}"
CLOCKS_S = 600.0
"""Seconds by which clocks of login nodes and nodes may differ; no controller reuses a job id within that time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """Fields of one job or array element that both squeue and sacct print."""

    job_id: str
    state: str
    node: str
    comment: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueEntry(JobRow):
    """Job or array element that the controller still remembers."""

    reason: str


def read_queue() -> dict[str, QueueEntry]:
    """Return all of this user's jobs in the queue by id, one entry for each array element (`squeue -r`).

    One call reads any number of jobs. Without `-r` squeue truncates long array ranges; without `-a` it omits jobs in
    hidden partitions.

    Raises:
        SlurmError: squeue gives no answer, or one that is unreadable or incomplete.
    """
    user = str(os.getuid())  # a user in a container may have no name
    return parse_queue(run_slurm(["squeue", "-a", "-r", "-u", user, "-o", _QUEUE_FORMAT], timeout_s=30.0))


def parse_queue(text: str) -> dict[str, QueueEntry]:
    """Parse the output of `squeue -r -o %i|%T|%N|%r|%k|%j|end`.

    Raises:
        SlurmError: the text is not squeue's output, or is incomplete.
    """
    entries = {}
    for row in table_rows("squeue", text, first="JOBID", num_columns=6, end=_END):
        parts = row.split("|", 4)
        # A comment or a name may contain bars and line breaks; no field before them does.
        if len(parts) != 5 or "|" not in parts[4] or not is_job(parts[:4]):
            raise unreadable("squeue", row)
        job_id, state, node, reason, rest = (part.strip() for part in parts)
        comment, _, name = rest.rpartition("|")
        entries[job_id] = QueueEntry(
            job_id=job_id,
            state=state,
            node=node,
            reason=reason,
            comment="" if comment == "(null)" else comment,
            name=name,
        )
    return entries


def table_rows(command: str, text: str, *, first: str, num_columns: int, end: str) -> list[str]:
    """Return the rows of an answer after its header; text that a site prints before the header is skipped.

    Raises:
        UnclearError: the text is not the command's output, or is incomplete.
    """
    # The last line break may be missing: shells drop it.
    begin, *rows = re.split(re.escape(end) + r"[ \t\r]*\n", text.rstrip() + "\n")
    header = begin.splitlines()[-1].split("|") if begin else []
    if not rows or header[:1] != [first] or len(header) != num_columns:
        raise unreadable(command, text)
    if rows.pop().strip():
        raise UnclearError(f"the answer of {command} was cut: it ends with {text.rstrip()[-80:]!r}")
    return rows


def is_job(parts: Sequence[str]) -> bool:
    """Return True if these columns describe a job: they begin with a job id and contain no line break."""
    return parts[0].strip()[:1].isdecimal() and not any("\n" in part for part in parts)


def unreadable(command: str, text: str) -> UnclearError:
    """Return the error for an answer or a row that is not this command's output."""
    return UnclearError(f"{command} answered what cannot be read: {text.strip()[:200] or 'nothing'!r}")


_AFTER_ARRAY = re.compile(r"[_.+]")


def array_of(job_id: str) -> str:
    """Return the array id of a job id: `123` for `123_4`."""
    return _AFTER_ARRAY.split(job_id, maxsplit=1)[0]


def job_name(sweep: str, uuid: str) -> str:
    """Return the name of a submission's job: the sweep for the user to read, and the beginning of the uuid."""
    return f"{sweep}-{uuid[:8]}"


def is_of(entry: JobRow, uuid: str) -> bool:
    """Return True if this job belongs to the submission `uuid`; its id alone proves nothing.

    Slurm reuses ids after MaxJobId and after a new installation of the controller, and each cluster counts its own.
    The comment carries the uuid; if a site rewrites comments, the job's name still ends with the uuid's beginning.
    """
    return bool(uuid) and (uuid in entry.comment or entry.name.endswith(f"-{uuid[:8]}"))


def find_by_uuid(entries: Iterable[JobRow], uuid: str) -> str | None:
    """Return the job id (array id) of the submission `uuid`; None if no entry belongs to it.

    An intent without an answer finds its job in this way.
    """
    return next((array_of(entry.job_id) for entry in entries if is_of(entry, uuid)), None)
