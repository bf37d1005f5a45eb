"""Jobs that submit later: the top-up job and the successor job.

The top-up job, of one core, submits the runs that wait in a sweep's own queue when other runs have ended. The successor
job restarts a run whose own job cannot be requeued.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_trainer.config.environment import environment_of
from hpc_trainer.errors import (
    ConfigError,
    HpcTrainerError,
    NoRoomError,
    SilentError,
    SlurmError,
    SubmitError,
    UnclearError,
)
from hpc_trainer.launch.batch_job import AT_WORK_ONLY, BatchJob, top_up_command
from hpc_trainer.launch.frozen_code.archive import archive_of
from hpc_trainer.launch.plan import clear_exit_codes
from hpc_trainer.record.chain import LOOK_AGAIN_S, read_decision
from hpc_trainer.record.layout import RunPaths, SweepPaths
from hpc_trainer.record.reading import is_there
from hpc_trainer.record.shared_folder import look_anew
from hpc_trainer.record.spec import RunSpec, read_spec
from hpc_trainer.record.states import AFTER_BACK, CANCEL, DONE
from hpc_trainer.record.submissions import (
    SUCCESSOR,
    TOP_UP,
    latest_of_each_run,
    newest_of_run,
    read_submissions,
    rivals_of_each_run,
    winner_of,
    write_intent,
)
from hpc_trainer.slurm.jobs import cancel_jobs, show_job, update_job
from hpc_trainer.slurm.limits import read_limits
from hpc_trainer.slurm.shape import Shape
from hpc_trainer.slurm.terms import AT_WORK

# The submit that placed the job has this long to submit its arrays and to set the job's dependency.
_BEGIN_S = 60
# If other jobs take all the room, there is no job of this sweep to wait for.
_LOOK_AGAIN_S = 600
# Includes waiting for a lock whose holder died on another machine, and for a controller under load.
_TIME_LIMIT_MIN = 30
# A dependency is one argument; it need not name every one of 500 elements.
_MAX_AWAITED = 50


class TopUpJob:
    """Job that will top up a sweep, or the reason why there is none (`job_id` None, `notes`)."""

    def __init__(self, job_id: str | None, notes: tuple[str, ...] = ()) -> None:
        self.job_id, self.notes = job_id, notes

    @classmethod
    def place(cls, paths: SweepPaths, spec: RunSpec, cluster: str | None) -> TopUpJob:
        """Submit the job with the partition, account and QOS of `spec`, the first waiting run.

        A refusal is never raised: without the job the next command tops up the sweep, and the notes say so.
        """
        from hpc_trainer.launch.submitit_bridge import hand_over

        intent = write_intent(paths, executor="slurm", hardware=spec.hardware, run_ids=(), kind=TOP_UP, cluster=cluster)
        group = spec.config["cluster"]
        job = BatchJob(
            sweep=paths, shape=top_up_shape(spec), uuid=intent.uuid, setup=tuple(group["setup"]),
            srun_args=tuple(group["srun_args"]), command=top_up_command(paths.folder, _python(group)),
        )  # fmt: skip
        try:
            return cls(hand_over(paths, intent, job, [f"--begin=now+{_BEGIN_S}"]))
        except (SilentError, UnclearError) as error:
            return cls(None, (str(error),))
        except (ConfigError, SlurmError, SubmitError) as error:
            why = "no room for it" if isinstance(error, NoRoomError) else str(error)
            return cls(None, (f"No top-up job ({why}): run the same command again when runs have ended.",))

    def aim(self, elements: Sequence[str]) -> None:
        """Make the job begin when the first half of these runs (job ids of array elements) has ended.

        Half, because a top-up after each run would take one job a run, and a top-up after the last run would leave
        nodes idle. If no run of this sweep is in the queue, the job begins in ten minutes.
        """
        if self.job_id is None:
            return
        changes = [f"StartTime=now+{_LOOK_AGAIN_S}"]
        if elements:
            half = elements[: max(1, len(elements) // 2)]
            step = -(-len(half) // _MAX_AWAITED)
            changes = [f"Dependency=afterany:{':'.join(half[step - 1 :: step])}", "StartTime=now"]
        try:
            update_job(self.job_id, changes)
        except SlurmError as error:
            # The job still begins in a minute, finds no room, and places the next top-up job.
            self.notes = (*self.notes, f"the top-up job {self.job_id} begins in {_BEGIN_S} s: {error}")


def _python(cluster: Mapping[str, Any]) -> str | None:
    """Return the Python of a top-up job, which needs sbatch and so never runs in a container."""
    return None if environment_of(cluster).container is not None else cluster["python"]


def top_up_shape(spec: RunSpec) -> Shape:
    """Return the shape of a top-up job: one core for at most 30 minutes, where `spec` may run; no GPU."""
    shape, cluster = spec.shape, spec.config["cluster"]
    return dataclasses.replace(
        shape,
        num_nodes=1, tasks_per_node=1, gpus_per_node=0, cpus_per_task=1, mem_gb_per_node=None, mem_gb_per_gpu=None,
        mem_gb_per_cpu=None, gpu_type=None, constraint=None, exclude=None, ranks_per_task=1, whole_node=False,
        partition=cluster.get("top_up_partition") or shape.partition,
        time_limit_min=min(_TIME_LIMIT_MIN, shape.time_limit_min),
        signal_lead_s=30,
    )  # fmt: skip


def submit_successor(run: RunPaths, after: str, excluded: str = "") -> str | None:
    """Submit one job for `run` that begins when the job `after` has ended, and return its id.

    Args:
        excluded: host list of the nodes that the job must not get, including `hardware.exclude`; "": only that option.

    Returns:
        None if there is nothing to do: the run is done or cancelled, or `after` is no longer the run's newest job, so
        that the run was restarted already.

    Raises:
        RunStateError: the sweep does not have this run.
        SlurmError: sbatch refused, or did not answer.
    """
    from hpc_trainer.launch.submitit_bridge import hand_over  # imported late, because few commands submit

    sweep = SweepPaths(run.folder.parent)
    look_anew(run.folder)
    spec = read_spec(sweep, run.run_id)
    submissions = read_submissions(sweep)
    rivals = rivals_of_each_run(submissions).get(run.run_id)
    winner = None if rivals is None else winner_of(run, rivals)
    newest = newest_of_run(run, winner or latest_of_each_run(submissions).get(run.run_id))
    is_superseded = newest is None or newest[0].element_id(newest[1]) != after
    if is_superseded or _is_over(run):
        return None
    assert newest is not None
    choice = newest[0].choice
    spec = spec.on(choice)
    code, cluster = newest[0].code, spec.config["cluster"]
    archive = archive_of(sweep, code) if code else None
    try:
        codes = clear_exit_codes(read_limits(with_nodes=False).requeue_exit)
    except SlurmError:
        codes = ()
    if _is_over(run):  # look again before the submit, because Slurm may have taken long
        return None
    intent = write_intent(
        run, executor="slurm", hardware=spec.hardware, run_ids=[run.run_id], kind=SUCCESSOR, code=code,
        after=newest[0].uuid, choice=choice,
        cluster=newest[0].cluster or os.environ.get("SLURM_CLUSTER_NAME"),  # we are inside the job `after`
    )  # fmt: skip
    job = BatchJob.of_runs(
        sweep, spec.shape, intent.uuid, cluster, ["--run", run.run_id, *on_choice(choice)], archive, codes
    )
    waits = read_decision(run).get("decision") == AFTER_BACK  # it follows others, and would look again at once
    options = [
        f"--dependency=afterany:{after}",
        *([f"--begin=now+{LOOK_AGAIN_S}"] if waits else []),
        *([f"--exclude={excluded}"] if excluded else []),
    ]
    job_id = hand_over(sweep, intent, job, options, book=run)
    if _is_over(run):  # cancelled while sbatch was at work: the job would start only to end at once
        with contextlib.suppress(SlurmError):
            cancel_jobs([job_id])
    return job_id


def on_choice(choice: int | None) -> list[str]:
    """Return the arguments that tell a worker on which item of its run's list of hardware it is; [] for the first."""
    return ["--choice", str(choice)] if choice else []


def _is_over(run: RunPaths) -> bool:
    return any(is_there(run.marker(name)) for name in (DONE, CANCEL))


def _is_at_work(job_id: str) -> bool:
    """Return True if the job runs. One that is in the queue again, or was cancelled, must get no successor."""
    with contextlib.suppress(SlurmError):
        return show_job(job_id).state in AT_WORK
    return False


def main() -> None:
    """Run `python -m hpc_trainer.launch.later_jobs RUN_FOLDER JOB [EXCLUDED]`, which the worker of that job starts.

    The batch script adds --at-work if the worker is in a container: nobody has asked for the job's state yet.
    """
    run, after, *others = RunPaths(Path(sys.argv[1]).absolute()), *sys.argv[2:]
    excluded = [word for word in others if word != AT_WORK_ONLY]
    try:
        may_follow = AT_WORK_ONLY not in others or _is_at_work(after)
        job_id = submit_successor(run, after, *excluded) if may_follow else None
    except (HpcTrainerError, OSError) as error:
        sys.exit(f"error: {error}")
    result = f"nothing to follow job {after}" if job_id is None else f"job {job_id} follows job {after}"
    sys.stdout.write(f"{run.run_id}: {result}.\n")


if __name__ == "__main__":
    main()
