"""The queue (squeue), read once for all jobs of a command; and whose a job is."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpc_trainer.errors import UnclearError
from hpc_trainer.slurm.commands import run_slurm

# A header, and a mark at the end of each row: without them an empty answer, and one that was cut, would look whole.
_END = "|end"
_QUEUE_FORMAT = f"%i|%T|%N|%r|%k|%j{_END}"
CLOCKS_S = 600.0
"""By this much clocks of login nodes and nodes may differ; no controller comes to the same job id again as soon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """What squeue and sacct both say of one job or array element."""

    job_id: str
    state: str
    node: str
    comment: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueEntry(JobRow):
    """One that Slurm has not forgotten."""

    reason: str


def read_queue() -> dict[str, QueueEntry]:
    """All of this user's jobs in the queue by id, array elements one by one (`squeue -r`).

    One call whatever the number of jobs. Without `-r` long array ranges come truncated, without `-a` jobs in hidden
    partitions do not come at all.

    Raises:
        SlurmError: no answer, or one that cannot be read to its end.
    """
    user = str(os.getuid())  # a user in a container may have no name
    return parse_queue(run_slurm(["squeue", "-a", "-r", "-u", user, "-o", _QUEUE_FORMAT], timeout_s=30.0))


def parse_queue(text: str) -> dict[str, QueueEntry]:
    """Reads `squeue -r -o %i|%T|%N|%r|%k|%j|end`.

    Raises:
        SlurmError: this is not what squeue prints, or not all of it.
    """
    entries = {}
    for row in table_rows("squeue", text, first="JOBID", num_columns=6, end=_END):
        parts = row.split("|", 4)
        # A comment or a name may hold bars and line breaks; nothing before them does.
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
    """The rows of an answer between its header and its end. What a site prints before the header is passed over.

    Raises:
        UnclearError: this is not what the command prints, or not all of it.
    """
    # The last line break may be gone: shells drop it.
    begin, *rows = re.split(re.escape(end) + r"[ \t\r]*\n", text.rstrip() + "\n")
    header = begin.splitlines()[-1].split("|") if begin else []
    if not rows or header[:1] != [first] or len(header) != num_columns:
        raise unreadable(command, text)
    if rows.pop().strip():
        raise UnclearError(f"the answer of {command} was cut: it ends with {text.rstrip()[-80:]!r}")
    return rows


def is_job(parts: Sequence[str]) -> bool:
    """True if these columns are as of a job: its id first, and no line break."""
    return parts[0].strip()[:1].isdecimal() and not any("\n" in part for part in parts)


def unreadable(command: str, text: str) -> UnclearError:
    """The error of an answer, or a row, that is none of this command's."""
    return UnclearError(f"{command} answered what cannot be read: {text.strip()[:200] or 'nothing'!r}")


_AFTER_ARRAY = re.compile(r"[_.+]")


def array_of(job_id: str) -> str:
    """`123` of `123_4`."""
    return _AFTER_ARRAY.split(job_id, maxsplit=1)[0]


def job_name(sweep: str, uuid: str) -> str:
    """The name of a submission's job: a person finds the sweep in it, and `is_of` the submission."""
    return f"{sweep}-{uuid[:8]}"


def is_of(entry: JobRow, uuid: str) -> bool:
    """True if this job is of the submission `uuid`. Its id alone says nothing: ids come again.

    They do when they pass MaxJobId, when a controller is installed anew, and on each cluster for itself. The comment
    carries the uuid; where a site rewrites comments, the job's name still ends with its beginning.
    """
    return bool(uuid) and (uuid in entry.comment or entry.name.endswith(f"-{uuid[:8]}"))


def find_by_uuid(entries: Iterable[JobRow], uuid: str) -> str | None:
    """The job id (array id) of a submission's job: how an intent without an answer finds its job."""
    return next((array_of(entry.job_id) for entry in entries if is_of(entry, uuid)), None)
