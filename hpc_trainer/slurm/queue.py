"""Slurm's queue (squeue) and accounting (sacct), each read once for all jobs of a command."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hpc_trainer.errors import MissingCommandError, RefusedError, SlurmError, UnclearError
from hpc_trainer.slurm.commands import run_slurm
from hpc_trainer.slurm.jobs import parse_time
from hpc_trainer.slurm.terms import PENDING

# A header and a mark at the end of each row: without them an empty or truncated answer would look complete.
_END = "|end"
_QUEUE_FORMAT = f"%i|%T|%N|%r|%k|%j{_END}"
CLOCKS_S = 600.0
"""Seconds by which clocks of login nodes and nodes may differ; no controller reuses a job id within that time."""
LATE_ROW_S = 4.0
"""Seconds until a second look at Slurm counts, if a job was missing in the first.

An element that was about to begin was in neither squeue's nor sacct's answer for 2.4 s on a busy machine (22.05).
"""


@dataclass(slots=True, kw_only=True)  # not frozen: 10,000 instances would take 20 ms more
class JobRow:
    """Fields of one job or array element that both squeue and sacct print. Treat it as read-only."""

    job_id: str
    state: str
    node: str
    comment: str = ""
    name: str = ""


@dataclass(slots=True, kw_only=True)
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


_STARTS_FORMAT = f"%i|%S{_END}"


def read_starts(job_ids: Sequence[str], *, timeout_s: float = 30.0) -> dict[str, float]:
    """Return when Slurm expects these waiting jobs to start, in seconds since the epoch; unknown starts are left out.

    Args:
        job_ids: jobs, or elements of arrays.
        timeout_s: seconds after which squeue counts as silent.

    Raises:
        SlurmError: squeue gives no answer, or one that is unreadable or incomplete.
    """
    arrays = ",".join(dict.fromkeys(map(array_of, job_ids)))
    text = run_slurm(["squeue", "--start", "-a", "-r", "-j", arrays, "-o", _STARTS_FORMAT], timeout_s=timeout_s)
    rows = (row.split("|") for row in table_rows("squeue", text, first="JOBID", num_columns=2, end=_END))
    starts = {row[0].strip(): parse_time(row[1].strip()) for row in rows if len(row) == 2}
    return {job_id: start for job_id in job_ids if (start := starts.get(job_id)) is not None}


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
        job_id, state, node, reason, rest = map(str.strip, parts)
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
    return UnclearError(f"the answer of {command} cannot be read: {text.strip()[:200] or 'nothing'!r}")


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


# Slurm's accounting (sacct): how jobs ended, and for how long they had their nodes.


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Period in which a job had its nodes; times are in seconds since the epoch, `elapsed_s` is as sacct reports it."""

    job_id: str
    start_time: float
    end_time: float
    elapsed_s: float
    state: str
    """State in Slurm's terms."""

    @property
    def key(self) -> tuple[str, float]:
        """Key that distinguishes allocations: a requeued job has one for each start."""
        return self.job_id, self.start_time


@dataclass(frozen=True, slots=True, kw_only=True)
class JobUse:
    """Row of the accounting: one start of a job, or a job that waits; times in seconds since the epoch."""

    job_id: str
    user: str
    account: str
    submit_time: float
    start_time: float
    """0 if the job has not begun."""
    elapsed_s: float
    waited_s: float
    """Seconds in the queue before this start, from when the job could have begun."""
    limit_s: float
    """Time limit; 0 if there is none."""
    gpus: float
    cores: float
    is_newest: bool
    """True for the newest start of the job."""


_FIELDS = "JobID,State,ExitCode,NodeList,JobName,Comment,End"
_TIMES = "JobID,Start,End,ElapsedRaw,State"
_USES = "JobID,User,Account,Submit,Eligible,Start,ElapsedRaw,TimelimitRaw,AllocTRES,ReqTRES,State"
_TIMEOUT_S = 30.0
_LONG_TIMEOUT_S = 120.0  # for all jobs of all sweeps

# Linux limits one argument of a command to 128 KiB; an id has some 15 characters.
_IDS_A_CALL = 5_000


@dataclass(slots=True, kw_only=True)
class AccountingEntry(JobRow):
    """End of one job or array element, as slurmdbd records it. Elements that have not begun share one (`7_[0-4%2]`)."""

    exit_code: str
    end_time: float | None = None
    """End of the job in seconds since the epoch by Slurm's clock; None if it has not ended, or Slurm does not say."""

    def may_cover(self, index: int) -> bool:
        """Return True if this entry may include array element `index`, as `7` and `7_[0-4%2]` do."""
        if "_" not in self.job_id:
            return True
        listed = re.search(r"\[([^]%]*)", self.job_id)
        if listed is None:
            return False
        pairs = (re.fullmatch(r"(\d+)(?:-(\d+))?(?::\d+)?", part) for part in listed[1].split(","))
        # Slurm cuts long lists: `1,3,5...`.
        return any(pair is None or int(pair[1]) <= index <= int(pair[2] or pair[1]) for pair in pairs)


