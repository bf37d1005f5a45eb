"""The queue (squeue) and the accounting (sacct), each read once for all jobs of a command."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass

from hpc_trainer.errors import SlurmError
from hpc_trainer.slurm.commands import run_slurm

_QUEUE_FORMAT = "%i|%T|%N|%r|%k|%j"
_ACCOUNTING_FIELDS = "JobID,State,ExitCode,NodeList,ElapsedRaw"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueEntry:
    """One job or array element that Slurm has not forgotten."""

    job_id: str
    state: str
    node: str
    reason: str
    comment: str = ""
    name: str = ""


def read_queue(*, timeout_s: float = 30.0) -> dict[str, QueueEntry]:
    """All of this user's jobs in the queue by id, array elements one by one (`squeue -r`).

    One call whatever the number of jobs. Without `-r` long array ranges come truncated.

    Raises:
        SlurmError: no answer.
    """
    user = str(os.getuid())  # a user in a container may have no name
    return parse_queue(run_slurm(["squeue", "-h", "-r", "-u", user, "-o", _QUEUE_FORMAT], timeout_s=timeout_s))


def parse_queue(text: str) -> dict[str, QueueEntry]:
    """Reads `squeue -h -r -o %i|%T|%N|%r|%k|%j`; lines of another form are passed over."""
    entries = {}
    for line in text.splitlines():
        parts = [part.strip() for part in line.split("|", 4)]
        if len(parts) == 5:
            job_id, state, node, reason, rest = parts
            comment, _, name = rest.rpartition("|") if "|" in rest else (rest, "", "")  # a comment may hold bars
            entries[job_id] = QueueEntry(
                job_id=job_id,
                state=state,
                node=node,
                reason=reason,
                comment="" if comment == "(null)" else comment,
                name=name,
            )
    return entries


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountingEntry:
    """How one job or array element ended, by slurmdbd."""

    job_id: str
    state: str
    exit_code: str
    node: str
    elapsed_s: int


def read_accounting(job_ids: Iterable[str], *, timeout_s: float = 30.0) -> dict[str, AccountingEntry]:
    """What the accounting says of these jobs (array ids stand for all their elements), in one call.

    Returns {} where the site keeps no accounting: other sources must do then.

    Raises:
        SlurmError: there is accounting, or may be, and it did not answer.
    """
    ids = sorted(set(job_ids))
    if not ids:
        return {}
    argv = ["sacct", "-n", "-P", "-X", "-S", "now-30days", "-o", _ACCOUNTING_FIELDS, "-j", ",".join(ids)]
    return _accounting(argv, timeout_s)


def _accounting(argv: list[str], timeout_s: float) -> dict[str, AccountingEntry]:
    try:
        return parse_accounting(run_slurm(argv, timeout_s=timeout_s))
    except SlurmError as error:
        if "disabled" in str(error) or "is not on PATH" in str(error):
            return {}
        raise


def parse_accounting(text: str) -> dict[str, AccountingEntry]:
    """Reads `sacct -n -P -X`; the state loses its tail (`CANCELLED by 1000`) and the truncation mark (`+`)."""
    entries = {}
    for line in text.splitlines():
        parts = line.split("|")
        if len(parts) >= 5 and parts[0]:
            job_id, state, exit_code, node, elapsed = parts[:5]
            word = state.split()[0].rstrip("+") if state.split() else "UNKNOWN"
            elapsed_s = int(elapsed) if elapsed.isdecimal() else 0
            entries[job_id] = AccountingEntry(
                job_id=job_id,
                state=word,
                exit_code=exit_code,
                node="" if node == "None assigned" else node,
                elapsed_s=elapsed_s,
            )
    return entries


def array_of(job_id: str) -> str:
    """`123` of `123_4`."""
    return re.split(r"[_.+]", job_id, maxsplit=1)[0]


def job_name(sweep: str, uuid: str) -> str:
    """The name of a submission's job: a person finds the sweep in it, and settling the submission."""
    return f"{sweep}-{uuid[:8]}"


def find_by_uuid(entries: Iterable[QueueEntry], sweep: str, uuid: str) -> str | None:
    """The job id (array id) of a submission's job: how an intent without an answer finds its job.

    The comment carries the uuid; where a site rewrites comments, the job's name still does.
    """
    for entry in entries:
        if entry.comment == uuid or entry.name == job_name(sweep, uuid):
            return array_of(entry.job_id)
    return None


def find_ended(sweep: str, uuid: str, since: float, *, timeout_s: float = 30.0) -> str | None:
    """The array id of a submission whose job has left the queue already, from the accounting; None without one.

    Args:
        since: seconds since the epoch at which the intent was written.

    Raises:
        SlurmError: there is accounting, or may be, and it did not answer.
    """
    # A minute earlier: clocks of login node and controller differ.
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since - 60))
    argv = ["sacct", "-n", "-P", "-X", "-S", start, "--name", job_name(sweep, uuid), "-o", _ACCOUNTING_FIELDS]
    entries = _accounting(argv, timeout_s)
    return next((array_of(job_id) for job_id in entries), None)


def keeps_accounting(*, timeout_s: float = 30.0) -> bool:
    """False only where sacct itself says that this site keeps no accounting."""
    try:
        run_slurm(["sacct", "-n", "-X", "-S", "now", "-o", "JobID"], timeout_s=timeout_s)
    except SlurmError as error:
        return "disabled" not in str(error)
    return True
