"""submissions.jsonl: intents to submit, the scheduler's answers, and runs that wait for a free place in the queue.

An intent is written before sbatch, with a uuid that the job carries; the confirmation follows sbatch. A process killed
in between leaves an intent without a confirmation, and the uuid shows whether Slurm has the job. Runs that exceed the
site's limits for now are recorded as waiting. They form the sweep's own queue, from which a small top-up job and every
later command submit.

Each submission of a sweep is also copied to its own file, submissions/UUID.json, where jobs that begin weeks later read
which run they are. Either record is enough, because a line or a file may be lost.

What `rm` removed leaves a tombstone, so that a removed run or sweep is never called FAILED. A removed run has a file
`removed/RUN_ID.json` in its sweep's folder. The file names the submission that was the run's newest one, and holds
until the run is submitted again. A removed sweep leaves its folder with one file, `REMOVED`.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpc_trainer.errors import RunStateError, UntrustedFileError
from hpc_trainer.record.files import append_lines, claim, make_folder, to_json, write_atomic, write_json
from hpc_trainer.record.layout import SUBMISSIONS, RunPaths, SweepPaths, is_run_id
from hpc_trainer.record.reading import (
    Faults,
    as_count,
    as_text,
    as_time,
    is_number,
    list_folder,
    read_json,
    records,
    seal,
    tell,
    tuple_of,
    typed,
)
from hpc_trainer.record.trust import is_ours
from hpc_trainer.slurm.commands import user_name


def as_run_ids(value: object) -> tuple[str, ...]:
    """Return a list of run ids as a tuple; each id must be a possible folder name."""
    if isinstance(value, list) and all(isinstance(run_id, str) and is_run_id(run_id) for run_id in value):
        return tuple(value)
    raise ValueError("run_ids is not a list of run ids")


def as_job_id(value: object) -> str:
    """Return a job id of Slurm (123_4), or a process name (host:pid:time); file names are made of it."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_.:-]{1,300}", value):
        return value
    raise ValueError("job_id is not a job id")


def as_digest(value: object) -> str:
    """Return the digest of the frozen code, which is part of the name of the code's archive."""
    if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value):
        return value
    raise ValueError("code is not a digest")


def as_race(value: object) -> str:
    """Return the identifier of a race, 32 hex digits, which is part of the name of the file that decides it."""
    if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{32}", value):
        return value
    raise ValueError("race is not an identifier")


CHANGE = {"run_ids": as_run_ids, "changes": tuple_of(as_text), "user": as_text, "time": as_time}
INTENT = {
    "uuid": as_text, "executor": as_text, "hardware": as_text, "run_ids": as_run_ids, "time": as_time, "kind": as_text,
}  # fmt: skip
MAY_INTENT = {
    "parallelism": as_count, "code": as_digest, "after": as_text, "num_attempts": tuple_of(as_count),
    "cluster": as_text, "job_id": as_job_id, "doubt_time": as_time, "race": as_race, "choice": as_count,
    "slots": as_count, "per_node": as_count, "per_gpu": as_count, "source": as_text, "canaries": as_run_ids,
}  # fmt: skip