def read_accounting(
    job_ids: Iterable[str], since: float, *, timeout_s: float = _TIMEOUT_S
) -> dict[str, AccountingEntry]:
    """Return the accounting entries of these jobs by job id; an array id means all its elements.

    Slurm reuses ids: `is_of` checks which job an entry describes. One sacct call reads up to 5,000 ids. The result is
    {} if the site keeps no accounting; the caller must then use other sources.

    Args:
        since: seconds since the epoch; jobs that ended before it are left out.

    Raises:
        SlurmError: the site has accounting, or may have it, and gave no answer, or an incomplete one.
    """
    answers = (_ask(_FIELDS, ["-j", ids], since, timeout_s) for ids in _listed(job_ids))
    return {job_id: row for answer in answers if answer is not None for job_id, row in parse_accounting(answer).items()}


def ask_allocations(job_ids: Iterable[str], since: float) -> list[Allocation]:
    """Return every ended allocation of these jobs, one for each start by Slurm; else like `read_accounting`."""
    # -D: sacct also lists the starts before the newest one.
    answers = (_ask(_TIMES, ["-D", "-j", ids], since) for ids in _listed(job_ids))
    return [row for answer in answers if answer is not None for row in parse_allocations(answer)]


def ask_uses(job_ids: Iterable[str], since: float) -> list[JobUse]:
    """Return the resources that each start of these jobs used; else like `read_accounting`."""
    answers = (_ask(_USES, ["-D", "-j", ids], since, _LONG_TIMEOUT_S) for ids in _listed(job_ids))
    return [use for answer in answers if answer is not None for use in parse_uses(answer, time.time())]


def ask_left(account: str) -> dict[str, float]:
    """Return the hours that an account has left, by `gpu` and `core`; only for those with a limit (`GrpTRESMins`).

    Raises:
        SlurmError: sshare did not answer, or its answer cannot be read.
    """
    answer = run_slurm(["sshare", "-p", "-A", account, "-o", _SHARES], timeout_s=_TIMEOUT_S)
    rows = (row.split("|") for row in table_rows("sshare", answer, first="Account", num_columns=5, end="|"))
    return left_of([row for row in rows if len(row) == 5 and row[0].strip() == account and not row[1].strip()])


_SHARES = "Account,User,GrpTRESMins,GrpTRESRaw,TRESRunMins"


