"""The top-up job: a small job of one core that submits waiting runs of a sweep's own queue when other runs end.

It is submitted before the first array, to begin in a minute, and then changed to wait for half of the runs. If the
submit is killed in between, the top-up job does the rest. No process stays on the login node.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hpc_trainer.errors import ConfigError, NoRoomError, SilentError, SlurmError, SubmitError, UnclearError
from hpc_trainer.launch.batch_job import BatchJob, top_up_command
from hpc_trainer.runs.layout import SweepPaths
from hpc_trainer.runs.spec import RunSpec, Shape
from hpc_trainer.slurm.jobs import update_job
from hpc_trainer.state.submissions import TOP_UP, write_intent

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
            srun_args=tuple(group["srun_args"]), command=top_up_command(paths.folder, group["python"]),
        )  # fmt: skip
        try:
            return cls(hand_over(paths, intent, job, [f"--begin=now+{_BEGIN_S}"]))
        except (SilentError, UnclearError) as error:
            return cls(None, (str(error),))
        except (ConfigError, SlurmError, SubmitError) as error:
            why = "no room for it" if isinstance(error, NoRoomError) else str(error)
            return cls(None, (f"No top-up job ({why}): give the same command again when runs have ended.",))

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


def top_up_shape(spec: RunSpec) -> Shape:
    """Return the shape of a top-up job: one core for at most 30 minutes, where `spec` may run; no GPU."""
    shape, cluster = spec.shape, spec.config["cluster"]
    return dataclasses.replace(
        shape,
        num_nodes=1, tasks_per_node=1, gpus_per_node=0, cpus_per_task=1, mem_gb_per_node=None, mem_gb_per_gpu=None,
        mem_gb_per_cpu=None, gpu_type=None, constraint=None, exclude=None,
        partition=cluster.get("top_up_partition") or shape.partition,
        time_limit_min=min(_TIME_LIMIT_MIN, shape.time_limit_min),
        signal_lead_s=30,
    )  # fmt: skip
