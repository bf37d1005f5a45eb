"""The goodput ledger: every second that Slurm gave a run, in exactly one class, summing to Slurm's Elapsed.

ledger.jsonl has the seconds that each attempt spent, by kind. allocations.json keeps for how long Slurm gave the run's
jobs their nodes, because accounting forgets jobs. The ledger joins both; verbs print it in words and as JSON
(docs/json.md).
"""

from __future__ import annotations

import contextlib
import enum
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from hpc_trainer.errors import HpcTrainerError
from hpc_trainer.record.files import append_lines, write_json
from hpc_trainer.record.journal import Attempt, newest_chain, read_failure, successor_jobs
from hpc_trainer.record.layout import HEARTBEAT, RunPaths
from hpc_trainer.record.reading import Faults, as_count, as_table, as_text, as_time, parsed_file, parsed_lines, typed
from hpc_trainer.record.states import TIMEOUT, RunState
from hpc_trainer.record.trust import check_trusted
from hpc_trainer.slurm.queue import Allocation


class Kind(str, enum.Enum):
    """Category of an allocated second; exactly one applies."""

    start_up = "start_up"
    """From the allocation to the first step, except for the kinds below."""
    imports = "imports"
    rendezvous = "rendezvous"
    compile = "compile"
    restore = "restore"
    data_wait = "data_wait"
    step = "step"
    """Also the time that a user's own loop takes between the calls of its RunContext."""
    evaluation = "evaluation"
    save_stall = "save_stall"
    """Training stopped for a checkpoint."""
    redone = "redone"
    """Steps that had to be repeated. Known only afterwards (record/ledger.py); no span is of this kind."""
    hang = "hang"
    shutdown = "shutdown"
    program = "program"
    """A program of `train.command` was running."""


Seconds = Mapping[str, float]
"""Seconds by the name of their `Kind`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Seconds that rank 0 of one attempt had spent up to `time`, and its progress."""

    attempt: int
    time: float
    step: int
    steps_done: int
    """Optimizer steps that this attempt did, including steps that a rollback undid."""
    seconds: Seconds
    is_last: bool = False
    """True if the attempt was about to end."""
    allocated_time: float | None = None
    """Start of the job's script, in seconds since the epoch; None if neither Slurm nor the script says."""

    @property
    def begin_time(self) -> float:
        """Start of rank 0's process, in seconds since the epoch."""
        return self.time - sum(self.seconds.values())


def spent_so_far(
    seconds: Iterable[tuple[str, float]], *, steps_done: int, allocated_time: float | None = None
) -> dict[str, Any]:
    """Return the part of a heartbeat that records spent time; kinds without a millisecond are left out."""
    rounded = {str(getattr(kind, "value", kind)): round(spent_s, 3) for kind, spent_s in seconds}
    record = {"steps_done": steps_done, "seconds": {kind: spent_s for kind, spent_s in rounded.items() if spent_s > 0}}
    return record if allocated_time is None else {**record, "allocated_time": allocated_time}


def append_spent(paths: RunPaths, attempt: int, step: int, seconds: Mapping[str, Any]) -> None:
    """Append the last line of an attempt, with `seconds` from `spent_so_far`; errors of the file system are ignored."""
    _append(paths, {"attempt": attempt, "time": time.time(), "step": step, "is_last": True, **seconds})


def keep_spent(paths: RunPaths, attempt: int) -> None:
    """Append the heartbeat's figures if no line has them, before a new attempt replaces the heartbeat.

    Args:
        paths: paths of the run.
        attempt: the new attempt; only figures of earlier attempts are appended.
    """
    beat = _of_heartbeat(paths, Faults())
    if beat is not None and beat.attempt < attempt and beat.attempt not in _read_lines(paths, Faults()):
        record = spent_so_far(beat.seconds.items(), steps_done=beat.steps_done, allocated_time=beat.allocated_time)
        line = {"attempt": beat.attempt, "time": beat.time, "step": beat.step, "is_last": False}
        _append(paths, {**line, **record})