def left_of(rows: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return the hours left by `sshare`'s columns for an account as a whole: limit, used, running, in minutes."""
    left: dict[str, float] = {}
    for _, _, limits, used, running in rows:
        columns = [_counts(text.strip()) for text in (limits, used, running)]
        for index, (unit, tres) in enumerate((("gpu", "gres/gpu"), ("core", "cpu"))):
            if f"{tres}=" in limits:
                limit, spent, taken = (column[index] for column in columns)
                left[unit] = min(left.get(unit, math.inf), max(0.0, limit - spent - taken) / 60)
    return left


def _listed(job_ids: Iterable[str]) -> Iterator[str]:
    """Yield lists of unique ids (`1,2,3`), each short enough for one argument of a command."""
    ids = sorted(set(job_ids))
    return (",".join(ids[start : start + _IDS_A_CALL]) for start in range(0, len(ids), _IDS_A_CALL))


def _ask(fields: str, options: Sequence[str], since: float, timeout_s: float = _TIMEOUT_S) -> str | None:
    """Return sacct's output with these fields for jobs since `since`; None if the site keeps no accounting.

    Raises:
        SlurmError: the site has accounting, or may have it, and it did not answer.
    """
    # A number of seconds ago, not a wall-clock time: a wall-clock time occurs twice in the night when summer time ends.
    # -S stands beside -j too, because sacct's default without it differs between releases.
    start = f"now-{max(0, int(time.time() - since)) + CLOCKS_S:.0f}seconds"
    try:
        return run_slurm(["sacct", "-p", "-X", "-S", start, "-o", fields, *options], timeout_s=timeout_s)
    except SlurmError as error:
        if isinstance(error, MissingCommandError) or _is_disabled(error):
            return None
        raise


def _is_disabled(error: SlurmError) -> bool:
    """Return True if sacct says that this site keeps no accounting ("Slurm accounting storage is disabled")."""
    return isinstance(error, RefusedError) and "disabled" in error.said


def parse_accounting(text: str) -> dict[str, AccountingEntry]:
    """Parse the output of `sacct -p -X`; drop the state's tail (`CANCELLED by 1000`) and truncation mark (`+`).

    Raises:
        SlurmError: the text is not sacct's output, or is incomplete.
    """
    entries = {}
    for whole in _rows(text, _FIELDS):
        row, _, end = whole.rpartition("|")  # a comment may hold bars
        parts = row.split("|", 5)
        if len(parts) != 6 or not is_job(parts[:4]):
            raise unreadable("sacct", row)
        job_id, state, exit_code, node, name, comment = parts
        entries[job_id] = AccountingEntry(
            job_id=job_id,
            state=_plain_state(state),
            exit_code=exit_code,
            node="" if node == "None assigned" else node,
            end_time=float(end) if end.isdecimal() and int(end) > 0 else None,
            name=name,
            comment=comment,
        )
    return entries


def parse_allocations(text: str) -> list[Allocation]:
    """Parse the output of `sacct -p -X -D` with times in seconds since the epoch.

    Allocations that have not begun or not ended are left out.

    Raises:
        SlurmError: the text is not sacct's output, or is incomplete.
    """
    allocations = []
    for row in _rows(text, _TIMES):
        parts = row.split("|")
        if len(parts) != 5:
            raise unreadable("sacct", row)
        job_id, start, end, elapsed, state = parts
        if start.isdecimal() and end.isdecimal() and elapsed.isdecimal() and int(start) > 0:
            allocations.append(
                Allocation(
                    job_id=job_id, start_time=float(start), end_time=float(end), elapsed_s=float(elapsed),
                    state=_plain_state(state),
                )
            )  # fmt: skip
    return allocations


def parse_uses(text: str, now: float) -> list[JobUse]:
    """Parse the output of `sacct -p -X -D`; `now` ends the wait of a job that has not begun.

    Elements of an array that have not begun share one row (`7_[0-4%2]`), which counts as one job.

    Raises:
        SlurmError: the text is not sacct's output, or is incomplete.
    """
    rows = []
    for row in _rows(text, _USES):
        parts = row.split("|")
        if len(parts) != 11:
            raise unreadable("sacct", row)
        rows.append(parts)
    newest = {parts[0]: index for index, parts in enumerate(rows)}  # sacct lists the starts of a job in order
    return [_use(parts, now, is_newest=newest[parts[0]] == index) for index, parts in enumerate(rows)]


def _use(parts: Sequence[str], now: float, *, is_newest: bool) -> JobUse:
    job_id, user, account, submit, eligible, start, elapsed, limit, allocated, requested, state = parts
    submit_time, start_time = _seconds(submit), _seconds(start)
    ready = max(submit_time, _seconds(eligible))
    begin = start_time or (now if _plain_state(state) == PENDING else ready)
    gpus, cores = _counts(allocated or requested)
    return JobUse(
        job_id=job_id, user=user, account=account or "-", submit_time=submit_time, start_time=start_time,
        elapsed_s=_seconds(elapsed), waited_s=max(0.0, begin - ready), limit_s=60 * _seconds(limit), gpus=gpus,
        cores=cores, is_newest=is_newest,
    )  # fmt: skip


def _seconds(text: str) -> float:
    return float(text) if text.isdecimal() else 0.0


def _counts(tres: str) -> tuple[float, float]:
    """Return the GPUs and the cores of a list of TRES: `billing=4,cpu=4,gres/gpu=2,gres/gpu:a100=2,node=1`."""
    counts = {name: float(count) for name, _, count in (item.partition("=") for item in tres.split(","))
              if count.isdecimal()}  # fmt: skip
    typed = sum(count for name, count in counts.items() if name.startswith("gres/gpu:"))
    return counts.get("gres/gpu", typed), counts.get("cpu", 0.0)


def _rows(text: str, fields: str) -> list[str]:
    # `sacct -p` ends each row with a bar.
    return table_rows("sacct", text, first="JobID", num_columns=fields.count(",") + 1, end="|")


def _plain_state(state: str) -> str:
    """Return a state without its tail (`CANCELLED by 1000`) and truncation mark (`CANCELLED+`)."""
    return state.split(maxsplit=1)[0].rstrip("+") if state.split() else "UNKNOWN"


def find_ended(sweep: str, uuid: str, since: float) -> str | None:
    """Return the array id of a submission whose job has left the queue; None if the accounting has no such job.

    Args:
        since: time when the intent was written, in seconds since the epoch.

    Raises:
        SlurmError: the site has accounting, or may have it, and it did not answer.
    """
    answer = _ask(_FIELDS, ["--name", job_name(sweep, uuid)], since)
    return None if answer is None else find_by_uuid(parse_accounting(answer).values(), uuid)


def keeps_accounting(*, timeout_s: float = _TIMEOUT_S) -> bool:
    """Return False only if sacct itself says that this site keeps no accounting."""
    try:
        run_slurm(["sacct", "-n", "-X", "-S", "now", "-o", "JobID"], timeout_s=timeout_s)
    except SlurmError as error:
        return not _is_disabled(error)
    return True
