"""The end of a stopped attempt: rank 0 asks Slurm how things stand, records the cause, and requeues once."""

from __future__ import annotations

import time

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.errors import ExitCode, SlurmError
from hpc_trainer.runs.journal import Journal
from hpc_trainer.runs.spec import shape_of
from hpc_trainer.runs.states import CANCEL
from hpc_trainer.runtime.decide import Action, StopFacts, decide_stop
from hpc_trainer.slurm.jobs import JobInfo, requeue, show_job
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
    job = _ask_slurm(run)
    decision = decide_stop(
        StopFacts(
            launcher="slurm" if job is not None or run.env.launcher == "slurm" else run.env.launcher,
            has_cancel_marker=run.paths.marker(CANCEL).exists(),
            job_state=None if job is None else job.state,
            seconds_left=None if job is None else job.seconds_left(run.stop.time),
            signal_lead_s=shape_of(config).signal_lead_s,
            was_preempted=job is not None and job.preempt_time is not None,
        )
    )
    Journal(run.paths).end(
        run.attempt,
        state=decision.state,
        cause=decision.cause,
        step=run.saved_step,
        saved_step=run.saved_step,
        action=decision.action.value,
        signal=run.stop.signal_name,
    )
    took = "" if run.stop.time is None else f", {time.time() - run.stop.time:.1f} s after the signal"
    print(f"stopped at step {run.saved_step}: {decision.cause} ({run.stop.signal_name}), saved{took}.")
    if decision.action is Action.requeue:
        try:
            print(f"job {run.env.job_id}: {requeue(run.env.job_id)}")
        except SlurmError as error:
            print(f"job {run.env.job_id} was not requeued: {error}. `hpc-trainer submit` brings the run back.")
    return decision.exit_code


def _ask_slurm(run: RunContext) -> JobInfo | None:
    if run.env.launcher not in ("slurm", "torchrun") or not run.env.job_id[:1].isdecimal():
        return None
    try:
        return show_job(run.env.job_id)
    except SlurmError as error:
        print(f"Slurm did not say how job {run.env.job_id} stands: {error}")
        return None
