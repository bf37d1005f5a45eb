"""The accounting (sacct): how jobs ended, and for how long they had their nodes."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hpc_trainer.errors import MissingCommandError, RefusedError, SlurmError
from hpc_trainer.runs.monitoring.allocations import Allocation
from hpc_trainer.slurm.commands import run_slurm
from hpc_trainer.slurm.queue import CLOCKS_S, JobRow, find_by_uuid, is_job, job_name, table_rows, unreadable

_FIELDS = "JobID,State,ExitCode,NodeList,JobName,Comment,End"
_TIMES = "JobID,Start,End,ElapsedRaw,State"
_TIMEOUT_S = 30.0
# A word of a command has 128 KiB at the most on Linux; an id has some 15 characters.
_IDS_A_CALL = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountingEntry(JobRow):
    """How one job or array element ended, by slurmdbd. Array elements that have not begun share one (`7_[0-4%2]`)."""

    exit_code: str
    end_time: float | None = None
    """When it ended, seconds since the epoch by Slurm's clock; None if it has not, or Slurm does not say."""

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


def read_accounting(
    job_ids: Iterable[str], since: float, *, timeout_s: float = _TIMEOUT_S
) -> dict[str, AccountingEntry]:
    """What the accounting says of these jobs (array ids stand for all their elements), in one call.

    Ids come again: whose job a row is about, `is_of` says. Returns {} where the site keeps no accounting: other
    sources must do then.

    Args:
        since: seconds since the epoch; jobs that ended before it are left out.

    Raises:
        SlurmError: there is accounting, or may be, and it did not answer, or not to the end.
    """
    told = (_ask(_FIELDS, ["-j", ids], since, timeout_s) for ids in _listed(job_ids))
    return {job_id: row for each in told if each is not None for job_id, row in parse_accounting(each).items()}


def ask_allocations(job_ids: Iterable[str], since: float) -> list[Allocation]:
    """Every allocation of these jobs that has ended, each time that Slurm started them; else as `read_accounting`."""
    # -D: also of the starts before the newest one.
    told = (_ask(_TIMES, ["-D", "-j", ids], since) for ids in _listed(job_ids))
    return [row for each in told if each is not None for row in parse_allocations(each)]


def _listed(job_ids: Iterable[str]) -> Iterator[str]:
    """`1,2,3`: each id once, so many at a time as one word of a command may have."""
    ids = sorted(set(job_ids))
    return (",".join(ids[start : start + _IDS_A_CALL]) for start in range(0, len(ids), _IDS_A_CALL))


def _ask(fields: str, words: Sequence[str], since: float, timeout_s: float = _TIMEOUT_S) -> str | None:
    """What sacct prints in these fields of jobs since then; None where the site keeps no accounting.

    Raises:
        SlurmError: there is accounting, or may be, and it did not answer.
    """
    # So many seconds ago, not a time of the wall clock: that comes twice in the night in which summer time ends. With
    # -S also beside -j: what sacct takes without it has changed.
    start = f"now-{max(0, int(time.time() - since)) + CLOCKS_S:.0f}seconds"
    try:
        return run_slurm(["sacct", "-p", "-X", "-S", start, "-o", fields, *words], timeout_s=timeout_s)
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
    for whole in _rows(text, _FIELDS):
        row, _, end = whole.rpartition("|")  # a comment may hold bars
        parts = row.split("|", 5)
        if len(parts) != 6 or not is_job(parts[:4]):
            raise unreadable("sacct", row)
        job_id, state, exit_code, node, name, comment = parts
        entries[job_id] = AccountingEntry(
            job_id=job_id,
            state=_word(state),
            exit_code=exit_code,
            node="" if node == "None assigned" else node,
            end_time=float(end) if end.isdecimal() and int(end) > 0 else None,
            name=name,
            comment=comment,
        )
    return entries


def parse_allocations(text: str) -> list[Allocation]:
    """Reads `sacct -p -X -D` with times in seconds since the epoch; those not begun or not ended are left out.

    Raises:
        SlurmError: this is not what sacct prints, or not all of it.
    """
    found = []
    for row in _rows(text, _TIMES):
        parts = row.split("|")
        if len(parts) != 5:
            raise unreadable("sacct", row)
        job_id, start, end, elapsed, state = parts
        if start.isdecimal() and end.isdecimal() and elapsed.isdecimal() and int(start) > 0:
            found.append(
                Allocation(
                    job_id=job_id, start_time=float(start), end_time=float(end), elapsed_s=float(elapsed),
                    state=_word(state),
                )
            )  # fmt: skip
    return found


def _rows(text: str, fields: str) -> list[str]:
    # `sacct -p` ends each row by a bar.
    return table_rows("sacct", text, first="JobID", num_columns=fields.count(",") + 1, end="|")


def _word(state: str) -> str:
    """A state without its tail (`CANCELLED by 1000`) and the mark of one that is cut (`CANCELLED+`)."""
    return state.split(maxsplit=1)[0].rstrip("+") if state.split() else "UNKNOWN"


def find_ended(sweep: str, uuid: str, since: float) -> str | None:
    """The array id of a submission whose job has left the queue already, from the accounting; None without one.

    Args:
        since: seconds since the epoch at which the intent was written.

    Raises:
        SlurmError: there is accounting, or may be, and it did not answer.
    """
    told = _ask(_FIELDS, ["--name", job_name(sweep, uuid)], since)
    return None if told is None else find_by_uuid(parse_accounting(told).values(), uuid)


def keeps_accounting(*, timeout_s: float = _TIMEOUT_S) -> bool:
    """False only where sacct itself says that this site keeps no accounting."""
    try:
        run_slurm(["sacct", "-n", "-X", "-S", "now", "-o", "JobID"], timeout_s=timeout_s)
    except SlurmError as error:
        return not _is_disabled(error)
    return True
