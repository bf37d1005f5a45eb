"""Journals of a run's attempts: attempt-000.jsonl and so on. Causes are recorded, never inferred.

Each attempt has a file of its own, which only the attempt's rank 0 writes. Slurm may start the next attempt while a
node that it has given up is still alive. Two NFS clients that append to one file overwrite each other (open(2),
O_APPEND). Earlier versions kept all attempts in attempts.jsonl, which is read first.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpc_trainer.errors import ExitCode
from hpc_trainer.record.files import append_lines, fsync_folder, to_json
from hpc_trainer.record.layout import OLD_JOURNAL, RunPaths, journals_in
from hpc_trainer.record.processes import process_name
from hpc_trainer.record.reading import (
    Faults,
    Kinds,
    as_count,
    as_text,
    as_time,
    exists,
    is_storage_error,
    list_folder,
    open_file,
    read_lines,
    records,
    seal,
    tell,
    typed,
)
from hpc_trainer.record.shared_folder import claim
from hpc_trainer.record.states import RunState
from hpc_trainer.record.submissions import SUCCESSOR, read_ledger
from hpc_trainer.record.worker_files import MOVE_CAUSES, read_error, read_failure

_MOST_UNLISTED = 1_000
"""Number of journals that are looked up one by one if the folder may not be listed."""


@dataclass(slots=True, kw_only=True)
class Attempt:
    """An attempt of a run, read from the records of its journal. A field is None until its record is written."""

    attempt: int
    job_id: str
    restart_count: int
    node: str
    pid: int
    start_time: float
    executor: str = ""
    process: str = ""
    resumed_step: int | None = None
    end_time: float | None = None
    step: int | None = None
    saved_step: int | None = None
    state: RunState | None = None
    cause: str | None = None
    action: str | None = None
    signal: str | None = None
    error: dict[str, Any] = field(default_factory=dict)
    guarded: list[dict[str, Any]] = field(default_factory=list)
    """Skipped spikes and rollbacks, in order (`Journal.guard`)."""

    @property
    def has_ended(self) -> bool:
        """True if the journal records how the attempt ended."""
        return self.end_time is not None


@dataclass(frozen=True, slots=True)
class Story:
    """Attempts read from the journals. `is_whole`: True if no unreadable line may hold the newest attempt's state."""

    attempts: list[Attempt]
    is_whole: bool = True


