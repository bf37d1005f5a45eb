"""submissions.jsonl: what was about to be submitted, what the scheduler answered, and what still waits for room.

An intent is written before sbatch, with a uuid that the job carries; the confirmation after it. Whoever was
killed in between leaves an intent alone, and the uuid tells whether Slurm has the job. Runs that the site's limits
keep out for now are recorded as waiting: the sweep's own queue, which a small top-up job and every later command
work off.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hpc_trainer.runs.files import append_lines, is_ours
from hpc_trainer.runs.layout import RunPaths, SweepPaths, is_run_id
from hpc_trainer.runs.reading import Faults, as_count, as_text, as_time, records, tell

TOP_UP = "top-up"
SUCCESSOR = "successor"
Book = SweepPaths | RunPaths
"""Whose submissions.jsonl: a sweep's, or a run's own, with the successor jobs that its attempts submitted."""
CLOCKS_S = 600.0
"""By this much clocks of login nodes and nodes may differ; no controller comes to the same job id again as soon."""


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
    after: str | None = None
    """Of a successor: the uuid of the submission that it follows. None before there was this field."""
    num_attempts: tuple[int, ...] = ()
    """Of the local executor: how many attempts each run had before; () before there was this field."""
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
    time: float = field(default=0.0, compare=False)
    """Since when, seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Everything submissions.jsonl says, dropped intents left out."""

    submissions: list[Submission] = field(default_factory=list)
    top_ups: list[Submission] = field(default_factory=list)
    waiting: Mapping[str, Waiting] = field(default_factory=dict)
    """What waits in the sweep's own queue, by run id."""

    refused: Mapping[str, str] = field(default_factory=dict)
    """Run id -> why the scheduler would not take it when its turn came."""

    damage: tuple[str, ...] = ()
    """Faults: lines that cannot be read, or that tell of a submission of which no line is left."""

    unread: str | None = None
    """Why the file, or its rest, was not to be read just now (`may_fail`): it may say anything."""

    @property
    def unsettled(self) -> list[Submission]:
        """Intents without an answer."""
        return [each for each in (*self.submissions, *self.top_ups) if each.job_id is None]


def write_intent(
    paths: Book, *, executor: str, hardware: str, run_ids: Sequence[str], kind: str = "array",
    parallelism: int | None = None, code: str | None = None, after: str | None = None,
    num_attempts: Sequence[int] = (), cluster: str | None = None,
) -> Submission:  # fmt: skip
    """Records what will be submitted next, and returns it with a fresh uuid."""
    intent = Submission(
        uuid=uuid.uuid4().hex, executor=executor, hardware=hardware, run_ids=tuple(run_ids), time=time.time(),
        kind=kind, parallelism=parallelism, code=code, after=after, num_attempts=tuple(num_attempts),
        cluster=cluster,
    )  # fmt: skip
    record = {
        "event": "intent", "kind": kind, "uuid": intent.uuid, "executor": executor, "hardware": hardware,
        "run_ids": list(run_ids), "parallelism": parallelism, "code": code, "cluster": cluster, "time": intent.time,
        **({"after": after} if after else {}), **({"num_attempts": list(num_attempts)} if num_attempts else {}),
    }  # fmt: skip
    append_lines(paths.submissions, [record], sealed=True)
    return intent


def write_confirmation(paths: Book, intent: Submission, job_id: str) -> None:
    """Records the scheduler's answer."""
    record = {"event": "confirmed", "uuid": intent.uuid, "job_id": job_id, "time": time.time()}
    append_lines(paths.submissions, [record], sealed=True)


def write_doubt(paths: Book, intent: Submission) -> None:
    """Records that sbatch ended without an answer: the scheduler may have the job, or still get it."""
    record = {"event": "doubt", "uuid": intent.uuid, "time": time.time()}
    append_lines(paths.submissions, [record], sealed=True)


def write_refused(paths: SweepPaths, run_ids: Sequence[str], reason: str) -> None:
    """Records that waiting runs wait no longer: the scheduler would refuse them tomorrow too."""
    record = {"event": "refused", "run_ids": list(run_ids), "reason": reason, "time": time.time()}
    append_lines(paths.submissions, [record], sealed=True)


def write_dropped(paths: Book, intent: Submission, reason: str) -> None:
    """Records that the scheduler does not have this intent and never will."""
    record = {"event": "dropped", "uuid": intent.uuid, "reason": reason, "time": time.time()}
    append_lines(paths.submissions, [record], sealed=True)


def write_waiting(paths: SweepPaths, run_ids: Sequence[str], reason: str, code: str | None) -> None:
    """Records that these runs are to be submitted as soon as there is room, by whoever looks next."""
    record = {"event": "waiting", "run_ids": list(run_ids), "reason": reason, "code": code, "time": time.time()}
    append_lines(paths.submissions, [record], sealed=True)


def read_submissions(paths: Book) -> list[Submission]:
    """All arrays in order, dropped ones left out; [] for a sweep that does not exist."""
    return read_ledger(paths).submissions


def read_ledger(paths: Book, *, may_fail: bool = False) -> Ledger:
    """The file as a whole; an empty ledger for a sweep that does not exist, or a run without successor jobs.

    A damaged line hides no other; `damage` tells of it.

    Args:
        may_fail: the caller only looks: where the file system refuses, `unread` says so, and there is no error.

    Raises:
        UntrustedFileError: others may have changed the file.
        OSError: the file system refused: what it hides may be a submission.
    """
    book, damage = _Reader(), Faults()
    is_there = is_ours(paths.submissions, damage)
    for number, record in records(paths.submissions, damage) if is_there else ():
        if record is not None:
            try:
                book.take(record)
            except (KeyError, ValueError) as error:
                tell(damage, paths.submissions, f"{type(error).__name__}: {error}", number)
    if damage.refusal is not None and not may_fail:
        raise damage.refusal
    kept = [each for each in book.intents.values() if not each.dropped]
    return Ledger(
        submissions=[each for each in kept if each.kind != TOP_UP],
        top_ups=[each for each in kept if each.kind == TOP_UP],
        waiting=book.waiting,
        refused=book.refused,
        damage=tuple(damage),
        unread=damage[0] if damage.refusal is not None else None,
    )


