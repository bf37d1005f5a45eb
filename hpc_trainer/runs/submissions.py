"""submissions.jsonl: what was about to be submitted, what the scheduler answered, and what still waits for room.

An intent is written before sbatch, with a uuid that the job carries; the confirmation after it. Whoever was
killed in between leaves an intent alone, and the uuid tells whether Slurm has the job. Runs that the site's limits
keep out for now are recorded as waiting: the sweep's own queue, which a small top-up job and every later command
work off.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hpc_trainer.runs.files import append_lines, check_trusted, read_lines
from hpc_trainer.runs.layout import RunPaths, SweepPaths

TOP_UP = "top-up"
SUCCESSOR = "successor"
Book = SweepPaths | RunPaths
"""Whose submissions.jsonl: a sweep's, or a run's own, with the successor jobs that its attempts submitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One array: `run_ids[i]` is array element i. `job_id` is None until the scheduler confirmed.

    A top-up job (`kind`) has no runs of its own; a successor is a single job of one run.
    """

    uuid: str
    executor: str
    hardware: str
    run_ids: tuple[str, ...]
    time: float
    kind: str = "array"
    parallelism: int | None = None
    code: str | None = None
    """Digest of the frozen code that its runs import, 64 hex digits; None if nothing was frozen."""
    cluster: str | None = None
    """What the cluster that it was given to calls itself; None if it did not say, or an older version wrote this."""
    doubt_time: float | None = None
    """When sbatch gave up without an answer: the scheduler may still take the job after that."""
    job_id: str | None = None
    dropped: bool = False

    def element_id(self, index: int) -> str | None:
        """The job id of one run: `<array>_<index>` on Slurm, the queue's id locally."""
        if self.job_id is None:
            return None
        return f"{self.job_id}_{index}" if self.executor == "slurm" and self.kind != SUCCESSOR else self.job_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Why a run waits in the sweep's own queue, and the digest of the code that it was submitted with."""

    reason: str
    code: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Everything submissions.jsonl says, dropped intents left out."""

    submissions: list[Submission] = field(default_factory=list)
    top_ups: list[Submission] = field(default_factory=list)
    waiting: Mapping[str, Waiting] = field(default_factory=dict)
    """What waits in the sweep's own queue, by run id."""

    refused: Mapping[str, str] = field(default_factory=dict)
    """Run id -> why the scheduler would not take it when its turn came."""

    @property
    def unsettled(self) -> list[Submission]:
        """Intents without an answer."""
        return [each for each in (*self.submissions, *self.top_ups) if each.job_id is None]


def write_intent(
    paths: Book, *, executor: str, hardware: str, run_ids: Sequence[str], kind: str = "array",
    parallelism: int | None = None, code: str | None = None, cluster: str | None = None,
) -> Submission:  # fmt: skip
    """Records what will be submitted next, and returns it with a fresh uuid."""
    intent = Submission(
        uuid=uuid.uuid4().hex, executor=executor, hardware=hardware, run_ids=tuple(run_ids), time=time.time(),
        kind=kind, parallelism=parallelism, code=code, cluster=cluster,
    )  # fmt: skip
    append_lines(
        paths.submissions,
        [
            {
                "event": "intent",
                "kind": kind,
                "uuid": intent.uuid,
                "executor": executor,
                "hardware": hardware,
                "run_ids": list(run_ids),
                "parallelism": parallelism,
                "code": code,
                "cluster": cluster,
                "time": intent.time,
            }
        ],
    )
    return intent


def write_confirmation(paths: Book, intent: Submission, job_id: str) -> None:
    """Records the scheduler's answer."""
    record = {"event": "confirmed", "uuid": intent.uuid, "job_id": job_id, "time": time.time()}
    append_lines(paths.submissions, [record])


def write_doubt(paths: Book, intent: Submission) -> None:
    """Records that sbatch ended without an answer: the scheduler may have the job, or still get it."""
    append_lines(paths.submissions, [{"event": "doubt", "uuid": intent.uuid, "time": time.time()}])


def write_refused(paths: SweepPaths, run_ids: Sequence[str], reason: str) -> None:
    """Records that waiting runs wait no longer: the scheduler would refuse them tomorrow too."""
    record = {"event": "refused", "run_ids": list(run_ids), "reason": reason, "time": time.time()}
    append_lines(paths.submissions, [record])