TOP_UP = "top-up"
SUCCESSOR = "successor"
Book = SweepPaths | RunPaths
"""Owner of a submissions.jsonl: a sweep, or a run, whose file has the successor jobs that its attempts submitted."""
_Lines = list[tuple[int | None, dict[str, Any] | None]]
"""Pairs of line number and record; the number is None for a copy, the record None for an unreadable line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One array: `run_ids[i]` is array element i. `job_id` is None until the scheduler has confirmed.

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
    """Uuid of the submission that a successor follows; None in files that are older than this field."""
    num_attempts: tuple[int, ...] = ()
    """Number of earlier attempts of each run, for the local executor; () in files that are older than this field."""
    cluster: str | None = None
    """Name of the cluster that got the job, as it reports it; None if it reports none, and in older files."""
    race: str | None = None
    """Identifier that the submissions of a run to several shapes share; the first job that starts has the run."""
    choice: int = 0
    """Item of the run's list of hardware to which the job was submitted (`RunSpec.on`)."""
    canaries: tuple[str, ...] = ()
    """Runs that must have trained and saved before Slurm may start this array, which is submitted with --hold."""
    slots: int = 0
    """Jobs of a pool, which work through `run_ids` in turns (record/turns.py); 0: each run has its own element."""
    per_node: int = 0
    """Runs that a slot of a pool runs beside each other; 0 if the submission is no pool."""
    per_gpu: int = 0
    """Runs that share one GPU of a slot; 0 if each run of the submission has GPUs of its own."""
    source: str | None = None
    """Name of the source that draws the pool's runs while the pool works (`worker/slot.py`, `RunSource`); None:
    `run_ids` are all."""
    doubt_time: float | None = None
    """Time when sbatch gave up without an answer, in seconds since the epoch; the scheduler may still take the job."""
    job_id: str | None = None
    dropped: bool = False

    @property
    def is_pool(self) -> bool:
        """True if slots work through its runs."""
        return self.slots > 0

    @property
    def num_elements(self) -> int:
        """Number of jobs of the submission: one for each run, or one for each slot."""
        return self.slots or len(self.run_ids)

    def element_id(self, index: int) -> str | None:
        """Return the job id of one element: `<array>_<index>` on Slurm, the queue's id locally; None if unconfirmed.

        An element is a run, or a slot of a pool.
        """
        if self.job_id is None:
            return None
        return f"{self.job_id}_{index}" if self.executor == "slurm" and self.kind != SUCCESSOR else self.job_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Reason why a run waits in the sweep's own queue, and the digest of the code that it was submitted with."""

    reason: str
    code: str | None
    time: float = field(default=0.0, compare=False)
    """Time when the run began to wait, in seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Overrides with which runs were submitted again, the user, and the time in seconds since the epoch."""

    run_ids: tuple[str, ...]
    changes: tuple[str, ...]
    user: str
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Content of a submissions.jsonl, without dropped intents."""

    submissions: list[Submission] = field(default_factory=list)
    top_ups: list[Submission] = field(default_factory=list)
    waiting: Mapping[str, Waiting] = field(default_factory=dict)
    """Run id -> why the run waits in the sweep's own queue."""

    refused: Mapping[str, str] = field(default_factory=dict)
    """Run id -> why the scheduler refused the run when its turn came."""

    changes: list[Change] = field(default_factory=list)
    """Changes by `hpc-trainer retry`, in order."""

    damage: tuple[str, ...] = ()
    """Faults: lines that cannot be read, or that refer to a submission whose line is lost."""

    unread: str | None = None
    """Reason why the file, or its rest, could not be read just now (`may_fail`); the unread part may hold anything."""

    @property
    def is_search(self) -> bool:
        """True if slots of a pool draw runs that no submission lists."""
        return any(submission.source is not None for submission in self.submissions)

    @property
    def unsettled(self) -> list[Submission]:
        """Intents without an answer from the scheduler."""
        return [submission for submission in (*self.submissions, *self.top_ups) if submission.job_id is None]


def write_intent(
    paths: Book, *, executor: str, hardware: str, run_ids: Sequence[str], kind: str = "array",
    parallelism: int | None = None, code: str | None = None, after: str | None = None,
    num_attempts: Sequence[int] = (), cluster: str | None = None, race: str | None = None, choice: int = 0,
    slots: int = 0, per_node: int = 0, per_gpu: int = 1, source: str | None = None,
    canaries: Sequence[str] = (),
) -> Submission:  # fmt: skip
    """Record the submission that comes next, and return it with a fresh uuid."""
    intent = Submission(
        uuid=uuid.uuid4().hex, executor=executor, hardware=hardware, run_ids=tuple(run_ids), time=time.time(),
        kind=kind, parallelism=parallelism, code=code, after=after, num_attempts=tuple(num_attempts),
        cluster=cluster, race=race, choice=choice, slots=slots, per_node=per_node,
        per_gpu=per_gpu if per_gpu > 1 else 0, source=source, canaries=tuple(canaries),
    )  # fmt: skip
    append_lines(paths.submissions, [_record(intent)], sealed=True)
    _write_copy(paths, intent)
    return intent


