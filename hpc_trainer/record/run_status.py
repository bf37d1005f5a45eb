"""Status of one run, as every command shows it: from its folder and from the scheduler's answer about its job."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpc_trainer.config.schema.cluster import ClusterConfig
from hpc_trainer.domains import contributions
from hpc_trainer.errors import ExitCode
from hpc_trainer.record.journal import MOVE_CAUSES, Attempt, first_line, read_failure, read_move
from hpc_trainer.record.last_words import words_before_the_worker, words_of_death
from hpc_trainer.record.ledger import most_timeouts, newest_timeouts, timed_out_words
from hpc_trainer.record.metrics import SPEED
from hpc_trainer.record.reading import Faults, FaultsOf, is_number
from hpc_trainer.record.run_folder import RunFolder
from hpc_trainer.record.run_state import ended_before_it_began
from hpc_trainer.record.slurm_answers import SchedulerView
from hpc_trainer.record.spec import RunSpec
from hpc_trainer.record.states import KILLED, NOT_FINITE, OUT_OF_MEMORY, End, RunState
from hpc_trainer.record.submissions import Submission
from hpc_trainer.record.turns import Turn, pool_job
from hpc_trainer.slurm.queue import QueueEntry
from hpc_trainer.slurm.terms import NOT_BEGUN, explain_reason


@dataclass(slots=True, kw_only=True)  # not frozen: 10,000 instances would take 45 ms more
class RunStatus:
    """Status of one run, as `status` shows it. `step` is the newest known step, `age_s` the age of that knowledge."""

    spec: RunSpec
    state: RunState
    step: int
    attempts: list[Attempt]
    job_id: str | None
    cause: str | None
    node: str | None
    metrics: Mapping[str, Any]
    steps_per_s: float | None
    eta_s: float | None
    age_s: float | None
    num_steps: int
    """Steps of the whole run; 0 if the number is not known."""
    speed: Mapping[str, float] = field(default_factory=dict)
    """The newest values of `record.metrics.SPEED`, for a run that works or is complete."""
    remarks: Sequence[str] = ()
    """Remarks of the running attempt for the user, such as a rank that delays the others."""
    failure: Mapping[str, Any] = field(default_factory=dict)
    stop_s: float | None = None
    """Seconds that the run needs to stop: a step and a save, each by its slowest 1 %, as the run measured them."""
    submission: Submission | None = None
    """The newest submission: an array of the sweep, or a successor job."""
    waits_in_sweep: bool = False
    """True if the run is PENDING in the sweep's own queue, so that no scheduler has it yet."""
    own_job: str | None = None
    """Id of the run's Slurm job, if the job is certainly its own. Only then may it be signalled or waited for."""
    waiting_job: str | None = None
    """Id of the run's Slurm job, if the queue shows that the job has not begun."""
    rivals: Sequence[tuple[Submission, str]] = ()
    """The run's jobs on other hardware that are in the queue (`hardware=first:a,b`), each with its submission."""
    is_claimed: bool = False
    """True if one of several jobs has started the run, so that `rivals` are not needed any more."""
    elsewhere: str | None = None
    """Reason why the run's job may be on another cluster, as words after "it was" (`SchedulerView.elsewhere`)."""
    device_warning: str | None = None
    """Problem of a running run that a domain found, such as a GPU that is too hot or fails.

    For a run that waits to restart without a node, the reason (`record/journal.py`, `Move`).
    """
    limit_warning: str | None = None
    """Warning that the time limit leaves too little for training, for an active run."""
    pending_reason: str | None = None
    """Slurm's term for the reason why the run's job waits; None if no job of the run waits."""
    waits_for: str | None = None
    """Runs that the run follows and that are not complete, as its newest look saw them; None if it has not looked."""
    turn: Turn | None = None
    """The slot of a pool that has the run; None if no slot has it."""

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.spec.run_id

    @property
    def has_slurm_job(self) -> bool:
        """True if the newest job is a Slurm job; ids of the local queue begin with a host's name."""
        return self.job_id is not None and self.job_id[:1].isdecimal()

    @property
    def progress(self) -> str:
        """Steps as a table shows them: `120/200`, or `120` or `-` if a program has not logged the number of steps."""
        return f"{self.step}/{self.num_steps}" if self.num_steps else str(self.step or "-")

    @property
    def error(self) -> Mapping[str, Any]:
        """The first error that the run recorded: `type`, `message`, `exit_code`, `traceback`, ...; {} if none."""
        return self.failure or (self.attempts[-1].error if self.attempts else {})

    @property
    def reason(self) -> str | None:
        """Reason why the run is not complete, in one line; None if it is not known.

        The reason is the first recorded error, or else the cause and what the job is waiting for.
        """
        if self._failure_text is not None:
            return self._failure_text.splitlines()[0]
        word = self.pending_reason
        waits = None if word is None else f"{word}: {explain_reason(word).says}"
        return "; ".join(part for part in (self.cause, waits) if part is not None) or None

    @property
    def warning(self) -> str | None:
        """Problem of a run that works, waits or is complete: a GPU, the time limit, or metrics that are not finite."""
        if self.device_warning is not None or self.limit_warning is not None:
            return self.device_warning or self.limit_warning
        if self.cause != NOT_FINITE:
            return None
        numbers = ((key, value) for key, value in self.metrics.items() if isinstance(value, float))
        bad = [f"{key}={value}" for key, value in numbers if not math.isfinite(value)]
        return f"complete, but not finite: {', '.join(bad)}"

    @property
    def whole_reason(self) -> str | None:
        """Like `reason`, but with every line for an invalid configuration (exit 78): the last line says what to do."""
        return self._failure_text if self.error.get("exit_code") == ExitCode.CONFIG else self.reason

    @property
    def _failure_text(self) -> str | None:
        kind, message = self.error.get("type"), str(self.error.get("message", "")).strip()
        if not self.state.has_failed or not message:
            return None
        if self.error.get("said"):
            return first_line(self.error)
        return f"{kind}: {message}" if kind else f"{self.cause}: {message}"