def write_dropped(paths: Book, intent: Submission, reason: str) -> None:
    """Records that the scheduler does not have this intent and never will."""
    record = {"event": "dropped", "uuid": intent.uuid, "reason": reason, "time": time.time()}
    append_lines(paths.submissions, [record])


def write_waiting(paths: SweepPaths, run_ids: Sequence[str], reason: str, code: str | None) -> None:
    """Records that these runs are to be submitted as soon as there is room, by whoever looks next."""
    record = {"event": "waiting", "run_ids": list(run_ids), "reason": reason, "code": code, "time": time.time()}
    append_lines(paths.submissions, [record])


def read_submissions(paths: Book) -> list[Submission]:
    """All arrays in order, dropped ones left out; [] for a sweep that does not exist."""
    return read_ledger(paths).submissions


def read_ledger(paths: Book) -> Ledger:
    """The file as a whole; an empty ledger for a sweep that does not exist, or a run without successor jobs.

    Raises:
        UntrustedFileError: others may have changed the file.
    """
    if not paths.submissions.exists():
        return Ledger()
    check_trusted(paths.submissions)
    intents: dict[str, Submission] = {}
    waiting: dict[str, Waiting] = {}
    refused: dict[str, str] = {}
    taken: dict[str, dict[str, Waiting]] = {}  # intent -> the runs that it took out of the queue
    for record in read_lines(paths.submissions):
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):  # a damaged record hides no other
            if record["event"] == "intent":
                intent = _parse_intent(record)
                intents[intent.uuid] = intent
                for run_id in intent.run_ids:
                    refused.pop(run_id, None)
                taken[intent.uuid] = {key: waiting.pop(key) for key in intent.run_ids if key in waiting}
            elif record["event"] == "confirmed":
                intents[record["uuid"]] = replace(intents[record["uuid"]], job_id=str(record["job_id"]))
            elif record["event"] == "doubt":
                intents[record["uuid"]] = replace(intents[record["uuid"]], doubt_time=float(record["time"]))
            elif record["event"] == "refused":
                for run_id in map(str, record["run_ids"]):
                    waiting.pop(run_id, None)
                    refused[run_id] = str(record["reason"])
            elif record["event"] == "dropped":
                intents[record["uuid"]] = replace(intents[record["uuid"]], dropped=True)
                waiting.update(taken[record["uuid"]])
            elif record["event"] == "waiting":
                code = None if record.get("code") is None else str(record["code"])
                why = Waiting(reason=str(record["reason"]), code=code)
                waiting.update(dict.fromkeys(map(str, record["run_ids"]), why))
    kept = [each for each in intents.values() if not each.dropped]
    return Ledger(
        submissions=[each for each in kept if each.kind != TOP_UP],
        top_ups=[each for each in kept if each.kind == TOP_UP],
        waiting=waiting,
        refused=refused,
    )


def _parse_intent(record: dict[str, Any]) -> Submission:
    return Submission(
        uuid=str(record["uuid"]),
        executor=str(record["executor"]),
        hardware=str(record["hardware"]),
        run_ids=tuple(str(run_id) for run_id in record["run_ids"]),
        time=float(record["time"]),
        kind=str(record.get("kind", "array")),
        parallelism=None if record.get("parallelism") is None else int(record["parallelism"]),
        code=None if record.get("code") is None else str(record["code"]),
        cluster=None if record.get("cluster") is None else str(record["cluster"]),
    )


def latest_of_each_run(submissions: Sequence[Submission]) -> dict[str, tuple[Submission, int]]:
    """Each run id with (its newest submission, its index in there)."""
    return {
        run_id: (submission, index) for submission in submissions for index, run_id in enumerate(submission.run_ids)
    }


def newest_of_run(paths: RunPaths, latest: tuple[Submission, int] | None) -> tuple[Submission, int] | None:
    """The run's newest submission: `latest` of the sweep's, or a successor job that an attempt submitted after it.

    Raises:
        UntrustedFileError: others may have changed the run's submissions.jsonl.
    """
    successors = read_ledger(paths).submissions
    if not successors or (latest is not None and latest[0].time > successors[-1].time):
        return latest
    return successors[-1], 0
