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
from hpc_trainer.record.journal import Attempt
from hpc_trainer.record.last_words import words_before_the_worker, words_of_death
from hpc_trainer.record.ledger import most_timeouts, newest_timeouts, timed_out_words
from hpc_trainer.record.metrics import SPEED
from hpc_trainer.record.reading import Faults, FaultsOf, is_number
from hpc_trainer.record.run_folder import RunFolder
from hpc_trainer.record.run_state import End, SchedulerView, ended_before_it_began
from hpc_trainer.record.spec import RunSpec
from hpc_trainer.record.states import NOT_FINITE, OUT_OF_MEMORY, RunState
from hpc_trainer.record.submissions import Submission
from hpc_trainer.record.worker_files import MOVE_CAUSES, read_failure, read_move
from hpc_trainer.slurm.reasons import explain_reason
from hpc_trainer.slurm.states import NOT_BEGUN


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
    """The newest values of `runs.metrics_log.SPEED`, for a run that works or is complete."""
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
    elsewhere: str | None = None
    """Why the run's job may be on another cluster, as words after "it was" (`SchedulerView.elsewhere`)."""
    device_warning: str | None = None
    """Problem of a running run that a domain found, such as a GPU that is too hot or fails.

    For a run that waits to restart without a node, the reason (`record/worker_files.py`, `Move`).
    """
    limit_warning: str | None = None
    """Warning that the time limit leaves too little for training, for an active run."""
    pending_reason: str | None = None
    """Slurm's term for the reason why the run's job waits; None if no job of the run waits."""

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
        return f"{kind}: {message}" if kind else f"{self.cause}: {message}"


def status_of(
    spec: RunSpec, folder: RunFolder, view: SchedulerView, decided: End, refused: str | None, faults: Faults
) -> RunStatus:
    """Return the status of a run, with the state, cause and node of `decided`.

    `refused` is Slurm's message if it refused the run's job.
    """
    state, cause, node = decided
    newest = folder.newest
    failure: Mapping[str, Any] = {}
    if ended_before_it_began(folder, state):
        failure = words_before_the_worker(folder, _setup_of(spec), FaultsOf(spec.run_id, faults))
    elif state is RunState.FAILED and newest is not None:
        # Written by the first rank that failed: rank 0 may have been killed before it could record the failure.
        failure = read_failure(folder.paths.failure(newest.attempt), FaultsOf(spec.run_id, faults))
    if not failure and state.has_failed and folder.is_on_slurm and newest is not None and not newest.has_ended:
        failure = words_of_death(folder, FaultsOf(spec.run_id, faults))
    if failure.get("cause") == OUT_OF_MEMORY:  # Slurm, or the queue, saw only an exit code
        state, cause = RunState.OUT_OF_MEMORY, OUT_OF_MEMORY
    if refused is not None and not state.is_active and state is not RunState.COMPLETED:
        state, cause = RunState.FAILED, f"Slurm refused it: {refused}"
    beat = folder.heartbeat
    seen = beat.get("time")
    if newest is not None and (seen is None or beat.get("attempt") != newest.attempt):
        seen = newest.end_time or newest.start_time  # a heartbeat of the previous attempt says nothing about this one
    entry = view.job_of(folder)
    waiting = entry if entry is not None and entry.state in NOT_BEGUN else None
    running = state is RunState.RUNNING and newest is not None and beat.get("attempt") == newest.attempt
    return RunStatus(
        spec=spec,
        state=state,
        # A user's own loop may finish before num_steps.
        step=folder.result.get("step", spec.num_steps) if state is RunState.COMPLETED else _step(folder),
        attempts=folder.attempts,
        job_id=None if folder.waits is not None else folder.job_id or (newest.job_id if newest else None),
        cause=cause,
        node=node or (newest.node if newest else None),
        metrics=folder.result.get("metrics") or beat.get("metrics") or {},
        steps_per_s=beat.get("steps_per_s") if running else None,
        eta_s=beat.get("eta_s") if running else None,
        speed=_speed({**beat, **beat.get("metrics", {})}) if running or state is RunState.COMPLETED else {},
        remarks=tuple(beat.get("remarks", {}).values()) if running else (),
        age_s=None if seen is None else max(0.0, time.time() - seen),
        num_steps=spec.num_steps or int(beat.get("num_steps", 0)),
        stop_s=beat["step_s"] + beat["save_s"] if {"step_s", "save_s"} <= beat.keys() else None,
        submission=folder.submission,
        waits_in_sweep=folder.waits is not None and state is RunState.PENDING,
        failure=failure,
        device_warning=_device_warning(folder, newest, state, faults),
        limit_warning=_limit_warning(spec, folder, faults) if state.is_active else None,
        own_job=view.own_job(folder) if state.is_active or state is RunState.CANCELLED else None,
        waiting_job=waiting.job_id if waiting is not None else None,
        pending_reason=waiting.reason or None if waiting is not None and state in _WAITS else None,
        elsewhere=view.elsewhere(folder) if state.is_active else None,
    )


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


def _setup_of(spec: RunSpec) -> Sequence[str]:
    return () if spec.is_lost else spec.config["cluster"]["setup"]


# So many timeouts are a reason for a warning, before the run is stopped because of them.
_FEWEST_TIMEOUTS = 2
_MIN_GOODPUT = ClusterConfig().min_goodput  # specs of older versions lack the key
# States with a job that has not begun; a cancelled run may have such a job too, but waits for nothing.
_WAITS = (RunState.PENDING, RunState.REQUEUED, RunState.HELD)


def _speed(found: Mapping[str, Any]) -> Mapping[str, float]:
    return {key: found[key] for key in SPEED if is_number(found.get(key))}


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


def gpu_hours(run: RunStatus) -> float:
    """Return the GPU-hours that all attempts of a run held, up to the last sign of life."""
    gpus = run.spec.shape.num_nodes * run.spec.shape.gpus_per_node
    # The journal has no end of a killed attempt: it ended before the next one began, or at the last sign of life.
    ends = [*(attempt.start_time for attempt in run.attempts[1:]), time.time() - (run.age_s or 0.0)]
    seconds = ((a.end_time or end) - a.start_time for a, end in zip(run.attempts, ends, strict=False))
    return gpus * sum(max(0.0, duration) for duration in seconds) / 3600
