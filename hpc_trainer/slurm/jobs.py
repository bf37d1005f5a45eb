"""One job: what the controller says of it, requeue, cancel."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpc_trainer.errors import RefusedError, UnclearError
from hpc_trainer.slurm.commands import DEFAULT_TIMEOUT_S, run_slurm

# A worker that is about to be killed must not wait a minute for an answer.
WORKER_TIMEOUT_S = 15.0
# A word of a command has 128 KiB at the most on Linux; a range has some 20 characters.
_RANGES_A_WORD = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInfo:
    """What `scontrol show job` says of one job or array element; None where it does not say.

    Times are seconds since the epoch, durations seconds. `restarts` counts every requeue, whatever its cause.
    """

    job_id: str
    state: str
    end_time: float | None
    preempt_time: float | None
    restarts: int
    run_time_s: float | None
    time_limit_s: float | None
    partition: str = ""
    reason: str = ""
    """Why the job is in this state; "None" if Slurm gives no reason."""
    excluded: str = ""
    """Host list of the nodes that it must not get."""

    def seconds_left(self, now: float | None = None) -> float | None:
        """Seconds until the time limit by Slurm's own clock; None if it has none."""
        return None if self.end_time is None else self.end_time - (time.time() if now is None else now)

    @property
    def ran_full_time(self) -> bool:
        """True if the job used up its time limit."""
        return self.run_time_s is not None and self.time_limit_s is not None and self.run_time_s >= self.time_limit_s


def show_job(job_id: str) -> JobInfo:
    """Asks the controller about one job (`123` or `123_4`).

    Raises:
        SlurmError: no answer, or the job is unknown.
    """
    return parse_job(run_slurm(["scontrol", "show", "job", "-o", job_id], timeout_s=WORKER_TIMEOUT_S))


def parse_job(text: str) -> JobInfo:
    """Reads one line of `scontrol show job -o`.

    The first line wins: for a raw array id the controller prints every element. Times come as seconds since the
    epoch (SLURM_TIME_FORMAT=%s) or as ISO local time, by version.
    """
    line, line_break, _ = text.lstrip().partition("\n")
    # The last word of an answer that was cut may be half a word: it is not believed.
    fields = dict(re.findall(r"(\w+)=(\S*)(?=\s)", f"{line}{line_break}"))
    if "JobState" not in fields:
        raise UnclearError(f"scontrol show job printed no JobState: {line[:200]!r}")
    return JobInfo(
        job_id=fields.get("JobId", ""),
        state=fields["JobState"],
        end_time=parse_time(fields.get("EndTime", "")),
        preempt_time=parse_time(fields.get("PreemptTime", "")),
        restarts=int(fields["Restarts"]) if fields.get("Restarts", "").isdecimal() else 0,
        run_time_s=parse_duration(fields.get("RunTime", "")),
        time_limit_s=parse_duration(fields.get("TimeLimit", "")),
        partition=fields.get("Partition", ""),
        reason=fields.get("Reason", ""),
        excluded=fields.get("ExcNodeList", "").replace("(null)", ""),
    )


def read_script(job_id: str) -> str:
    """The batch script of a job of one's own, as Slurm keeps it.

    Raises:
        SlurmError: no answer, or the job is unknown.
    """
    return run_slurm(["scontrol", "write", "batch_script", job_id, "-"], timeout_s=WORKER_TIMEOUT_S)


def show_scripts(job_ids: Iterable[str]) -> dict[str, str]:
    """Array or job id -> the path that its batch script had at sbatch, of those that the controller tells of.

    Raises:
        SlurmError: no answer.
    """
    asked = "".join(f"show job {job_id}\n" for job_id in job_ids)
    told = run_slurm(["scontrol", "-o"], script=asked)
    return {
        array or job: path
        for job, array, path in re.findall(
            r"^JobId=(\d+) (?:ArrayJobId=(\d+) )?.* Command=(.*?) WorkDir=", told, re.MULTILINE
        )
    }


def parse_time(text: str) -> float | None:
    """Seconds since the epoch from `1700000000` or `2026-11-21T03:00:00` (local time); None for `Unknown`."""
    if text.isdecimal():
        return float(text)
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


def parse_duration(text: str) -> float | None:
    """Seconds of Slurm's `[days-]hours:minutes:seconds`, `minutes[:seconds]` or `days-hours[:minutes]`.

    None for `UNLIMITED` and the like.
    """
    found = re.fullmatch(r"(?:(\d+)-)?(\d+(?::\d+){0,2})", text.strip())
    if found is None:
        return None
    parts = [int(part) for part in found[2].split(":")]
    begins_with_hours = found[1] is not None or len(parts) == 3
    hours, minutes, seconds, *_ = [*parts, 0, 0] if begins_with_hours else [0, *parts, 0]
    return float(((int(found[1] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds)


def requeue(job_id: str) -> str:
    """Asks for another run of this job, only if it is still at work; returns what happened, a word.

    `Incomplete` is what keeps a cancelled job dead: plain `scontrol requeue` un-cancels it.

    Returns:
        `requeued`, or `already_pending` where Slurm or somebody else was faster.

    Raises:
        RefusedError: the site allows no requeues ("Requested operation is presently disabled").
        SlurmError: no answer.
    """
    try:
        run_slurm(["scontrol", "requeue", "Incomplete", job_id], timeout_s=WORKER_TIMEOUT_S)
    except RefusedError as error:
        if "pending execution" in error.said:
            return "already_pending"
        raise
    return "requeued"


def requeue_by_hand(job_id: str) -> None:
    """What a person types: ends the job where it is, and puts it back into the queue.

    Raises:
        SlurmError: the job has ended, the site refuses, or no answer.
    """
    run_slurm(["scontrol", "requeue", job_id])


def update_job(job_id: str, changes: Sequence[str], timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Changes a pending job, as `StartTime=now`.

    Raises:
        SlurmError: the job has begun or is gone, the site refuses, or no answer.
    """
    run_slurm(["scontrol", "update", f"JobId={job_id}", *changes], timeout_s=timeout_s)


def cancel_jobs(job_ids: Sequence[str], *, signal: str | None = None) -> None:
    """Cancels jobs or array elements in one command; those that ended already do not matter.

    With `signal` their steps get that signal instead, and the jobs go on.

    Elements of one array go as ranges, `7_[0-998]`: one request for each array instead of one for each element (22.05,
    1,000 elements: 0.005 s instead of 0.53 s).
    """
    elements: dict[str, list[int]] = {}
    words = []
    for job_id in job_ids:
        array, _, index = job_id.partition("_")
        if index.isdecimal():
            elements.setdefault(array, []).append(int(index))
        else:
            words.append(job_id)
    for array, indices in elements.items():
        ranges = _ranges(indices)
        parts = (ranges[start : start + _RANGES_A_WORD] for start in range(0, len(ranges), _RANGES_A_WORD))
        words += [f"{array}_[{','.join(part)}]" for part in parts]
    if words:
        run_slurm(["scancel", "--quiet", *([f"--signal={signal}"] if signal else []), *words])


def _ranges(indices: Sequence[int]) -> list[str]:
    """`0-3` and `7` of 0, 1, 2, 3, 7."""
    found: list[list[int]] = []
    for index in sorted(set(indices)):
        if found and found[-1][-1] == index - 1:
            found[-1][1:] = [index]
        else:
            found.append([index])
    return ["-".join(map(str, pair)) for pair in found]