def write_confirmation(paths: Book, intent: Submission, job_id: str) -> None:
    """Record the scheduler's answer."""
    _append(paths, "confirmed", uuid=intent.uuid, job_id=job_id)
    _write_copy(paths, replace(intent, job_id=job_id))


def write_doubt(paths: Book, intent: Submission) -> None:
    """Record that sbatch ended without an answer: the scheduler may have the job, or still get it."""
    _append(paths, "doubt", uuid=intent.uuid)
    _write_copy(paths, replace(intent, doubt_time=time.time()))


def write_refused(paths: SweepPaths, run_ids: Sequence[str], reason: str) -> None:
    """Record that runs wait no longer, because the scheduler would refuse them at any time."""
    _append(paths, "refused", run_ids=list(run_ids), reason=reason)


def write_dropped(paths: Book, intent: Submission, reason: str) -> None:
    """Record that the scheduler does not have this intent and never will."""
    _append(paths, "dropped", uuid=intent.uuid, reason=reason)
    if isinstance(paths, SweepPaths):
        paths.intent(intent.uuid).unlink(missing_ok=True)


def write_waiting(paths: SweepPaths, run_ids: Sequence[str], reason: str, code: str | None) -> None:
    """Record that the next command or top-up job shall submit these runs as soon as there is room."""
    _append(paths, "waiting", run_ids=list(run_ids), reason=reason, code=code)


def write_changed(paths: SweepPaths, run_ids: Sequence[str], changes: Sequence[str]) -> None:
    """Record that these runs have new values from now on, which their newest lines of specs.jsonl hold."""
    _append(paths, "changed", run_ids=list(run_ids), changes=list(changes), user=user_name())


def _append(paths: Book, event: str, **said: Any) -> None:
    append_lines(paths.submissions, [{"event": event, **said, "time": time.time()}], sealed=True)


def _record(intent: Submission) -> dict[str, Any]:
    values = ((name, getattr(intent, name)) for name in Submission.__slots__)
    return {"event": "intent", **{name: value for name, value in values if value or name == "run_ids"}}


def _write_copy(paths: Book, intent: Submission) -> None:
    if isinstance(paths, SweepPaths):
        make_folder(paths.intents)
        write_atomic(paths.intent(intent.uuid), f"{seal(to_json(_record(intent)))}\n")


def read_submissions(paths: Book) -> list[Submission]:
    """Return all arrays in order, without dropped ones; [] for a sweep that does not exist."""
    return read_ledger(paths).submissions


def read_ledger(paths: Book, *, may_fail: bool = False) -> Ledger:
    """Read the whole file; return an empty ledger for a sweep that does not exist, or a run without successor jobs.

    A damaged line hides no other line, and becomes a fault in `damage`. The copy replaces a lost line.

    Args:
        paths: the sweep or the run.
        may_fail: True if the caller only shows the ledger. If the file system fails, `unread` then says so, and no
            error is raised.

    Raises:
        UntrustedFileError: others may have changed the file.
        OSError: the file system failed, so unread lines may hold a submission.
    """
    damage, faults = Faults(), Faults()
    place = paths.at(SUBMISSIONS)
    is_there = is_ours(place, damage)
    if not is_there and not damage and isinstance(paths, RunPaths):
        return Ledger()  # the case of almost every run: none of its attempts had to submit a successor
    lines: _Lines = [*records(place, damage)] if is_there else []
    book = _read(paths, lines, faults)
    lost = _lost_copies(paths, book, damage)
    if lost:
        faults.clear()
        book = _read(paths, _with_copies(lines, lost, book.intents), faults)
    if damage.refusal is not None and not may_fail:
        raise damage.refusal
    kept = [submission for submission in book.intents.values() if not submission.dropped]
    return Ledger(
        submissions=[submission for submission in kept if submission.kind != TOP_UP],
        top_ups=[submission for submission in kept if submission.kind == TOP_UP],
        waiting=book.waiting,
        refused=book.refused,
        changes=book.changes,
        damage=(*damage, *faults),
        unread=damage[0] if damage.refusal is not None else None,
    )