class Journal:
    """Journals of one run. Every process may read them; only rank 0 of an attempt appends to the attempt's journal."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths

    def read(self, faults: Faults | None = None) -> list[Attempt]:
        """Return every attempt in order; damaged lines are skipped, and reported to `faults`."""
        return self.read_story(faults).attempts

    def read_story(self, faults: Faults | None = None, names: Collection[str] | None = None) -> Story:
        """Read every attempt, and determine whether unreadable lines may hold more about the newest one.

        Args:
            faults: gets a sentence for each line and file that cannot be read.
            names: the names in the run's folder, if it was listed just now.
        """
        attempts: dict[int, Attempt] = {}
        is_whole = True
        for name in self._files(names, faults):
            path, num_faults = self._paths.at(name), len(faults or ())
            for number, record in records(path, faults):
                is_whole = is_whole and record is not None and len(faults or ()) == num_faults
                num_faults = len(faults or ())
                try:
                    if record is not None and _apply(attempts, record):
                        # A start makes all earlier lines irrelevant, and so does the end of the newest attempt.
                        is_whole = is_whole or record["event"] == "start" or _is_end_of_newest(attempts, record)
                except (KeyError, ValueError) as error:
                    tell(faults, path, error, number)
                    is_whole = False
            is_whole = is_whole and len(faults or ()) == num_faults  # a new fault here: the file's rest is unreadable
        return Story([attempts[number] for number in sorted(attempts)], is_whole)

    def _files(self, names: Collection[str] | None = None, faults: Faults | None = None) -> list[str]:
        """Return the names of the journals, in the order of the attempts."""
        if names is None:
            unseen = Faults()
            names = list_folder(self._paths.place, unseen)
            if names is None and faults is None and unseen.refusal is not None and is_storage_error(unseen.refusal):
                raise unseen.refusal
        if names is None:  # the folder may be entered but not listed
            paths = map(self._paths.journal, range(_MOST_UNLISTED))
            names = [OLD_JOURNAL, *(path.name for path in paths if exists(path, Faults()))]
        return [name for _, name in journals_in(names)]

    def _records(self) -> Iterator[dict[str, Any]]:
        """Yield the readable records of all attempts in order."""
        for name in self._files():
            yield from read_lines(self._paths.at(name))

    def attempt_number(self, job_id: str, restart_count: int) -> int:
        """Return the number of this attempt, the same on every rank whether or not rank 0 has recorded it yet.

        The number is never in use by another attempt: if journal lines are lost, failure files and rank 0's logs still
        show the attempts. Files that this start itself has written do not count, so that a late rank finds the same
        number.
        """
        number = 0
        for record in self._records():
            try:
                used = as_count(record["attempt"])
            except (KeyError, ValueError):
                continue
            if (record.get("job_id"), record.get("restart_count")) == (job_id, restart_count):
                return used
            number = max(number, used + 1)
        while self._is_used_by_another(number, log_header(number, job_id, restart_count)):
            number += 1
        return number

    def _is_used_by_another(self, number: int, own: str) -> bool:
        failure = self._paths.failure(number)
        if failure.exists() and read_failure(failure).get("start") != own:
            return True
        log = open_file(self._paths.log(number, 0))
        if log is None:
            return False
        with log:
            first = log.readline(1_000)
        return bool(first) and first.decode(errors="replace").strip() != own

    def start(
        self, attempt: int, *, job_id: str, restart_count: int, node: str, pid: int, executor: str, world_size: int
    ) -> None:
        """Record that rank 0 of an attempt is alive, which creates the attempt's journal.

        The file appears together with its first line, so every process that lists the file can read whose it is. The
        file already exists if torchrun starts the ranks of an attempt again.
        """
        record = _record(
            "start",
            attempt,
            job_id=job_id,
            restart_count=restart_count,
            node=node,
            pid=pid,
            process=process_name(pid),
            executor=executor,
            world_size=world_size,
        )
        path = self._paths.journal(attempt)
        if claim(path, f"{seal(to_json(record))}\n".encode()):
            fsync_folder(path.parent)
        else:
            append_lines(path, [record], sealed=True)

    def resume(self, attempt: int, step: int, changes: Sequence[str] = ()) -> None:
        """Record that training resumes at `step` (0: the beginning), and the `changes` since the checkpoint."""
        self._append("resume", attempt, step=step, **({"changes": list(changes)} if changes else {}))

    def fit(self, attempt: int, found: Mapping[str, Any]) -> None:
        """Record the size that `train.micro_batch_size=auto` has chosen; `fits` returns `found` again."""
        self._append("fit", attempt, found=dict(found))

    def fits(self) -> list[tuple[int, dict[str, Any]]]:
        """Return (attempt, result) of every search for a micro-batch size, in order."""
        return [
            (record["attempt"], record["found"])
            for record in self._records()
            if record.get("event") == "fit"
            and isinstance(record.get("found"), dict)
            and isinstance(record.get("attempt"), int)
        ]

    def guard(self, attempt: int, *, action: str, step: int, **fields: Any) -> None:
        """Record that `count` spikes up to `step` were skipped, or that training was rolled back `to` a step."""
        self._append("guard", attempt, action=action, step=step, **fields)

    def end(
        self,
        attempt: int,
        *,
        state: RunState,
        cause: str,
        step: int | None = None,
        saved_step: int | None = None,
        action: str = "none",
        signal: str | None = None,
        error: dict[str, Any] | None = None,
    ) -> None:
        """Record how the attempt ended, before rank 0 requeues the job or exits."""
        self._append(
            "end",
            attempt,
            state=state.value,
            cause=cause,
            step=step,
            saved_step=saved_step,
            action=action,
            signal=signal,
            error=error or {},
        )

    def _append(self, event: str, attempt: int, **fields: Any) -> None:
        append_lines(self._paths.journal(attempt), [_record(event, attempt, **fields)], sealed=True)


def _record(event: str, attempt: int, **fields: Any) -> dict[str, Any]:
    return {"event": event, "attempt": attempt, "time": time.time(), **fields}


def log_header(attempt: int, job_id: str, restart_count: int) -> str:
    """Return the line that identifies an attempt: the first line of its logs, and `start` in its failure file."""
    return f"attempt {attempt}: job {job_id}, start {restart_count}"


def _is_end_of_newest(attempts: Mapping[int, Attempt], record: Mapping[str, Any]) -> bool:
    return bool(record["event"] == "end" and record["attempt"] == max(attempts))


def _apply(attempts: dict[int, Attempt], record: dict[str, Any]) -> bool:
    """Apply a record to the attempts, and return True if the record describes an attempt.

    Raises:
        KeyError, ValueError: the record is damaged, of a newer version, or of an attempt whose start is lost.
    """
    number, event = as_count(record["attempt"]), as_text(record["event"])
    if event == "start":
        values = typed({"process": "", **record}, _START)
        started = Attempt(attempt=number, start_time=values.pop("time"), **values)
        before = attempts.get(number)
        if before is None or (before.job_id, before.start_time) != (started.job_id, started.start_time):
            attempts[number] = started  # a repeated line must not reset the attempt
        return True
    if event == "fit":
        return False
    if event not in ("resume", "guard", "end"):
        raise ValueError(f"event {event[:20]!r} is of a newer version")
    if number not in attempts:
        raise ValueError(f"it is of attempt {number}, and no line tells of its start")
    if event == "resume":
        attempts[number].resumed_step = as_count(record["step"])
    elif event == "guard":
        attempts[number].guarded.append(record | typed(record, _GUARD))
    else:
        values = typed(record, _END, _MAY_END)
        attempts[number].end_time = values["time"]
        attempts[number].error = read_error(record.get("error") or {})
        for key in ("state", *_MAY_END):
            setattr(attempts[number], key, values.get(key))
    return True


_START = {
    "job_id": as_text, "restart_count": as_count, "node": as_text, "pid": as_count, "time": as_time,
    "executor": as_text, "process": as_text,
}  # fmt: skip
_GUARD = {"action": as_text, "step": as_count, "time": as_time}
_END: Kinds = {"state": RunState, "time": as_time}
_MAY_END = {"step": as_count, "saved_step": as_count, "cause": as_text, "action": as_text, "signal": as_text}


def newest_chain(attempts: list[Attempt], successors: Collection[str]) -> list[Attempt]:
    """Return the attempts since a user last submitted the run: those of one job, or of jobs that succeeded each other.

    Args:
        successors: `successor_jobs` of the run. The journal alone is not enough: after an error, a rank that does not
            write the journal may have submitted the successor.
    """
    chain = attempts[-1:]
    for attempt in reversed(attempts[:-1]):
        follows = attempt.action == SUCCESSOR or chain[0].job_id in successors
        if attempt.job_id != chain[0].job_id and not follows:
            break
        chain.insert(0, attempt)
    return chain


def successor_jobs(paths: RunPaths) -> frozenset[str]:
    """Return the ids of the successor jobs that attempts of this run submitted."""
    return frozenset(
        submission.job_id for submission in read_ledger(paths).submissions if submission.job_id is not None
    )


def restarts_without_progress(attempts: list[Attempt], successors: Collection[str]) -> int:
    """Return the number of restarts in a row without a new step, since a user last submitted the run."""
    chain = newest_chain(attempts, successors)
    if not chain or chain[-1].resumed_step is None:
        return 0
    newest, count = chain[-1], 0
    for attempt in reversed(chain[:-1]):
        # An attempt that ended before it resumed made no progress either.
        if attempt.resumed_step not in (newest.resumed_step, None):
            break
        count += 1
    return count


def failures_of_storage(paths: RunPaths) -> int:
    """Return the number of attempts that storage or data ended (exit 74) since a user last submitted the run."""
    return sum(
        _failed_by_storage(paths, attempt) for attempt in newest_chain(Journal(paths).read(), successor_jobs(paths))
    )


def num_moves(paths: RunPaths) -> int:
    """Return how often the run left a node because of a device, since a user last submitted the run."""
    return sum(attempt.cause in MOVE_CAUSES for attempt in newest_chain(Journal(paths).read(), successor_jobs(paths)))


def _failed_by_storage(paths: RunPaths, attempt: Attempt) -> bool:
    failure = read_failure(paths.failure(attempt.attempt)) or attempt.error
    return failure.get("exit_code") == ExitCode.STORAGE


def failures_untold(attempts: list[Attempt], job_id: str, restart_count: int) -> int:
    """Return the number of consecutive starts of a job, up to this one, that may have failed because of storage.

    Slurm counts the restarts, so lost files do not matter. A start is not counted, and ends the sequence, in two
    cases: the journal records another end of it, or the next start resumed at a later step.
    """
    starts = {attempt.restart_count: attempt for attempt in attempts if attempt.job_id == job_id}
    count = 1
    while count <= restart_count:
        earlier, later = starts.get(restart_count - count), starts.get(restart_count - count + 1)
        if earlier is not None:
            is_failure = earlier.error.get("exit_code") == ExitCode.STORAGE
            begins = [None if attempt is None else attempt.resumed_step for attempt in (earlier, later)]
            got_on = None not in begins and begins[1] > begins[0]  # type: ignore[operator]
            if (earlier.has_ended and not is_failure) or got_on:
                break
        count += 1
    return count
