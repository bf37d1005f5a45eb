"""Files that a worker writes about its run: a journal for each attempt, heartbeat, result, failures, first weights.

attempt-000.jsonl and so on are the journals. Causes are recorded, never inferred. Each attempt has a file of its own,
which only the attempt's rank 0 writes. Slurm may start the next attempt while a node that it has given up is still
alive. Two NFS clients that append to one file overwrite each other (open(2), O_APPEND). Earlier versions kept all
attempts in attempts.jsonl, which is read first.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpc_trainer.config.name_patterns import listed
from hpc_trainer.errors import ExitCode
from hpc_trainer.record.files import append_lines, claim, fsync_folder, to_json, write_json
from hpc_trainer.record.layout import OLD_JOURNAL, RunPaths, journals_in
from hpc_trainer.record.processes import process_name
from hpc_trainer.record.reading import (
    Faults,
    Kinds,
    as_count,
    as_table,
    as_text,
    as_time,
    exists,
    is_number,
    is_storage_error,
    list_folder,
    metric_values,
    open_file,
    parsed_file,
    read_json,
    read_lines,
    records,
    seal,
    tell,
    tuple_of,
    typed,
)
from hpc_trainer.record.shared_folder import Place
from hpc_trainer.record.states import DONE, POOL, RunState
from hpc_trainer.record.submissions import SUCCESSOR, read_ledger
from hpc_trainer.slurm.queue import array_of

# The small files: heartbeat.json and result.json; logs/attempt-NNN.failure.json, the error of the first failing rank,
# which the journal's `error` repeats; first_weights.json, the weights that a run with `init_from` began with.

_MOST_REMARKS, _MAX_REMARK = 8, 2_000


def read_heartbeat(path: Place, faults: Faults | None = None) -> dict[str, Any]:
    """Return `step`, `attempt`, `time`, speed, `metrics` and `remarks` of a heartbeat; {} if none can be read."""
    beat = read_json(path, faults)
    if beat is None:
        return {}
    numbers = {key: value for key, value in beat.items() if is_number(value) and math.isfinite(value)}
    fields = _typed(beat, {"step": as_count, "num_steps": as_count, "attempt": as_count, "time": as_time}, path, faults)
    others: dict[str, Any] = {
        key: value for key, value in numbers.items() if key not in ("step", "num_steps", "attempt", "time")
    }
    remarks = beat.get("remarks")
    if isinstance(remarks, dict):
        texts = [(name, text[:_MAX_REMARK]) for name, text in remarks.items() if isinstance(text, str)]
        others["remarks"] = dict(texts[:_MOST_REMARKS])
    return {**others, **fields, **_with_metrics(beat)}


def read_result(path: Place, faults: Faults | None = None) -> dict[str, Any]:
    """Return `step`, `cause`, `reason` and `metrics` of a run that is done; {} if none can be read."""
    result = read_json(path, faults)
    if result is None:
        return {}
    fields = _typed(result, {"step": as_count, "cause": as_text, "reason": as_text}, path, faults)
    return {**fields, **_with_metrics(result)}


def write_result(
    paths: RunPaths, *, step: int, num_steps: int, attempt: int, world_size: int, cause: str, reason: str | None,
    metrics: Mapping[str, float] | None,
) -> None:  # fmt: skip
    """Write the result of a run that is done, and then its DONE marker.

    Args:
        paths: paths of the run.
        step: the last step.
        num_steps: steps of the whole run.
        attempt: number of the last attempt, from 0.
        world_size: number of ranks.
        cause: why the run ended.
        reason: why it ended before `num_steps`; None if it did not.
        metrics: final metrics.
    """
    write_json(
        paths.result,
        {
            "run_id": paths.run_id, "step": step, "num_steps": num_steps, "attempts": attempt + 1,
            "world_size": world_size, "cause": cause, "reason": reason, "metrics": metrics,
        },
    )  # fmt: skip
    # DONE comes last: a reader that sees it relies on the result.
    write_json(paths.marker(DONE), {"time": time.time()})


def _typed(
    record: Mapping[str, Any], kinds: Mapping[str, Callable[[object], Any]], path: Place, faults: Faults | None
) -> dict[str, Any]:
    fields = {}
    for key, convert in kinds.items():
        if record.get(key) is not None:
            try:
                fields[key] = convert(record[key])
            except ValueError as error:
                tell(faults, path, f"{key}: {error}")
    return fields


def _with_metrics(record: Mapping[str, Any]) -> dict[str, Any]:
    metrics = record.get("metrics")
    if not isinstance(metrics, dict):
        return {}
    return {"metrics": metric_values(metrics)}


_FAILURE = {
    "rank": as_count, "node": as_text, "exit_code": as_count, "type": as_text, "message": as_text,
    "traceback": as_text, "output": as_text, "time": as_time, "cause": as_text, "start": as_text, "frame": as_text,
}  # fmt: skip

# A line of a traceback, and the line of code below it. The line of a SyntaxError names no function.
_FRAME = re.compile(r'^ *File "([^"<][^"]*)", line (\d+)(?:, in (.+))?\n(?: *(?!File ")(\S.*))?', re.MULTILINE)
_INSTALLED = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python3(?:\.\d+)?/|\.pyx$")
_OURS = str(Path(__file__).parents[1])
_MAX_CODE = 200


def read_failure(path: Path, faults: Faults | None = None) -> dict[str, Any]:
    """Return the record of a failure file; {} if there is no readable file."""
    return read_error(read_json(path, faults) or {})


def read_error(record: object) -> dict[str, Any]:
    """Return an error record with only the values that workers write; {} if `record` is no mapping."""
    if not isinstance(record, Mapping):
        return {}
    error = dict(record)
    for key, convert in _FAILURE.items():
        if key in error:
            with contextlib.suppress(ValueError):
                error[key] = convert(error[key])
                continue
            del error[key]
    if not isinstance(error.get("memory", {}), dict):
        del error["memory"]
    return error


def first_line(error: Mapping[str, Any]) -> str:
    """Return the first line of a recorded error's message, after the error that a program printed (`said`)."""
    message = str(error.get("message") or "").strip().partition("\n")[0]
    said = error.get("said")
    return f"{said} ({message})" if isinstance(said, str) and said else message