def _read(paths: Book, records: _Lines, faults: Faults) -> _Reader:
    book = _Reader()
    for number, record in records:
        if record is not None:
            try:
                book.take(record)
            except (KeyError, ValueError) as error:
                tell(faults, paths.submissions, error, number)
    return book


def _lost_copies(paths: Book, book: _Reader, faults: Faults) -> list[dict[str, Any]]:
    """Read the copies of submissions that have no line or no answer, and return them by time; read no other copies."""
    if not isinstance(paths, SweepPaths):
        return []
    settled = {uuid for uuid, submission in book.intents.items() if submission.job_id is not None or submission.dropped}
    copies = []
    for name in list_folder(paths.intents, faults) or ():
        path = paths.intents / name
        if path.suffix != ".json" or path.stem in settled:
            continue
        try:
            record = read_json(path, faults) if is_ours(path, faults) else None
            if record is not None and _parse_intent(record).uuid == path.stem:
                copies.append(record)
        except (KeyError, ValueError, RunStateError, UntrustedFileError) as error:
            tell(faults, path, error)
    return sorted(copies, key=lambda record: float(record["time"]))


def _with_copies(records: _Lines, copies: Sequence[dict[str, Any]], answered: Collection[str]) -> _Lines:
    """Return the records with the copies inserted.

    A copy whose uuid is in `answered` comes last. Other copies come before the lines about their submission, or else
    by time.
    """
    merged = list(records)
    for copy in copies:
        lines = [(place, record) for place, (_, record) in enumerate(merged) if record is not None]
        own = [place for place, record in lines if record.get("uuid") == copy["uuid"]]
        later = [place for place, record in lines if is_number(record.get("time")) and record["time"] > copy["time"]]
        place = len(merged) if copy["uuid"] in answered else min(own or later, default=len(merged))
        merged.insert(place, (None, copy))
    return merged


class _Reader:
    """State of a submissions.jsonl after the records taken so far."""

    def __init__(self) -> None:
        self.intents: dict[str, Submission] = {}
        self.waiting: dict[str, Waiting] = {}
        self.refused: dict[str, str] = {}
        self.changes: list[Change] = []
        self._waits: set[tuple[float, tuple[str, ...]]] = set()
        self._taken: dict[str, dict[str, Waiting]] = {}  # intent -> the runs that the intent took out of the queue

    def take(self, record: Mapping[str, Any]) -> None:
        """Take the next record into account.

        Raises:
            KeyError, ValueError: the record is damaged, or refers to an intent whose line is lost.
        """
        event = as_text(record["event"])
        if event == "intent":
            self._take_intent(_parse_intent(record))
        elif event in ("confirmed", "doubt", "dropped"):
            self._take_answer(event, record)
        elif event == "refused":
            reason = as_text(record["reason"])
            for run_id in as_run_ids(record["run_ids"]):
                self.waiting.pop(run_id, None)
                self.refused[run_id] = reason
        elif event == "changed":
            self.changes.append(Change(**typed(record, CHANGE, {})))
        elif event == "waiting":
            values = typed(record, {"run_ids": as_run_ids, "time": as_time, "reason": as_text}, {"code": as_digest})
            key = values["time"], values["run_ids"]
            if key not in self._waits:  # a repeated line must not bring runs back that were submitted since
                self._waits.add(key)
                why = Waiting(reason=values["reason"], code=values.get("code"), time=values["time"])
                self.waiting.update(dict.fromkeys(values["run_ids"], why))
        else:
            raise ValueError(f"event {event[:20]!r} is of a newer version")

    def _take_intent(self, intent: Submission) -> None:
        earlier = self.intents.get(intent.uuid)
        if earlier is not None:  # a repeated line, or the copy of a line: it takes no answer back
            self.intents[intent.uuid] = replace(
                earlier, job_id=earlier.job_id or intent.job_id, doubt_time=earlier.doubt_time or intent.doubt_time
            )
            return
        self.intents[intent.uuid] = intent
        for run_id in intent.run_ids:
            self.refused.pop(run_id, None)
        self._taken[intent.uuid] = {key: self.waiting.pop(key) for key in intent.run_ids if key in self.waiting}

    def _take_answer(self, event: str, record: Mapping[str, Any]) -> None:
        uuid = as_text(record["uuid"])
        if uuid not in self.intents and event == "dropped":
            return  # the intent's line is lost, so it took no run out of the queue
        if uuid not in self.intents:
            raise ValueError(f"it answers submission {uuid[:8]}, which no line describes")
        if event == "confirmed":
            # The scheduler's answer may come after the intent was dropped, and is more reliable.
            answer: dict[str, Any] = {"job_id": as_job_id(record["job_id"]), "dropped": False}
            for run_id in self.intents[uuid].run_ids if self.intents[uuid].dropped else ():
                self.waiting.pop(run_id, None)
        elif event == "doubt":
            answer = {"doubt_time": as_time(record["time"])}
        else:
            answer = {"dropped": True}
            self.waiting.update(self._taken[uuid])
        self.intents[uuid] = replace(self.intents[uuid], **answer)