def status_of(
    spec: RunSpec, folder: RunFolder, view: SchedulerView, decided: End, refused: str | None, faults: Faults
) -> RunStatus:
    """Return the status of a run, with the state, cause and node of `decided`.

    `refused` is Slurm's message if it refused the run's job.
    """
    state, cause, node = decided
    newest = folder.newest
    failure = _failure_of(spec, folder, state, cause, faults)
    if failure.get("cause") == OUT_OF_MEMORY:  # Slurm, or the queue, saw only an exit code
        state, cause = RunState.OUT_OF_MEMORY, OUT_OF_MEMORY
    if refused is not None and not state.is_active and state is not RunState.COMPLETED:
        state, cause = RunState.FAILED, f"Slurm refused it: {refused}"
    beat = folder.heartbeat
    seen = beat.get("time")
    if newest is not None and (seen is None or beat.get("attempt") != newest.attempt):
        seen = newest.end_time or newest.start_time  # a heartbeat of the previous attempt says nothing about this one
    entry = _waiting_slot(folder, view) if folder.is_in_pool else view.job_of(folder)
    waiting = entry if entry is not None and entry.state in NOT_BEGUN else None
    running = state is RunState.RUNNING and newest is not None and beat.get("attempt") == newest.attempt
    return RunStatus(
        spec=spec,
        state=state,
        # A user's own loop may finish before num_steps.
        step=folder.result.get("step", spec.num_steps) if state is RunState.COMPLETED else _step(folder),
        attempts=folder.attempts,
        job_id=None if folder.waits is not None else _shown_job(folder, state),
        cause=cause,
        node=node or (newest.node if newest else None),
        metrics=folder.result.get("metrics") or beat.get("metrics") or {},
        steps_per_s=beat.get("steps_per_s") if running else None,
        eta_s=beat.get("eta_s") if running else None,
        speed=_speed({**beat, **beat.get("metrics", {})}) if beat and (running or state is RunState.COMPLETED) else {},
        remarks=tuple(beat.get("remarks", {}).values()) if running else (),
        age_s=None if seen is None else max(0.0, time.time() - seen),
        num_steps=spec.num_steps or int(beat.get("num_steps", 0)),
        stop_s=beat["step_s"] + beat["save_s"] if "step_s" in beat and "save_s" in beat else None,
        submission=folder.submission,
        waits_in_sweep=folder.waits is not None and state is RunState.PENDING,
        failure=failure,
        device_warning=_device_warning(folder, newest, state, faults),
        limit_warning=_limit_warning(spec, folder, faults) if state.is_active else None,
        own_job=view.own_job(folder) if state.is_active or state is RunState.CANCELLED else None,
        waiting_job=waiting.job_id if waiting is not None and not folder.is_in_pool else None,
        pending_reason=_pending_reason(waiting, folder, state),
        elsewhere=view.elsewhere(folder) if state.is_active else None,
        rivals=view.rival_jobs(folder) if folder.rivals else (),
        is_claimed=folder.is_claimed,
        waits_for=folder.waits_for if state.is_active else None,
        turn=folder.turn if state.is_active else None,
    )


