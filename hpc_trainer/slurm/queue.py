"""The queue (squeue) and the accounting (sacct), each read once for all jobs of a command."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpc_trainer.errors import MissingCommandError, RefusedError, SlurmError, UnclearError
from hpc_trainer.slurm.commands import run_slurm

# A header, and a mark at the end of each row: without them an empty answer, and one that was cut, would look whole.
_END = "|end"
_QUEUE_FORMAT = f"%i|%T|%N|%r|%k|%j{_END}"
_ACCOUNTING_FIELDS = "JobID,State,ExitCode,NodeList,JobName,Comment"
_ACCOUNTING_END = "|"
"""What `sacct -p` puts there by itself."""
CLOCKS_S = 600.0
"""By this much clocks of login nodes and nodes may differ; no controller comes to the same job id again as soon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueEntry:
    """One job or array element that Slurm has not forgotten."""

    job_id: str
    state: str
    node: str
    reason: str
    comment: str = ""
    name: str = ""


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
    for row in _rows("squeue", text, first="JOBID", num_columns=6, end=_END):
        parts = row.split("|", 4)
        # A comment or a name may hold bars and line breaks; nothing before them does.
        if len(parts) != 5 or "|" not in parts[4] or not _is_job(parts[:4]):
            raise _unreadable("squeue", row)
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


def _rows(command: str, text: str, *, first: str, num_columns: int, end: str) -> list[str]:
    """The rows of an answer between its header and its end. What a site prints before the header is passed over."""
    # The last line break may be gone: shells drop it.
    begin, *rows = re.split(re.escape(end) + r"[ \t\r]*\n", text.rstrip() + "\n")
    header = begin.splitlines()[-1].split("|") if begin else []
    if not rows or header[:1] != [first] or len(header) != num_columns:
        raise _unreadable(command, text)
    if rows.pop().strip():
        raise UnclearError(f"the answer of {command} was cut: it ends with {text.rstrip()[-80:]!r}")
    return rows


def _is_job(parts: Sequence[str]) -> bool:
    """True if these columns are as of a job: its id first, and no line break."""
    return parts[0].strip()[:1].isdecimal() and not any("\n" in part for part in parts)