def own_frame(text: str, trust: Iterable[str] = ()) -> str | None:
    """Return the innermost frame of the user's own code in a traceback's text; None if there is none.

    An example: `train.py:7 in loss: raise ValueError(x)`. Code is the user's own if it is neither hpc_trainer's nor
    installed, or if it is trusted.

    Args:
        text: the text of a traceback.
        trust: names of trusted modules.
    """
    files = {name: str(getattr(sys.modules.get(name), "__file__", None) or "") for name in trust}
    trusted = [os.path.join(os.path.dirname(file), "") for file in files.values() if file]  # noqa: PTH118, PTH120
    frames = [frame for frame in _FRAME.finditer(text) if _is_own(frame[1], trusted)]
    if not frames:
        return None
    file, line, function, code = frames[-1].groups()
    where = f"{_short_path(file)}:{line}" + (f" in {function}" if function else "")
    return f"{where}: {code.strip()[:_MAX_CODE]}" if code else where


def _is_own(file: str, trusted: Iterable[str]) -> bool:
    if file.startswith(tuple(trusted)):
        return True
    return _INSTALLED.search(file) is None and not file.startswith(os.path.join(_OURS, ""))  # noqa: PTH118


def _short_path(file: str) -> str:
    """Return the path without the `sys.path` folder of its import, which for frozen code is a copy of the user's."""
    places = [os.path.join(place, "") for place in sys.path if place and file.startswith(os.path.join(place, ""))]  # noqa: PTH118
    return file[len(max(places, key=len, default="")) :]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstWeights:
    """Weights that `init_from` loaded, and those that it did not. Names are the model's, except in `unused`."""

    path: str
    digest: str
    loaded: Mapping[str, str] = field(default_factory=dict)
    """Name in the model -> name in the file."""
    converted: Sequence[str] = ()
    """Names in `loaded` whose number format in the file differs."""
    begin_anew: Sequence[str] = ()
    """Names that `init_from.include` and `exclude` leave out."""
    unused: Sequence[str] = ()
    """Names in the file that the model does not have, or that were left out."""

    def line(self) -> str:
        """Return the sentence for the log, `show` and `why`."""
        parts = [f"{len(self.loaded)} weights and buffers are from {self.path}"]
        if self.converted:
            parts.append(f"{len(self.converted)} of them in another number format")
        if self.begin_anew:
            parts.append(f"{listed(self.begin_anew)} began anew")
        if self.unused:
            parts.append(f"not used: {listed(self.unused)}")
        return f"init_from: {'; '.join(parts)}."


def write_first_weights(paths: RunPaths, first_weights: FirstWeights) -> None:
    """Write the file; raise OSError if the file system refused."""
    write_json(paths.first_weights, asdict(first_weights))