def _parse_intent(record: Mapping[str, Any]) -> Submission:
    return Submission(**typed({"kind": "array", **record}, INTENT, MAY_INTENT))


def latest_of_each_run(submissions: Sequence[Submission]) -> dict[str, tuple[Submission, int]]:
    """Return run id -> (its newest submission, its index in that submission)."""
    return {
        run_id: (submission, index) for submission in submissions for index, run_id in enumerate(submission.run_ids)
    }


Job = tuple[Submission, int]
"""A submission of a run, and the run's index in it."""


def rivals_of_each_run(submissions: Sequence[Submission]) -> dict[str, tuple[Job, ...]]:
    """Return run id -> the jobs of its newest submission to several shapes, in order; runs with one job are left out.

    One of the jobs has the run once it has claimed the run (`claim_run`).
    """
    rivals: dict[str, list[Job]] = {}
    for submission in submissions:
        for index, run_id in enumerate(submission.run_ids):
            if submission.race is None:
                rivals.pop(run_id, None)
            elif run_id in rivals and rivals[run_id][-1][0].race == submission.race:
                rivals[run_id].append((submission, index))
            else:
                rivals[run_id] = [(submission, index)]
    return {run_id: tuple(jobs) for run_id, jobs in rivals.items()}


def claim_run(paths: RunPaths, own: Submission) -> bool:
    """Claim the run for one of several submissions; return True if it has the run, by this or an earlier call.

    Of any number of jobs that start in the same moment exactly one gets True, also on NFS (`files.claim`).

    Raises:
        OSError: the file system refused.
        RunStateError: the claim cannot be read, so that another job may have the run.
    """
    assert own.race is not None
    place = paths.claim(own.race)
    record = {"uuid": own.uuid, "job_id": own.job_id, "time": time.time()}
    if claim(place, f"{seal(to_json(record))}\n".encode()):
        return True
    holder = claimed_by(paths, own.race)
    if holder is None:
        raise RunStateError(f"{place} exists but cannot be read, so the job that has {paths.run_id} is unknown.")
    return holder == own.uuid


def claimed_by(paths: RunPaths, race: str, faults: Faults | None = None) -> str | None:
    """Return the uuid of the submission that has claimed the run; None if none has, or the claim cannot be read."""
    uuid = (read_json(paths.claim(race), Faults() if faults is None else faults) or {}).get("uuid")
    return uuid if isinstance(uuid, str) else None