def read_spent(paths: RunPaths, faults: Faults | None = None) -> dict[int, Spent]:
    """Return attempt -> time spent, from ledger.jsonl, and from heartbeat.json for the newest; skip damaged lines."""
    spent, beat = _read_lines(paths, faults), _of_heartbeat(paths, faults)
    if beat is not None:
        spent.setdefault(beat.attempt, beat)
    return spent


def _read_lines(paths: RunPaths, faults: Faults | None) -> dict[int, Spent]:
    return {spent.attempt: spent for spent in parsed_lines(paths.ledger, _parse_spent, faults)}


def _parse_spent(record: Mapping[str, Any]) -> Spent:
    if record.get("event") != "spent":
        raise ValueError(f"event {str(record.get('event'))[:20]!r} is of a newer version")
    return _spent(record)


def _of_heartbeat(paths: RunPaths, faults: Faults | None) -> Spent | None:
    return parsed_file(paths.at(HEARTBEAT), _of_beat, faults)


def _of_beat(beat: Mapping[str, Any]) -> Spent | None:
    spent = beat.get("spent")
    return _spent({**beat, **spent}) if isinstance(spent, dict) and spent else None


def _spent(record: Mapping[str, Any]) -> Spent:
    return Spent(**typed(record, _SPENT, {"allocated_time": as_time}), is_last=record.get("is_last") is True)


def _append(paths: RunPaths, line: Mapping[str, Any]) -> None:
    """Append a line, unless the disk is full or something else is in the file's place."""
    with contextlib.suppress(OSError, HpcTrainerError):
        if os.path.lexists(paths.ledger):
            check_trusted(paths.ledger)  # otherwise our line would make another user's file look like ours
        append_lines(paths.ledger, [{"event": "spent", **line}], sync=False, sealed=True)


def _as_seconds(value: object) -> dict[str, float]:
    return {kind: as_time(seconds) for kind, seconds in as_table(value).items()}


_SPENT = {"attempt": as_count, "time": as_time, "step": as_count, "steps_done": as_count, "seconds": _as_seconds}


def read_allocations(paths: RunPaths, faults: Faults | None = None) -> list[Allocation]:
    """Return the recorded allocations; [] if there is no file or, with a fault, if it is damaged."""
    return parsed_file(paths.allocations, _parse_allocations, faults) or []


def _parse_allocations(record: Mapping[str, Any]) -> list[Allocation]:
    items = record["allocations"]
    if not isinstance(items, list):
        raise ValueError("allocations is not a list")
    return [Allocation(**typed(as_table(item), _ALLOCATION)) for item in items]


def keep_allocations(paths: RunPaths, allocations: Sequence[Allocation]) -> None:
    """Add allocations that the file does not have. Never raises: a full disk or another's run must not matter."""
    faults = Faults()
    recorded = {allocation.key: allocation for allocation in read_allocations(paths, faults)}
    with contextlib.suppress(OSError, HpcTrainerError):
        if faults.refusal is not None or recorded.keys() >= {allocation.key for allocation in allocations}:
            return
        if paths.folder.stat().st_uid == os.getuid():
            check_trusted(paths.folder)
            if os.path.lexists(paths.allocations):
                check_trusted(paths.allocations)  # otherwise another user's file would look like ours
            merged = recorded | {allocation.key: allocation for allocation in allocations}
            write_json(
                paths.allocations, {"allocations": [asdict(allocation) for allocation in merged.values()]}, sync=False
            )


_ALLOCATION = {"job_id": as_text, "start_time": as_time, "end_time": as_time, "elapsed_s": as_time, "state": as_text}


