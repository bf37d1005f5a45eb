"""For how long jobs had their nodes, each time that Slurm started them: sacct with what it says of jobs requeued."""

from __future__ import annotations

from collections.abc import Iterable

from hpc_trainer.errors import UnclearError
from hpc_trainer.runs.monitoring.ledger import Allocation
from hpc_trainer.slurm.queue import ask_accounting

_FIELDS = ("JobID", "Start", "End", "ElapsedRaw", "State")
_TIMEOUT_S = 30.0


def read_allocations(job_ids: Iterable[str], since: float) -> list[Allocation]:
    """Every allocation of these jobs that has ended, in one call; array ids stand for all their elements.

    [] where the site keeps no accounting. Ids come again: whoever asks looks at the times.

    Args:
        since: seconds since the epoch; allocations that ended before it are left out.

    Raises:
        SlurmError: there is accounting, or may be, and it did not answer.
    """
    ids = sorted(set(job_ids))
    if not ids:
        return []
    # -D: also of the starts before the newest one.
    told = ask_accounting(["-D", "-o", ",".join(_FIELDS), "-j", ",".join(ids)], since, _TIMEOUT_S)
    return [] if told is None else parse_allocations(told)


def parse_allocations(text: str) -> list[Allocation]:
    """Reads `sacct -p -X -D` with times in seconds since the epoch; those not begun or not ended are left out.

    Raises:
        UnclearError: this is not what sacct prints.
    """
    found, header = [], f"{'|'.join(_FIELDS)}|"
    lines = text.splitlines()
    if header not in lines:
        raise UnclearError(f"sacct answered what cannot be read: {text.strip()[:200] or 'nothing'!r}")
    for row in lines[lines.index(header) + 1 :]:
        parts = row.split("|")
        if len(parts) != len(_FIELDS) + 1:
            raise UnclearError(f"sacct answered what cannot be read: {row[:200]!r}")
        job_id, start, end, elapsed, state = parts[:-1]
        if start.isdecimal() and end.isdecimal() and elapsed.isdecimal() and int(start) > 0:
            word = state.split()[0].rstrip("+") if state.split() else "UNKNOWN"
            found.append(
                Allocation(
                    job_id=job_id, start_time=float(start), end_time=float(end), elapsed_s=float(elapsed), state=word
                )
            )
    return found