def read_first_weights(paths: RunPaths, faults: Faults | None = None) -> FirstWeights | None:
    """Return the record of a run; None if it started without `init_from`, has none yet, or the file is unreadable."""
    reported = Faults() if faults is None else faults
    return parsed_file(
        paths.first_weights, lambda record: FirstWeights(**typed(record, _NEEDED_FIELDS, _OTHER_FIELDS)), reported
    )


def _as_names(value: object) -> dict[str, str]:
    return {name: as_text(there) for name, there in as_table(value).items()}


_as_list = tuple_of(as_text)
_NEEDED_FIELDS = {"path": as_text, "digest": as_text}
_OTHER_FIELDS = {"loaded": _as_names, "converted": _as_list, "begin_anew": _as_list, "unused": _as_list}
OVERHEATED, DEVICE_FAILED = "overheated", "device_failed"
MOVE_CAUSES = frozenset((OVERHEATED, DEVICE_FAILED))
"""Causes of attempts that ended so that the run leaves a node."""
MAX_MOVES = 3
"""Largest number of moves since a user submitted the run: if four nodes in a row fail, the nodes are not the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Move of a run away from one node, which one attempt asked for."""

    node: str
    """Slurm's name of the node that the run must not get again."""
    cause: str
    """Cause of the attempt's end, from `MOVE_CAUSES`."""
    why: str
    """Line for the user, such as `the GPU of rank 3 on n7 lowers its clocks (..)`."""
    time: float
    """Time of the request, in seconds since the epoch."""

    @property
    def text(self) -> str:
        """Line for the user: the cause, the node and the reason."""
        return f"{self.cause}, it leaves {self.node}: {self.why}"


def write_move(paths: RunPaths, attempt: int, move: Move) -> None:
    """Replace the file; raise OSError if the file system refused."""
    write_json(paths.move(attempt), asdict(move), sync=False)


def read_move(paths: RunPaths, attempt: int, faults: Faults | None = None) -> Move | None:
    """Return the move of an attempt; None if there is none, or it cannot be read."""
    return parsed_file(paths.move(attempt), lambda record: Move(**typed(record, _MOVE)), faults)


_MOVE: Kinds = {"node": as_text, "cause": as_text, "why": as_text, "time": as_time}
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
    per_gpu: int = 1
    """Number of runs that shared the attempt's GPU, this one included."""
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
        self, attempt: int, *, job_id: str, restart_count: int, node: str, pid: int, executor: str, world_size: int,
        per_gpu: int = 1,
    ) -> None:  # fmt: skip
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
            **({"per_gpu": per_gpu} if per_gpu > 1 else {}),
        )
        path = self._paths.journal(attempt)
        if claim(path, f"{seal(to_json(record))}\n".encode()):
            fsync_folder(path.parent)
        else:
            append_lines(path, [record], sealed=True)

    def resume(self, attempt: int, step: int, changes: Sequence[str] = ()) -> None:
        """Record that training resumes at `step` (0: the beginning), and the `changes` since the checkpoint."""
        self._append("resume", attempt, step=step, **({"changes": list(changes)} if changes else {}))

    def fit(self, attempt: int, sizes: Mapping[str, Any]) -> None:
        """Record the size that `train.micro_batch_size=auto` has chosen; `fits` returns `sizes` again."""
        self._append("fit", attempt, found=dict(sizes))

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
        values = typed({"process": "", "per_gpu": 1, **record}, _START)
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
        raise ValueError(f"it belongs to attempt {number}, whose start no line records")
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


def _as_number_of_runs(value: object) -> int:
    return max(1, as_count(value))


_START = {
    "job_id": as_text, "restart_count": as_count, "node": as_text, "pid": as_count, "time": as_time,
    "executor": as_text, "process": as_text, "per_gpu": _as_number_of_runs,
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
        if not _is_of_one_job(attempt, chain[0]) and not follows:
            break
        chain.insert(0, attempt)
    return chain


def _is_of_one_job(attempt: Attempt, later: Attempt) -> bool:
    """Return True if Slurm or the slots of one pool restarted the run; the pool's slots are one array."""
    if {attempt.executor, later.executor} == {POOL}:
        return array_of(attempt.job_id) == array_of(later.job_id)
    return attempt.job_id == later.job_id


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
    newest = attempts[-1] if attempts else None
    if newest is not None and newest.executor == POOL:
        # Its starts are the turns in all slots of its pool; those in earlier pools are no starts of this job.
        of_pool = {attempt.restart_count: attempt for attempt in attempts if _is_of_one_job(attempt, newest)}
        first = min(of_pool)
        starts = {count - first: attempt for count, attempt in of_pool.items()}
        restart_count -= first
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