_SILENT_S = 60.0
# Clocks of nodes and of the controller differ, and the journal records a start some seconds after Slurm.
_CLOCKS_S = 60.0
_WORK = (Kind.step, Kind.data_wait, Kind.program)
TRAINS = (Kind.step, Kind.program)
"""Kinds of time that count as training, if the steps lasted."""
_ASKED_FOR = (*TRAINS, Kind.data_wait, Kind.evaluation)
STARTS = (Kind.start_up, Kind.imports, Kind.rendezvous, Kind.compile, Kind.restore)
"""Kinds of time that an attempt spends before its first step."""
_FEWEST_TIMEOUTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptLedger:
    """Seconds of one allocation. `attempt` is None if no rank 0 recorded an attempt in it."""

    attempt: int | None
    job_id: str
    seconds: Mapping[Kind, float]
    elapsed_s: float
    is_by_slurm: bool
    """True if `elapsed_s` comes from the accounting; else it comes from the run's own files."""
    unknown_s: float = 0.0
    """Seconds of unknown use, because the attempt's line is lost."""
    per_gpu: int = 1
    """Number of runs that shared the attempt's GPU."""


@dataclass(frozen=True, kw_only=True)
class RunLedger:
    """Ledgers of all attempts of a run so far. `num_gpus` is the number of GPUs in the run's shape."""

    attempts: Sequence[AttemptLedger]
    num_gpus: int

    @cached_property
    def seconds(self) -> Mapping[Kind, float]:
        """Seconds of each kind that occurred, summed over all attempts."""
        sums = {kind: math.fsum(attempt.seconds.get(kind, 0.0) for attempt in self.attempts) for kind in Kind}
        return {kind: seconds for kind, seconds in sums.items() if seconds > 0}

    @property
    def elapsed_s(self) -> float:
        """Seconds for which nodes were allocated."""
        return math.fsum(attempt.elapsed_s for attempt in self.attempts)

    @property
    def unknown_s(self) -> float:
        """Seconds of unknown use."""
        return math.fsum(attempt.unknown_s for attempt in self.attempts)

    @property
    def goodput(self) -> float | None:
        """Share of the time that went to steps whose result was kept, 0 to 1; None if there is no time."""
        if self.elapsed_s <= 0:
            return None
        return math.fsum(self.seconds.get(kind, 0.0) for kind in TRAINS) / self.elapsed_s

    @property
    def gpu_seconds(self) -> float:
        """GPU-seconds that the run held; of a GPU that it shared with other runs, its share."""
        return self.num_gpus * math.fsum(attempt.elapsed_s / attempt.per_gpu for attempt in self.attempts)

    @property
    def is_by_slurm(self) -> bool:
        """True if the accounting said how long each attempt held its nodes."""
        return all(attempt.is_by_slurm for attempt in self.attempts)