def winner_of(paths: RunPaths, rivals: Sequence[Job], jobs_seen: Collection[str] = ()) -> Job | None:
    """Return the job that has the run, among several jobs of the run; None if none of them has started.

    Args:
        paths: the run.
        rivals: the jobs of the run's newest submission to several shapes.
        jobs_seen: job ids of the run's attempts, which identify the winner if its claim is lost.
    """
    holder = claimed_by(paths, rivals[0][0].race or "")
    by_claim = next((rival for rival in rivals if rival[0].uuid == holder), None)
    by_attempt = (rival for rival in rivals if rival[0].element_id(rival[1]) in jobs_seen)
    return by_claim or next(by_attempt, None)


def newest_of_run(paths: RunPaths, latest: tuple[Submission, int] | None) -> tuple[Submission, int] | None:
    """Return the run's newest submission: `latest`, or a successor job that an attempt submitted after it.

    The order follows from what each successor says that it follows, not from time: two hosts wrote the two files, and
    their clocks differ.

    Args:
        paths: the run.
        latest: the run's newest submission among the sweep's, and the run's index in it; None if there is none.

    Raises:
        UntrustedFileError: others may have changed the run's submissions.jsonl.
    """
    return newest_in(read_ledger(paths), latest)


def newest_in(book: Ledger, latest: tuple[Submission, int] | None) -> tuple[Submission, int] | None:
    """Return the result of `newest_of_run`, given the content of the run's own submissions.jsonl."""
    successors = book.submissions
    if not successors or (latest is not None and not _follows(successors, latest[0])):
        return latest
    return successors[-1], 0


def _follows(successors: Sequence[Submission], submission: Submission) -> bool:
    """Return True if the last of the successors followed `submission`, directly or through others."""
    by_uuid = {successor.uuid: successor for successor in successors}
    newest = root = successors[-1]
    for _ in successors:
        if root.after is None:
            return submission.time <= newest.time  # written before successors recorded what they follow
        if root.after not in by_uuid:
            break
        root = by_uuid[root.after]
    return root.after == submission.uuid


_SUFFIX = ".json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """Removal of a run or a sweep: by whom, when, and the uuid of the run's newest submission ("" without one)."""

    user: str
    time: float
    uuid: str = ""

    @property
    def words(self) -> str:
        """Return who removed it and when, as a cause."""
        return f"removed by {self.user}, {time.strftime('%Y-%m-%d %H:%M', time.localtime(self.time))}"


def write_removed(sweep: SweepPaths, run_id: str, uuid: str) -> None:
    """Record that a run is removed, before its folder is; `uuid` as in `Removed`."""
    make_folder(sweep.removed)
    write_json(sweep.removed / f"{run_id}{_SUFFIX}", _removal(uuid))


def write_removed_sweep(folder: Path) -> None:
    """Record in an empty folder that its sweep is removed."""
    write_json(SweepPaths(folder).removed_whole, _removal(""))


def _removal(uuid: str) -> dict[str, object]:
    return {"user": user_name(), "time": time.time(), "uuid": uuid}


def read_removed(sweep: SweepPaths, listed: Collection[str], faults: Faults) -> dict[str, Removed]:
    """Return run id -> removal for the removed runs of a sweep.

    Args:
        sweep: the sweep.
        listed: the names in its folder.
        faults: gets a fault for each tombstone that cannot be read.
    """
    if sweep.removed.name not in listed:
        return {}
    names = [name for name in list_folder(sweep.removed, faults) or () if name.endswith(_SUFFIX)]
    read = {name.removesuffix(_SUFFIX): _read_removal(sweep.removed / name, faults) for name in names}
    return {run_id: removed for run_id, removed in read.items() if removed is not None}


def read_removed_sweep(folder: Path) -> Removed | None:
    """Return the removal of the sweep that had this folder; None if it was not removed."""
    return _read_removal(SweepPaths(folder).removed_whole, Faults())


def _read_removal(path: Path, faults: Faults) -> Removed | None:
    record = read_json(path, faults) if is_ours(path, faults) else None
    if record is None:
        return None
    try:
        values = typed(record, {"user": as_text, "time": as_time, "uuid": as_text})
    except (KeyError, ValueError) as error:
        faults.append(f"{path} is not read: {error}")
        return None
    return Removed(**values)
