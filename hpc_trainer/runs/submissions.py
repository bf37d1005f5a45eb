"""submissions.jsonl: what was about to be submitted, and what the scheduler answered.

An intent is written before sbatch, with a uuid that the job carries; the confirmation after it. Whoever was
killed in between leaves an intent alone, and the uuid tells whether Slurm has the job.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpc_trainer.runs.files import append_lines, check_trusted, read_lines
from hpc_trainer.runs.layout import SweepPaths


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One array: `run_ids[i]` is array element i. `job_id` is None until the scheduler confirmed."""

    uuid: str
    executor: str
    hardware: str
    run_ids: tuple[str, ...]
    time: float
    job_id: str | None = None
    dropped: bool = False
    code: str | None = None
    """Digest of the frozen code that its runs import, 64 hex digits; None if nothing was frozen."""

    def element_id(self, index: int) -> str | None:
        """The job id of one run: `<array>_<index>` on Slurm, the queue's id locally."""
        if self.job_id is None:
            return None
        return f"{self.job_id}_{index}" if self.executor == "slurm" else self.job_id


def write_intent(
    paths: SweepPaths, *, executor: str, hardware: str, run_ids: Sequence[str], code: str | None = None
) -> Submission:
    """Records what will be submitted next, and returns it with a fresh uuid."""
    intent = Submission(
        uuid=uuid.uuid4().hex,
        executor=executor,
        hardware=hardware,
        run_ids=tuple(run_ids),
        time=time.time(),
        code=code,
    )
    append_lines(
        paths.submissions,
        [
            {
                "event": "intent",
                "uuid": intent.uuid,
                "executor": executor,
                "hardware": hardware,
                "run_ids": list(run_ids),
                "time": intent.time,
                "code": code,
            }
        ],
    )
    return intent


def write_confirmation(paths: SweepPaths, intent: Submission, job_id: str) -> None:
    """Records the scheduler's answer."""
    record = {"event": "confirmed", "uuid": intent.uuid, "job_id": job_id, "time": time.time()}
    append_lines(paths.submissions, [record])


def write_dropped(paths: SweepPaths, intent: Submission, reason: str) -> None:
    """Records that the scheduler does not have this intent and never will."""
    record = {"event": "dropped", "uuid": intent.uuid, "reason": reason, "time": time.time()}
    append_lines(paths.submissions, [record])


def read_submissions(paths: SweepPaths) -> list[Submission]:
    """All submissions in order, dropped ones left out; [] for a sweep that does not exist."""
    return [submission for submission in _read(paths) if not submission.dropped]


def _read(paths: SweepPaths) -> Iterator[Submission]:
    if not paths.submissions.exists():
        return
    check_trusted(paths.submissions)
    answers: dict[str, str] = {}
    dropped: set[str] = set()
    intents: list[Submission] = []
    for record in read_lines(paths.submissions):
        with contextlib.suppress(KeyError, TypeError, ValueError):  # a damaged record hides no other
            if record["event"] == "intent":
                intents.append(_parse_intent(record))
            elif record["event"] == "confirmed":
                answers[record["uuid"]] = str(record["job_id"])
            elif record["event"] == "dropped":
                dropped.add(record["uuid"])
    for intent in intents:
        yield replace(intent, job_id=answers.get(intent.uuid), dropped=intent.uuid in dropped)


def _parse_intent(record: dict[str, Any]) -> Submission:
    return Submission(
        uuid=str(record["uuid"]),
        executor=str(record["executor"]),
        hardware=str(record["hardware"]),
        run_ids=tuple(str(run_id) for run_id in record["run_ids"]),
        time=float(record["time"]),
        code=record.get("code"),
    )


def latest_of_each_run(submissions: Sequence[Submission]) -> dict[str, tuple[Submission, int]]:
    """Each run id with (its newest submission, its index in there)."""
    return {
        run_id: (submission, index) for submission in submissions for index, run_id in enumerate(submission.run_ids)
    }
