"""One job: its record at the controller, requeue, cancel, and how jobs of its partition are preempted."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpc_trainer.errors import RefusedError, UnclearError
from hpc_trainer.slurm.commands import DEFAULT_TIMEOUT_S, run_slurm

# A worker that is about to be killed must not wait a minute for an answer.
WORKER_TIMEOUT_S = 15.0
# Linux limits one argument of a command to 128 KiB; a range has some 20 characters.
_RANGES_A_WORD = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInfo:
    """Record of one job or array element from `scontrol show job`; None where scontrol prints no value.

    Times are seconds since the epoch, durations seconds. `restarts` counts every requeue, of any cause.
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
    """Slurm's reason for the job's state; "None" if Slurm gives none."""
    excluded: str = ""
    """Host list of the nodes that Slurm must not give to the job."""

    def seconds_left(self, now: float | None = None) -> float | None:
        """Return the seconds until the job's end time (EndTime, by Slurm's clock); None if it has none."""
        return None if self.end_time is None else self.end_time - (time.time() if now is None else now)

    @property
    def ran_full_time(self) -> bool:
        """Return True if the job used up its time limit."""
        return self.run_time_s is not None and self.time_limit_s is not None and self.run_time_s >= self.time_limit_s


def show_job(job_id: str) -> JobInfo:
    """Ask the controller about one job (`123` or `123_4`).

    Raises:
        SlurmError: the controller does not answer, or does not know the job.
    """
    return parse_job(run_slurm(["scontrol", "show", "job", "-o", job_id], timeout_s=WORKER_TIMEOUT_S))


def parse_job(text: str) -> JobInfo:
    """Parse the first line of `scontrol show job -o`.

    For a raw array id the controller prints one line for each element. Times come as seconds since the epoch
    (SLURM_TIME_FORMAT=%s) or as ISO local time, depending on the version.

    Raises:
        UnclearError: the line has no JobState.
    """
    line, line_break, _ = text.lstrip().partition("\n")
    # The last field of a truncated answer may be incomplete, so a field counts only if white space follows it.
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
    """Return the batch script of one of the user's own jobs, as Slurm keeps it.

    Raises:
        SlurmError: the controller does not answer, or does not know the job.
    """
    return run_slurm(["scontrol", "write", "batch_script", job_id, "-"], timeout_s=WORKER_TIMEOUT_S)


def show_scripts(job_ids: Iterable[str]) -> dict[str, str]:
    """Return the path that each batch script had at sbatch, by array or job id; jobs that Slurm forgot are absent.

    Raises:
        SlurmError: the controller does not answer.
    """
    asked = "".join(f"show job {job_id}\n" for job_id in job_ids)
    answer = run_slurm(["scontrol", "-o"], script=asked)
    return {
        array or job: path
        for job, array, path in re.findall(
            r"^JobId=(\d+) (?:ArrayJobId=(\d+) )?.* Command=(.*?) WorkDir=", answer, re.MULTILINE
        )
    }


def parse_time(text: str) -> float | None:
    """Convert `1700000000` or `2026-11-21T03:00:00` (local time) to seconds since the epoch; None for `Unknown`."""
    if text.isdecimal():
        return float(text)
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


def parse_duration(text: str) -> float | None:
    """Convert Slurm's `[days-]hours:minutes:seconds`, `minutes[:seconds]` or `days-hours[:minutes]` to seconds.

    Returns:
        None for `UNLIMITED` and every other text that is not a duration.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+(?::\d+){0,2})", text.strip())
    if match is None:
        return None
    parts = [int(part) for part in match[2].split(":")]
    begins_with_hours = match[1] is not None or len(parts) == 3
    hours, minutes, seconds, *_ = [*parts, 0, 0] if begins_with_hours else [0, *parts, 0]
    return float(((int(match[1] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds)


def requeue(job_id: str) -> str:
    """Requeue this job if it is still at work.

    `Incomplete` keeps a cancelled job cancelled: plain `scontrol requeue` would restart it.

    Returns:
        `requeued`, or `already_pending` if Slurm or a user requeued it first.

    Raises:
        RefusedError: the site allows no requeues ("Requested operation is presently disabled").
        SlurmError: the controller does not answer.
    """
    try:
        run_slurm(["scontrol", "requeue", "Incomplete", job_id], timeout_s=WORKER_TIMEOUT_S)
    except RefusedError as error:
        if "pending execution" in error.said:
            return "already_pending"
        raise
    return "requeued"


def requeue_by_hand(job_id: str) -> None:
    """Requeue a job as a user would by hand: end its current run and put it back into the queue.

    Raises:
        SlurmError: the job has ended, the site refuses, or the controller does not answer.
    """
    run_slurm(["scontrol", "requeue", job_id])


def update_job(job_id: str, changes: Sequence[str], timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Change fields of a pending job, for example `StartTime=now`.

    Raises:
        SlurmError: the job has begun or is gone, the site refuses, or the controller does not answer.
    """
    run_slurm(["scontrol", "update", f"JobId={job_id}", *changes], timeout_s=timeout_s)


def requeue_held(job_id: str) -> None:
    """Put a running job back into the queue, where it waits until it is released.

    Raises:
        SlurmError: the site refuses, or the controller does not answer.
    """
    run_slurm(["scontrol", "requeuehold", "Incomplete", job_id], timeout_s=WORKER_TIMEOUT_S)