class _Reader:
    """What the records of the file say, one after the other."""

    def __init__(self) -> None:
        self.intents: dict[str, Submission] = {}
        self.waiting: dict[str, Waiting] = {}
        self.refused: dict[str, str] = {}
        self._waits: set[tuple[float, tuple[str, ...]]] = set()
        self._taken: dict[str, dict[str, Waiting]] = {}  # intent -> the runs that it took out of the queue

    def take(self, record: Mapping[str, Any]) -> None:
        """Raises KeyError or ValueError: the record is damaged, or of an intent whose line is lost."""
        event = as_text(record["event"])
        if event == "intent":
            self._take_intent(_parse_intent(record))
        elif event in ("confirmed", "doubt", "dropped"):
            self._take_answer(event, record)
        elif event == "refused":
            reason = as_text(record["reason"])
            for run_id in _run_ids(record["run_ids"]):
                self.waiting.pop(run_id, None)
                self.refused[run_id] = reason
        elif event == "waiting":
            run_ids, begin = _run_ids(record["run_ids"]), as_time(record["time"])
            why = Waiting(reason=as_text(record["reason"]), code=_optional_text(record.get("code")), time=begin)
            key = begin, run_ids
            if key not in self._waits:  # else the same line once more: what was submitted since does not wait
                self._waits.add(key)
                self.waiting.update(dict.fromkeys(run_ids, why))
        else:
            raise ValueError(f"event {event[:20]!r} is of a newer version")

    def _take_intent(self, intent: Submission) -> None:
        if intent.uuid in self.intents:
            return  # the line stands there twice: it takes no answer back
        self.intents[intent.uuid] = intent
        for run_id in intent.run_ids:
            self.refused.pop(run_id, None)
        self._taken[intent.uuid] = {key: self.waiting.pop(key) for key in intent.run_ids if key in self.waiting}

    def _take_answer(self, event: str, record: Mapping[str, Any]) -> None:
        uuid = as_text(record["uuid"])
        if uuid not in self.intents:
            raise ValueError(f"it answers submission {uuid[:8]}, and no line tells what that was")
        if event == "confirmed":
            # The scheduler's answer may come after our giving up, and is surer.
            answer: dict[str, Any] = {"job_id": as_text(record["job_id"]), "dropped": False}
            for run_id in self.intents[uuid].run_ids if self.intents[uuid].dropped else ():
                self.waiting.pop(run_id, None)
        elif event == "doubt":
            answer = {"doubt_time": as_time(record["time"])}
        else:
            answer = {"dropped": True}
            self.waiting.update(self._taken[uuid])
        self.intents[uuid] = replace(self.intents[uuid], **answer)


def _parse_intent(record: Mapping[str, Any]) -> Submission:
    parallelism = record.get("parallelism")
    return Submission(
        uuid=as_text(record["uuid"]),
        executor=as_text(record["executor"]),
        hardware=as_text(record["hardware"]),
        run_ids=_run_ids(record["run_ids"]),
        time=as_time(record["time"]),
        kind=as_text(record.get("kind", "array")),
        parallelism=None if parallelism is None else as_count(parallelism),
        code=_optional_text(record.get("code")),
        after=_optional_text(record.get("after")),
        num_attempts=_counts(record.get("num_attempts")),
        cluster=_optional_text(record.get("cluster")),
    )


def _run_ids(value: object) -> tuple[str, ...]:
    """Ids of runs: each may be the name of a folder."""
    if isinstance(value, list) and all(isinstance(each, str) and is_run_id(each) for each in value):
        return tuple(value)
    raise ValueError("run_ids is no list of ids of runs")


def _counts(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, list):
        return tuple(map(as_count, value))
    raise ValueError("num_attempts is no list of numbers")


def _optional_text(value: object) -> str | None:
    return None if value is None else as_text(value)


def latest_of_each_run(submissions: Sequence[Submission]) -> dict[str, tuple[Submission, int]]:
    """Each run id with (its newest submission, its index in there)."""
    return {
        run_id: (submission, index) for submission in submissions for index, run_id in enumerate(submission.run_ids)
    }


def newest_of_run(paths: RunPaths, latest: tuple[Submission, int] | None) -> tuple[Submission, int] | None:
    """The run's newest submission: `latest` of the sweep's, or a successor job that an attempt submitted after it.

    By what each successor says that it follows, not by time: two hosts wrote the two files, and their clocks differ.

    Raises:
        UntrustedFileError: others may have changed the run's submissions.jsonl.
    """
    return newest_in(read_ledger(paths), latest)


def newest_in(book: Ledger, latest: tuple[Submission, int] | None) -> tuple[Submission, int] | None:
    """As `newest_of_run`, of the run's own submissions.jsonl as it was read."""
    successors = book.submissions
    if not successors or (latest is not None and not _follows(successors, latest[0])):
        return latest
    return successors[-1], 0


def _follows(successors: Sequence[Submission], submission: Submission) -> bool:
    """True if the last of these followed `submission`, over others or at once."""
    by_uuid = {each.uuid: each for each in successors}
    newest = root = successors[-1]
    for _ in successors:
        if root.after is None:
            return submission.time <= newest.time  # written before successors said what they follow
        if root.after not in by_uuid:
            break
        root = by_uuid[root.after]
    return root.after == submission.uuid
