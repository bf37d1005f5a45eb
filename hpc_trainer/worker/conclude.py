"""The end of a stopped attempt: rank 0 asks Slurm how things stand, records the cause, and requeues once."""

from __future__ import annotations

import time
from dataclasses import dataclass

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.errors import ExitCode, SlurmError
from hpc_trainer.runs.journal import Journal
from hpc_trainer.runs.layout import RunPaths
from hpc_trainer.runs.spec import shape_of
from hpc_trainer.runs.states import CANCEL, RunState
from hpc_trainer.runtime.decide import AT_WORK, Action, StopFacts, decide_stop
from hpc_trainer.runtime.rank_env import RankEnv
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.runtime.stop import StopFlag
from hpc_trainer.slurm.jobs import WORKER_TIMEOUT_S, requeue, show_job
from hpc_trainer.slurm.queue import read_accounting


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """One attempt that was asked to stop: who, and what is saved (None: nothing yet)."""

    config: TrainConfig
    paths: RunPaths
    env: RankEnv
    flag: StopFlag
    attempt: int
    saved_step: int | None


def conclude_stop(stop: Stop, group: RankGroup) -> ExitCode:
    """Decides, journals and acts, all on rank 0; every rank returns the same exit code. Collective.

    The checkpoint stands when this is called. The journal is written before the requeue: Slurm may kill the job
    the moment it agrees.
    """
    code = int(_conclude(stop)) if group.is_rank_zero else 0
    # A barrier too: srun --kill-on-bad-exit would kill ranks that are still at work.
    return ExitCode(group.broadcast(code))


def conclude_start(stop: Stop) -> ExitCode:
    """The same for a stop before the ranks could talk to each other. Not collective: the journal is the barrier."""
    if stop.env.rank == 0:
        return _conclude(stop)
    deadline = time.monotonic() + 2 * WORKER_TIMEOUT_S + 10
    while time.monotonic() < deadline:
        attempts = Journal(stop.paths).read()
        if attempts and attempts[-1].attempt == stop.attempt and attempts[-1].has_ended:
            # The requeue follows the record, and rank 0 must not be killed in it because we left.
            time.sleep(WORKER_TIMEOUT_S if attempts[-1].action == Action.requeue.value else 1.0)
            break
        time.sleep(0.2)
    return ExitCode.REQUEUED


def _conclude(stop: Stop) -> ExitCode:
    decision = decide_stop(_facts(stop))
    _record(stop, decision.state, decision.cause, decision.action.value)
    took = "" if stop.flag.time is None else f", {time.time() - stop.flag.time:.1f} s after the signal"
    what = "before the first step" if stop.saved_step is None else f"at step {stop.saved_step}, saved"
    print(f"stopped {what}: {decision.cause} ({stop.flag.signal_name}){took}.")
    job_id = stop.env.job_id
    if decision.action is Action.requeue:
        try:
            print(f"job {job_id}: {requeue(job_id)}")
        except SlurmError as error:
            # A second record of the same end: the first one's promise did not hold.
            _record(stop, RunState.PREEMPTED, decision.cause, "requeue refused")
            print(f"job {job_id} was not requeued: {error}. `hpc-trainer submit` brings the run back.")
    return decision.exit_code


def _record(stop: Stop, state: RunState, cause: str, action: str) -> None:
    Journal(stop.paths).end(
        stop.attempt,
        state=state,
        cause=cause,
        step=stop.saved_step,
        saved_step=stop.saved_step,
        action=action,
        signal=stop.flag.signal_name,
    )


def _facts(stop: Stop) -> StopFacts:
    has_cancel_marker = stop.paths.marker(CANCEL).exists()
    job_id = stop.env.job_id
    on_slurm = job_id[:1].isdecimal()  # torchrun inside a Slurm job has that job's id
    if not on_slurm:
        return StopFacts(on_slurm=False, has_cancel_marker=has_cancel_marker)
    lead_s = shape_of(stop.config).signal_lead_s
    try:
        job = show_job(job_id)
    except SlurmError as error:
        print(f"Slurm did not say how job {job_id} stands: {error}")
        return StopFacts(on_slurm=True, has_cancel_marker=has_cancel_marker, signal_lead_s=lead_s)
    return StopFacts(
        on_slurm=True,
        has_cancel_marker=has_cancel_marker,
        job_state=job.state,
        seconds_left=job.seconds_left(stop.flag.time),
        ran_full_time=job.ran_full_time,
        was_preempted=job.preempt_time is not None,
        was_requeued=job.restarts > stop.env.restart_count,
        accounting_state=None if job.state in AT_WORK else _accounting_state(job_id),
        signal_lead_s=lead_s,
    )


def _accounting_state(job_id: str) -> str | None:
    try:
        entry = read_accounting([job_id], timeout_s=WORKER_TIMEOUT_S).get(job_id)
    except SlurmError:
        return None
    return None if entry is None else entry.state
