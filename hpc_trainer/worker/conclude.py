"""The end of a stopped attempt: rank 0 asks Slurm how things stand, records the cause, and requeues once."""

from __future__ import annotations

import time

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.errors import ExitCode, SlurmError
from hpc_trainer.runs.journal import Journal
from hpc_trainer.runs.spec import shape_of
from hpc_trainer.runs.states import CANCEL, RunState
from hpc_trainer.runtime.decide import AT_WORK, Action, StopFacts, decide_stop
from hpc_trainer.slurm.jobs import WORKER_TIMEOUT_S, requeue, show_job
from hpc_trainer.slurm.queue import read_accounting
from hpc_trainer.training.context import RunContext


def conclude_stop(config: TrainConfig, run: RunContext) -> ExitCode:
    """Decides, journals and acts, all on rank 0; every rank returns the same exit code. Collective.

    The checkpoint stands when this is called. The journal is written before the requeue: Slurm may kill the job
    the moment it agrees.
    """
    code = int(ExitCode.REQUEUED)
    if run.is_rank_zero:
        code = int(_conclude(config, run))
    # A barrier too: srun --kill-on-bad-exit would kill ranks that are still at work.
    return ExitCode(run.group.broadcast(code))


def _conclude(config: TrainConfig, run: RunContext) -> ExitCode:
    decision = decide_stop(_facts(config, run))
    _record(run, decision.state, decision.cause, decision.action.value)
    took = "" if run.stop.time is None else f", {time.time() - run.stop.time:.1f} s after the signal"
    print(f"stopped at step {run.saved_step}: {decision.cause} ({run.stop.signal_name}), saved{took}.")
    if decision.action is Action.requeue:
        try:
            print(f"job {run.env.job_id}: {requeue(run.env.job_id)}")
        except SlurmError as error:
            # A second record of the same end: the first one's promise did not hold.
            _record(run, RunState.PREEMPTED, decision.cause, "requeue refused")
            print(f"job {run.env.job_id} was not requeued: {error}. `hpc-trainer submit` brings the run back.")
    return decision.exit_code


def _record(run: RunContext, state: RunState, cause: str, action: str) -> None:
    Journal(run.paths).end(
        run.attempt,
        state=state,
        cause=cause,
        step=run.saved_step,
        saved_step=run.saved_step,
        action=action,
        signal=run.stop.signal_name,
    )


def _facts(config: TrainConfig, run: RunContext) -> StopFacts:
    has_cancel_marker = run.paths.marker(CANCEL).exists()
    job_id = run.env.job_id
    on_slurm = job_id[:1].isdecimal()  # torchrun inside a Slurm job has that job's id
    if not on_slurm:
        return StopFacts(on_slurm=False, has_cancel_marker=has_cancel_marker)
    lead_s = shape_of(config).signal_lead_s
    try:
        job = show_job(job_id)
    except SlurmError as error:
        print(f"Slurm did not say how job {job_id} stands: {error}")
        return StopFacts(on_slurm=True, has_cancel_marker=has_cancel_marker, signal_lead_s=lead_s)
    return StopFacts(
        on_slurm=True,
        has_cancel_marker=has_cancel_marker,
        job_state=job.state,
        seconds_left=job.seconds_left(run.stop.time),
        ran_full_time=job.ran_full_time,
        was_preempted=job.preempt_time is not None,
        was_requeued=job.restarts > run.env.restart_count,
        accounting_state=None if job.state in AT_WORK else _accounting_state(job_id),
        signal_lead_s=lead_s,
    )


def _accounting_state(job_id: str) -> str | None:
    entry = read_accounting([job_id], timeout_s=WORKER_TIMEOUT_S).get(job_id)
    return None if entry is None else entry.state