def _failure_of(
    spec: RunSpec, folder: RunFolder, state: RunState, cause: str | None, faults: Faults
) -> Mapping[str, Any]:
    """Return the first error that a run recorded, or what the output of its job tells; {} if there is none."""
    if not state.has_failed:
        return {}
    newest, own_faults = folder.newest, FaultsOf(spec.run_id, faults)
    failure: Mapping[str, Any] = {}
    if ended_before_it_began(folder, state):
        from hpc_trainer.config.environment import setup_of  # loads all sections of the configuration

        setup, num_of_environment = ((), 0) if spec.is_lost else setup_of(spec.config["cluster"])
        failure = words_before_the_worker(folder, setup, num_of_environment, own_faults)
    elif state is RunState.FAILED and newest is not None:
        # Written by the first rank that failed: rank 0 may have been killed before it could record the failure.
        failure = read_failure(folder.paths.failure(newest.attempt), own_faults)
    if not failure and folder.is_on_slurm and newest is not None and not newest.has_ended:
        return words_of_death(folder, own_faults)
    if cause == KILLED and state is RunState.FAILED and folder.is_on_slurm and not folder.is_in_pool:
        return _with_words_of_slurm(folder, failure, faults)
    return failure


def _with_words_of_slurm(folder: RunFolder, failure: Mapping[str, Any], faults: Faults) -> Mapping[str, Any]:
    """Return the error of a program that was killed; its output ends with that of the job, which may tell by whom."""
    told = failure or (folder.newest.error if folder.newest is not None else {})
    said = [told.get("output", ""), words_of_death(folder, FaultsOf(folder.paths.run_id, faults)).get("output", "")]
    return {**told, "output": "\n".join(text for text in said if text)}


def _pending_reason(waiting: QueueEntry | None, folder: RunFolder, state: RunState) -> str | None:
    """Return Slurm's reason why a job waits; None for a run that a user or a failed run holds: its cause says more."""
    if waiting is None or state not in WAITS:
        return None
    is_ours = state is RunState.HELD and (folder.held is not None or folder.waits_for is not None)
    return None if is_ours else waiting.reason or None


def _shown_job(folder: RunFolder, state: RunState) -> str | None:
    """Return the run's own job or its slot's; for a run that waits in a pool that of all slots."""
    if folder.is_in_pool and folder.job_id is None and state.is_active and folder.submission is not None:
        return pool_job(folder.submission)
    return folder.job_id or (folder.newest.job_id if folder.newest else None)


def _waiting_slot(folder: RunFolder, view: SchedulerView) -> QueueEntry | None:
    """Return the first waiting slot of a run's pool if no slot works, for the reason why the run waits."""
    slots = view.slots_of(folder)
    return None if any(entry.state not in NOT_BEGUN for entry in slots) else next(iter(slots), None)


def _device_warning(folder: RunFolder, newest: Attempt | None, state: RunState, faults: Faults) -> str | None:
    if newest is not None and newest.cause in MOVE_CAUSES and state is RunState.REQUEUED:
        move = read_move(folder.paths, newest.attempt, FaultsOf(folder.paths.run_id, faults))
        return None if move is None else move.text
    if newest is None or newest.has_ended or state is not RunState.RUNNING:  # the next attempt has not begun
        return None
    own_faults = FaultsOf(folder.paths.run_id, faults)
    lines: Iterator[str | None] = (find(folder.paths, newest.attempt, own_faults) for find in contributions("warnings"))
    return next((line for line in lines if line is not None), None)


def _limit_warning(spec: RunSpec, folder: RunFolder, faults: Faults) -> str | None:
    if len(folder.attempts) < _FEWEST_TIMEOUTS:
        return None
    least = 0.0 if spec.is_lost else spec.config["cluster"].get("min_goodput", _MIN_GOODPUT)
    own_faults = FaultsOf(spec.run_id, faults)
    timed_out = newest_timeouts(
        folder.paths, folder.attempts, most_timeouts(0), least=_FEWEST_TIMEOUTS, faults=own_faults
    )
    if timed_out is None or timed_out.share >= least:
        return None
    return f"{timed_out_words(timed_out, spec.shape.time_limit_min)}; it is stopped for good if that stays so"


# So many timeouts are a reason for a warning, before the run is stopped because of them.
_FEWEST_TIMEOUTS = 2
_MIN_GOODPUT = ClusterConfig().min_goodput  # specs of older versions lack the key

# States with a job that has not begun; a cancelled run may have such a job too, but waits for nothing.
WAITS = (RunState.PENDING, RunState.REQUEUED, RunState.HELD)


def _speed(heartbeat: Mapping[str, Any]) -> Mapping[str, float]:
    if _SPEEDS.isdisjoint(heartbeat):
        return {}
    return {key: heartbeat[key] for key in SPEED if is_number(heartbeat.get(key))}


_SPEEDS = frozenset(SPEED)


def _step(folder: RunFolder) -> int:
    beat: int = folder.heartbeat.get("step", 0)
    newest = folder.newest
    if newest is not None and newest.saved_step is not None:
        return newest.saved_step
    if newest is None or newest.attempt != folder.heartbeat.get("attempt"):
        # The heartbeat is of an earlier attempt, so only saved steps count.
        pairs = ((attempt.saved_step, attempt.resumed_step) for attempt in reversed(folder.attempts))
        return next((step for steps in pairs for step in steps if step is not None), beat)
    return beat