def cancel_jobs(job_ids: Sequence[str], *, signal: str | None = None) -> None:
    """Cancel jobs or array elements in one command; jobs that have already ended are ignored.

    Elements of one array are written as ranges, `7_[0-998]`: one request for each array instead of one for each element
    (22.05, 1,000 elements: 0.005 s instead of 0.53 s).

    Args:
        signal: signal that the jobs' steps get instead; the jobs continue.
    """
    targets = _targets(job_ids)
    if targets:
        try:
            run_slurm(["scancel", "--quiet", *([f"--signal={signal}"] if signal else []), *targets])
        except RefusedError as error:
            if error.said or not signal:  # with a signal it fails without a word if one of the jobs has ended
                raise


def _targets(job_ids: Sequence[str], most: int = _RANGES_A_WORD) -> list[str]:
    """Return arguments that name these jobs, elements of one array as ranges, at most `most` of them an argument."""
    elements: dict[str, list[int]] = {}
    targets = []
    for job_id in job_ids:
        array, _, index = job_id.partition("_")
        if index.isdecimal():
            elements.setdefault(array, []).append(int(index))
        else:
            targets.append(job_id)
    for array, indices in elements.items():
        ranges = _ranges(indices)
        parts = (ranges[start : start + most] for start in range(0, len(ranges), most))
        targets += [f"{array}_[{','.join(part)}]" for part in parts]
    return targets


def hold_jobs(job_ids: Sequence[str], timeout_s: float = DEFAULT_TIMEOUT_S) -> list[str]:
    """Hold waiting jobs or array elements, so that Slurm does not start them; return why some could not be held.

    A job that has begun meanwhile continues, and one that has ended is ignored.

    Raises:
        SilentError: the controller does not answer; some of the jobs may be held.
    """
    # Not `hold`: after that of an operator or of root only an operator may release the job (scontrol(1)).
    return _for_each("uhold", job_ids, timeout_s)


def release_jobs(job_ids: Sequence[str], timeout_s: float = DEFAULT_TIMEOUT_S) -> list[str]:
    """Release held jobs or array elements; return why some could not be released. Raises as `hold_jobs`."""
    return _for_each("release", job_ids, timeout_s)


# Ranges of elements in one request of `scontrol hold`: a request takes the controller's lock for all of them.
_RANGES_A_REQUEST = 200
_OVER = re.compile(r"already (running|completed|finish)|Invalid job id|completing", re.IGNORECASE)


def _for_each(verb: str, job_ids: Sequence[str], timeout_s: float) -> list[str]:
    refused = []
    for target in _targets(job_ids, _RANGES_A_REQUEST):
        try:
            run_slurm(["scontrol", verb, target], timeout_s=timeout_s)
        except RefusedError as error:  # noqa: PERF203  (each call takes milliseconds)
            if not _OVER.search(error.said):
                refused.append(f"{target}: {error.said or error}")
    return refused


def cancel_named(job_id: str, name: str) -> None:
    """Cancel one job or array element if it has this name: Slurm reuses ids, so another job may have this id.

    Raises:
        SlurmError: the controller does not answer.
    """
    run_slurm(["scancel", "--quiet", f"--name={name}", job_id], timeout_s=WORKER_TIMEOUT_S)


def _ranges(indices: Sequence[int]) -> list[str]:
    """Group indices into ranges: 0, 1, 2, 3, 7 become `0-3` and `7`."""
    ranges: list[list[int]] = []
    for index in sorted(set(indices)):
        if ranges and ranges[-1][-1] == index - 1:
            ranges[-1][1:] = [index]
        else:
            ranges.append([index])
    return ["-".join(map(str, pair)) for pair in ranges]


OFF = "OFF"
"""The mode of a partition whose jobs are never preempted."""
DEFAULT_KILL_WAIT_S = 30.0
"""Slurm's default KillWait in seconds (slurm.conf(5))."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """Preemption of a partition's jobs: Slurm's mode (REQUEUE, CANCEL, ...), and the time they get, in seconds.

    First comes the grace time, then KillWait: the time from SIGTERM to SIGKILL that every ended job gets.
    """

    mode: str
    grace_s: float
    kill_wait_s: float

    @property
    def brings_back(self) -> bool:
        """Return True if Slurm requeues preempted jobs; else the job is gone, or only suspended for a while."""
        return self.mode.startswith("REQUEUE")


def show_preemption(partition: str) -> Preemption | None:
    """Ask the controller how this partition's jobs are preempted; None if it does not say.

    Raises:
        SlurmError: the controller does not answer.
    """
    asked = f"show partition {partition}\nshow config\n"
    return parse_preemption(run_slurm(["scontrol", "-o"], script=asked, timeout_s=WORKER_TIMEOUT_S))


def parse_preemption(text: str) -> Preemption | None:
    """Parse `show partition` and `show config`; a partition without its own mode has the cluster's mode."""
    modes = re.findall(r"\bPreemptMode\s*=\s*([A-Z_,]+)", text)
    grace = re.search(r"\bGraceTime=(\d+)", text)
    wait = re.search(r"\bKillWait\s*=\s*(\d+)", text)
    if not modes:
        return None
    return Preemption(
        mode=modes[0],
        grace_s=float(grace[1]) if grace else 0.0,
        kill_wait_s=float(wait[1]) if wait else DEFAULT_KILL_WAIT_S,
    )
