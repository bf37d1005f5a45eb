"""attempts.jsonl: the story of a run, told by rank 0 while it happens. Causes are recorded, never inferred."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpc_trainer.errors import ExitCode
from hpc_trainer.runs.files import append_lines, read_json, read_lines
from hpc_trainer.runs.layout import RunPaths
from hpc_trainer.runs.local_process import process_name
from hpc_trainer.runs.states import RunState
from hpc_trainer.runs.submissions import SUCCESSOR, read_ledger


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One start of a run, from its records. Fields are None until the record is there."""

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
        """True if the attempt told how it ended."""
        return self.end_time is not None


class Journal:
    """Reads and appends one run's attempts.jsonl. Only rank 0 of the living attempt appends."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths

    def read(self) -> list[Attempt]:
        """Every attempt in order; records of another form are passed over."""
        attempts: dict[int, Attempt] = {}
        for record in read_lines(self._paths.attempts):
            with contextlib.suppress(KeyError, TypeError, ValueError):
                _apply(attempts, record)
        return [attempts[number] for number in sorted(attempts)]

    def attempt_number(self, job_id: str, restart_count: int) -> int:
        """The number of this attempt, the same on every rank whether or not rank 0 has recorded it yet."""
        attempts = self.read()
        for attempt in attempts:
            if (attempt.job_id, attempt.restart_count) == (job_id, restart_count):
                return attempt.attempt
        return len(attempts)

    def start(
        self, attempt: int, *, job_id: str, restart_count: int, node: str, pid: int, executor: str, world_size: int
    ) -> None:
        """Rank 0 is alive."""
        self._append(
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

    def resume(self, attempt: int, step: int, changes: Sequence[str] = ()) -> None:
        """Training goes on from `step` (0: from the beginning), although `changes` differ from the checkpoint."""
        self._append("resume", attempt, step=step, **({"changes": list(changes)} if changes else {}))

    def fit(self, attempt: int, found: Mapping[str, Any]) -> None:
        """`train.micro_batch_size=auto` has found a size; `found` is one of what `fits` returns."""
        self._append("fit", attempt, found=dict(found))

    def fits(self) -> list[tuple[int, dict[str, Any]]]:
        """(attempt, what it found) of every search for a micro-batch, in order."""
        return [
            (int(record["attempt"]), record["found"])
            for record in read_lines(self._paths.attempts)
            if record.get("event") == "fit" and isinstance(record.get("found"), dict)
        ]

    def guard(self, attempt: int, *, action: str, step: int, **fields: Any) -> None:
        """Spikes up to `step` were skipped (`action` skip: `count`), or training went back `to` a step (rollback)."""
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
        """How the attempt ended; written before rank 0 requeues or leaves."""
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
        append_lines(self._paths.attempts, [{"event": event, "attempt": attempt, "time": time.time(), **fields}])


def _apply(attempts: dict[int, Attempt], record: dict[str, Any]) -> None:
    number, event = int(record["attempt"]), record["event"]
    if event == "start":
        keys = ("job_id", "restart_count", "node", "pid", "executor")
        start = {key: record[key] for key in keys} | {"process": str(record.get("process", ""))}
        attempts[number] = Attempt(attempt=number, start_time=float(record["time"]), **start)
    elif event == "resume":
        attempts[number].resumed_step = int(record["step"])
    elif event == "guard":
        attempts[number].guarded.append({**record, "action": str(record["action"]), "step": int(record["step"])})
    elif event == "end":
        _apply_end(attempts[number], record)


def _apply_end(attempt: Attempt, record: dict[str, Any]) -> None:
    attempt.state, attempt.end_time = RunState(record["state"]), float(record["time"])
    for key in ("cause", "step", "saved_step", "action", "signal"):
        setattr(attempt, key, record.get(key))
    attempt.error = record.get("error") or {}


def newest_chain(attempts: list[Attempt], successors: Collection[str]) -> list[Attempt]:
    """The attempts since a person last submitted the run: one job id, or jobs that succeeded each other.

    Args:
        successors: `successor_jobs` of the run. The journal alone does not tell: after an error another rank than the
            one that writes it may have asked for the successor.
    """
    chain = attempts[-1:]
    for attempt in reversed(attempts[:-1]):
        follows = attempt.action == SUCCESSOR or chain[0].job_id in successors
        if attempt.job_id != chain[0].job_id and not follows:
            break
        chain.insert(0, attempt)
    return chain


def successor_jobs(paths: RunPaths) -> frozenset[str]:
    """Ids of the jobs that attempts of this run submitted to go on with it."""
    return frozenset(each.job_id for each in read_ledger(paths).submissions if each.job_id is not None)


def restarts_without_progress(attempts: list[Attempt], successors: Collection[str]) -> int:
    """How often in a row the run started at the same step as the start before it, since a person submitted it."""
    chain = newest_chain(attempts, successors)
    if not chain or chain[-1].resumed_step is None:
        return 0
    newest, count = chain[-1], 0
    for attempt in reversed(chain[:-1]):
        # An attempt that never got as far as resuming made no progress either.
        if attempt.resumed_step not in (newest.resumed_step, None):
            break
        count += 1
    return count


def failures_of_storage(paths: RunPaths) -> int:
    """How often storage or data (exit 74) brought the run down since a person submitted it."""
    chain = newest_chain(Journal(paths).read(), successor_jobs(paths))
    failures = (read_json(paths.failure(each.attempt)) for each in chain)
    return sum((failure or {}).get("exit_code") == ExitCode.STORAGE for failure in failures)