def ledger_of(
    paths: RunPaths, attempts: Sequence[Attempt], *, num_gpus: int, allocations: Iterable[Allocation] = (),
    faults: Faults | None = None,
) -> RunLedger | None:  # fmt: skip
    """Return the ledger of a run; None if no attempt recorded its time, as in older versions.

    Args:
        paths: paths of the run.
        attempts: the attempts of its journal.
        num_gpus: GPUs of its shape, on all nodes together.
        allocations: new answers of the accounting about its jobs, in addition to the recorded ones.
        faults: gets a fault for each unreadable file or line.
    """
    spent_by_attempt = read_spent(paths, faults)
    if not spent_by_attempt:
        return None
    jobs = {attempt.job_id for attempt in attempts}
    by_key = {entry.key: entry for entry in (*read_allocations(paths, faults), *allocations) if entry.job_id in jobs}
    matched = match(attempts, list(by_key.values()))
    ledgers = []
    for index, attempt in enumerate(attempts):
        spent, allocation = spent_by_attempt.get(attempt.attempt), matched.get(attempt.attempt)
        later = [newer.resumed_step for newer in attempts[index + 1 :] if newer.resumed_step is not None]
        stuck = attempt.cause == "stuck" or read_failure(paths.failure(attempt.attempt)).get("type") == "StuckError"
        ledgers.append(_attempt(attempt, spent, allocation, lasting=min(later, default=None), is_stuck=stuck))
    used = {allocation.key for allocation in matched.values()}
    ledgers += [_untold(entry) for key, entry in by_key.items() if key not in used and _is_of_run(entry, attempts)]
    return RunLedger(attempts=ledgers, num_gpus=num_gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOut:
    """Sums over the newest attempts of a run that its time limit ended."""

    count: int
    elapsed_s: float
    training_s: float
    """Seconds of steps that were not lost, their waits for data, and evaluations."""

    @property
    def share(self) -> float:
        """Share of the allocated time that was training, 0 to 1."""
        return self.training_s / self.elapsed_s

    @property
    def other_s(self) -> float:
        """Mean seconds of an attempt that were not training: starts, saves, repeated steps."""
        return (self.elapsed_s - self.training_s) / self.count


def most_timeouts(max_no_progress: int) -> int:
    """Return the number of attempts that are judged together against `cluster.min_goodput`."""
    return max(_FEWEST_TIMEOUTS, max_no_progress)


def newest_timeouts(
    paths: RunPaths, attempts: list[Attempt], most: int, *, least: int = 1, faults: Faults | None = None
) -> TimedOut | None:
    """Sum up the newest `most` attempts that the time limit ended since a user last submitted the run.

    Attempts that ended for another reason, such as a preemption, are skipped: without the interruption they might have
    trained.

    Returns:
        None if there are fewer than `least` such attempts, or the ledger of one of them is incomplete.
    """
    if sum(attempt.cause == TIMEOUT for attempt in attempts) < least:
        return None  # the usual case, in which the files below need not be read
    try:
        successors = successor_jobs(paths)
    except (OSError, HpcTrainerError) as error:
        if faults is None:
            raise
        faults.append(str(error))
        return None
    chain = newest_chain(attempts, successors)
    ended = [attempt.attempt for attempt in chain if attempt.cause == TIMEOUT][-most:]
    ledger = ledger_of(paths, attempts, num_gpus=0, faults=faults) if len(ended) >= max(1, least) else None
    complete = {} if ledger is None else {item.attempt: item for item in ledger.attempts if not item.unknown_s}
    timed_out = [complete[number] for number in ended if number in complete]
    elapsed_s = math.fsum(item.elapsed_s for item in timed_out)
    if len(timed_out) < len(ended) or elapsed_s <= 0:
        return None
    trained_s = math.fsum(item.seconds.get(kind, 0.0) for item in timed_out for kind in _ASKED_FOR)
    return TimedOut(count=len(timed_out), elapsed_s=elapsed_s, training_s=trained_s)


def match(attempts: Sequence[Attempt], allocations: Sequence[Allocation]) -> dict[int, Allocation]:
    """Return attempt -> its allocation: its job's newest one that began before the attempt; none is used twice."""
    matched: dict[int, Allocation] = {}
    free = sorted(allocations, key=lambda allocation: allocation.start_time)
    for attempt in sorted(attempts, key=lambda attempt: attempt.start_time):
        began = [
            allocation
            for allocation in free
            if allocation.job_id == attempt.job_id
            and allocation.start_time - _CLOCKS_S <= attempt.start_time <= allocation.end_time + _CLOCKS_S
        ]
        # The margin may fit two allocations, if a job came back within a minute. Take the newest before, else the next.
        before = [allocation for allocation in began if allocation.start_time <= attempt.start_time]
        best = before[-1] if before else began[0] if began else None
        if best is not None:
            matched[attempt.attempt] = best
            free.remove(best)
    return matched


def _is_of_run(allocation: Allocation, attempts: Sequence[Attempt]) -> bool:
    """Return True if an allocation without a journal line began within a day of an attempt, as no reused id does."""
    same = [attempt.start_time for attempt in attempts if attempt.job_id == allocation.job_id]
    return min(same) - 86_400 < allocation.start_time < max(same) + 86_400


def _untold(allocation: Allocation) -> AttemptLedger:
    seconds = {Kind.start_up: allocation.elapsed_s}
    return AttemptLedger(
        attempt=None, job_id=allocation.job_id, seconds=seconds, elapsed_s=allocation.elapsed_s, is_by_slurm=True
    )


def _attempt(
    attempt: Attempt, spent: Spent | None, allocation: Allocation | None, *, lasting: int | None, is_stuck: bool
) -> AttemptLedger:
    if spent is None:
        return _without_line(attempt, allocation)
    seconds = _seconds_by_kind(spent.seconds)
    measured_s = math.fsum(seconds.values())
    if allocation is not None:
        elapsed_s = allocation.elapsed_s
        if measured_s > elapsed_s:
            # sacct counts whole seconds, and leaves out those in which the job was suspended: scale all kinds down.
            seconds = {kind: kind_s * elapsed_s / measured_s for kind, kind_s in seconds.items()}
            measured_s = elapsed_s
        before_s = min(max(0.0, spent.begin_time - allocation.start_time), elapsed_s - measured_s)
    else:
        begin_time = min(spent.begin_time, spent.allocated_time or spent.begin_time)
        end_time = max(spent.time, attempt.end_time or spent.time)
        before_s, elapsed_s = spent.begin_time - begin_time, end_time - begin_time
    _add(seconds, Kind.start_up, before_s)
    lost_s = _redo(seconds, attempt, spent, lasting)
    after_s = max(0.0, elapsed_s - measured_s - before_s)
    _add(seconds, _kind_after(attempt, spent, after_s, is_stuck=is_stuck), after_s)
    _add(seconds, Kind.redone, lost_s)
    return AttemptLedger(
        attempt=attempt.attempt, job_id=attempt.job_id, seconds=seconds, elapsed_s=elapsed_s,
        is_by_slurm=allocation is not None, per_gpu=attempt.per_gpu,
    )  # fmt: skip


def _without_line(attempt: Attempt, allocation: Allocation | None) -> AttemptLedger:
    """Return the ledger of an attempt that recorded no time: it gave no sign of life, or its line is lost."""
    elapsed_s = max(0.0, (attempt.end_time or attempt.start_time) - attempt.start_time)
    elapsed_s = elapsed_s if allocation is None else allocation.elapsed_s
    never_began = attempt.resumed_step is None
    return AttemptLedger(
        attempt=attempt.attempt, job_id=attempt.job_id, elapsed_s=elapsed_s, is_by_slurm=allocation is not None,
        seconds={Kind.start_up: elapsed_s} if never_began and elapsed_s else {},
        unknown_s=0.0 if never_began else elapsed_s, per_gpu=attempt.per_gpu,
    )  # fmt: skip


def _kind_after(attempt: Attempt, spent: Spent, after_s: float, *, is_stuck: bool) -> Kind:
    """Return the kind of the seconds after the last sign of life that an attempt recorded."""
    if spent.is_last or (attempt.has_ended and not is_stuck):
        return Kind.shutdown
    work_s = math.fsum(spent.seconds.get(kind.value, 0.0) for kind in _WORK)
    step_s = work_s / spent.steps_done if spent.steps_done else 0.0
    if is_stuck or after_s > _SILENT_S + 3 * step_s:
        return Kind.hang
    return Kind.redone if work_s else Kind.start_up


def _redo(seconds: dict[Kind, float], attempt: Attempt, spent: Spent, lasting: int | None) -> float:
    """Remove steps that were done again, and their data wait, from `seconds`; return how many seconds were removed.

    Args:
        seconds: kind -> seconds of the attempt; changed in place.
        attempt: the attempt.
        spent: what the attempt recorded.
        lasting: the earliest step at which a later attempt resumed; None if none resumed.
    """
    lost = sum(_steps_back(rollback) for rollback in attempt.guarded if rollback["action"] == "rollback")
    if lasting is None and attempt.has_ended and attempt.state is not RunState.COMPLETED:
        lasting = attempt.saved_step
    if lasting is not None:
        lost += max(0, spent.step - lasting)
    share = min(1.0, lost / spent.steps_done) if spent.steps_done else 0.0
    taken = {kind: share * seconds.get(kind, 0.0) for kind in _WORK}
    for kind, taken_s in taken.items():
        if taken_s:
            seconds[kind] -= taken_s
    return math.fsum(taken.values())


def _steps_back(rollback: Mapping[str, Any]) -> int:
    to = rollback.get("to")
    return max(0, rollback["step"] - to) if isinstance(to, int) and to >= 0 else 0


def _seconds_by_kind(spent: Mapping[str, float]) -> dict[Kind, float]:
    """Return seconds by kind; a kind that only a newer version knows counts as part of a step."""
    kinds, seconds = {kind.value: kind for kind in Kind}, dict[Kind, float]()
    for word, more_s in spent.items():
        _add(seconds, kinds.get(word, Kind.step), more_s)
    return seconds


def _add(seconds: dict[Kind, float], kind: Kind, more_s: float) -> None:
    if more_s > 0:
        seconds[kind] = seconds.get(kind, 0.0) + more_s


WORDS = {
    Kind.step: "steps", Kind.program: "program", Kind.data_wait: "data wait", Kind.redone: "redone steps",
    Kind.compile: "compilation", Kind.evaluation: "evaluation", Kind.save_stall: "waiting for saves",
    Kind.start_up: "start-up", Kind.imports: "imports", Kind.rendezvous: "rendezvous", Kind.restore: "restore",
    Kind.hang: "hang", Kind.shutdown: "shutdown",
}  # fmt: skip
"""Kind of time -> its text, in the order in which the kinds are shown."""


def ledger_line(ledger: RunLedger) -> str | None:
    """Return the shares of a ledger's time, largest first; None if it has no time.

    An example: `of 3 h 12 min: 81 % steps, 9 % data wait, 6 % redone steps`. Shares under half a percent are left out.
    """
    if ledger.elapsed_s <= 0:
        return None
    shares = [(WORDS[kind], seconds / ledger.elapsed_s) for kind, seconds in ledger.seconds.items()]
    shares.append(("unknown", ledger.unknown_s / ledger.elapsed_s))
    shares.sort(key=lambda share: -share[1])
    parts = [f"{share:.0%}".replace("%", " %") + f" {word}" for word, share in shares if share >= 0.005]
    return f"of {duration(ledger.elapsed_s)}: {', '.join(parts)}"


def timed_out_words(timed_out: TimedOut, time_limit_min: int) -> str:
    """Return a clause with the number of attempts that the time limit ended, and the training share of their time."""
    share = f"{timed_out.share:.1%}".replace("%", " %")
    return (
        f"the time limit of {time_limit_min} min ended its last {timed_out.count} attempts, and {share} of their "
        f"{duration(timed_out.elapsed_s)} was training"
    )


def duration(seconds: float) -> str:
    """Return a duration as text: `3 h 12 min`, `3 min 20 s` or `12 s`."""
    minutes, secs = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {secs} s" if minutes else f"{secs} s"


def ledger_json(ledger: RunLedger) -> dict[str, Any]:
    """Return the stable JSON form of a run's ledger."""
    return {
        **_part(ledger), "goodput": None if ledger.goodput is None else round(ledger.goodput, 4),
        "gpu_s": round(ledger.gpu_seconds, 3),
        "attempts": [{"attempt": item.attempt, "job_id": item.job_id, **_part(item)} for item in ledger.attempts],
    }  # fmt: skip


def _part(ledger: RunLedger | AttemptLedger) -> dict[str, Any]:
    return {
        "elapsed_s": round(ledger.elapsed_s, 3),
        "is_by_slurm": ledger.is_by_slurm,
        "seconds": {kind.value: round(ledger.seconds[kind], 3) for kind in WORDS if kind in ledger.seconds},
        "unknown_s": round(ledger.unknown_s, 3),
    }