def _unreadable(command: str, text: str) -> UnclearError:
    return UnclearError(f"{command} answered what cannot be read: {text.strip()[:200] or 'nothing'!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountingEntry:
    """How one job or array element ended, by slurmdbd. Array elements that have not begun share one (`7_[0-4%2]`)."""

    job_id: str
    state: str
    exit_code: str
    node: str
    name: str = ""
    comment: str = ""

    def may_cover(self, index: int) -> bool:
        """True if it stands for array element `index` among others: `7` and `7_[0-4%2]` do."""
        if "_" not in self.job_id:
            return True
        listed = re.search(r"\[([^]%]*)", self.job_id)
        if listed is None:
            return False
        pairs = (re.fullmatch(r"(\d+)(?:-(\d+))?(?::\d+)?", part) for part in listed[1].split(","))
        # Slurm cuts long lists: `1,3,5...`.
        return any(pair is None or int(pair[1]) <= index <= int(pair[2] or pair[1]) for pair in pairs)


def read_accounting(job_ids: Iterable[str], since: float, *, timeout_s: float = 30.0) -> dict[str, AccountingEntry]:
    """What the accounting says of these jobs (array ids stand for all their elements), in one call.

    Ids come again: whose job a row is about, `is_of` says. Returns {} where the site keeps no accounting: other
    sources must do then.

    Args:
        since: seconds since the epoch; jobs that ended before it are left out.

    Raises:
        SlurmError: there is accounting, or may be, and it did not answer, or not to the end.
    """
    ids = sorted(set(job_ids))
    if not ids:
        return {}
    return _accounting(["-j", ",".join(ids)], since, timeout_s)


def _accounting(words: list[str], since: float, timeout_s: float) -> dict[str, AccountingEntry]:
    told = ask_accounting(["-o", _ACCOUNTING_FIELDS, *words], since, timeout_s)
    return {} if told is None else parse_accounting(told)


def ask_accounting(words: Sequence[str], since: float, timeout_s: float) -> str | None:
    """What `sacct -p -X` with these words prints of jobs since then; None where the site keeps no accounting.

    Raises:
        SlurmError: there is accounting, or may be, and it did not answer.
    """
    # So many seconds ago, not a time of the wall clock: that comes twice in the night in which summer time ends. With
    # -S also beside -j: what sacct takes without it has changed.
    start = f"now-{max(0, int(time.time() - since)) + CLOCKS_S:.0f}seconds"
    try:
        return run_slurm(["sacct", "-p", "-X", "-S", start, *words], timeout_s=timeout_s)
    except SlurmError as error:
        if isinstance(error, MissingCommandError) or _is_disabled(error):
            return None
        raise


def _is_disabled(error: SlurmError) -> bool:
    """True if sacct says that this site keeps no accounting ("Slurm accounting storage is disabled")."""
    return isinstance(error, RefusedError) and "disabled" in error.said


def parse_accounting(text: str) -> dict[str, AccountingEntry]:
    """Reads `sacct -p -X`; the state loses its tail (`CANCELLED by 1000`) and the truncation mark (`+`).

    Raises:
        SlurmError: this is not what sacct prints, or not all of it.
    """
    entries = {}
    for row in _rows("sacct", text, first="JobID", num_columns=6, end=_ACCOUNTING_END):
        parts = row.split("|", 5)
        if len(parts) != 6 or not _is_job(parts[:4]):
            raise _unreadable("sacct", row)
        job_id, state, exit_code, node, name, comment = parts
        word = state.split()[0].rstrip("+") if state.split() else "UNKNOWN"
        entries[job_id] = AccountingEntry(
            job_id=job_id,
            state=word,
            exit_code=exit_code,
            node="" if node == "None assigned" else node,
            name=name,
            comment=comment,
        )
    return entries


_AFTER_ARRAY = re.compile(r"[_.+]")


def array_of(job_id: str) -> str:
    """`123` of `123_4`."""
    return _AFTER_ARRAY.split(job_id, maxsplit=1)[0]


def job_name(sweep: str, uuid: str) -> str:
    """The name of a submission's job: a person finds the sweep in it, and `is_of` the submission."""
    return f"{sweep}-{uuid[:8]}"


def is_of(entry: QueueEntry | AccountingEntry, uuid: str) -> bool:
    """True if this job is of the submission `uuid`. Its id alone says nothing: ids come again.

    They do when they pass MaxJobId, when a controller is installed anew, and on each cluster for itself. The comment
    carries the uuid; where a site rewrites comments, the job's name still ends with its beginning.
    """
    return bool(uuid) and (uuid in entry.comment or entry.name.endswith(f"-{uuid[:8]}"))


def find_by_uuid(entries: Iterable[QueueEntry], uuid: str) -> str | None:
    """The job id (array id) of a submission's job: how an intent without an answer finds its job."""
    return next((array_of(entry.job_id) for entry in entries if is_of(entry, uuid)), None)


def find_ended(sweep: str, uuid: str, since: float) -> str | None:
    """The array id of a submission whose job has left the queue already, from the accounting; None without one.

    Args:
        since: seconds since the epoch at which the intent was written.

    Raises:
        SlurmError: there is accounting, or may be, and it did not answer.
    """
    entries = _accounting(["--name", job_name(sweep, uuid)], since, timeout_s=30.0)
    return next((array_of(entry.job_id) for entry in entries.values() if is_of(entry, uuid)), None)


def keeps_accounting(*, timeout_s: float = 30.0) -> bool:
    """False only where sacct itself says that this site keeps no accounting."""
    try:
        run_slurm(["sacct", "-n", "-X", "-S", "now", "-o", "JobID"], timeout_s=timeout_s)
    except SlurmError as error:
        return not _is_disabled(error)
    return True


def cluster_name() -> str:
    """What the cluster that answers here calls itself (ClusterName).

    Raises:
        SlurmError: it does not say.
    """
    try:
        found = parse_cluster_name(run_slurm(["scontrol", "show", "config"], timeout_s=15.0))
    except SlurmError as error:
        raise type(error)(f"scontrol does not say which cluster this is ({error})", error.said) from error
    if found is None:
        raise UnclearError("scontrol does not say which cluster this is (no ClusterName)")
    return found


def parse_cluster_name(config: str) -> str | None:
    """ClusterName of `scontrol show config`."""
    found = re.search(r"^ClusterName\s*= (\S+)\s*$", config, re.MULTILINE)
    return found[1] if found else None
