"""The successor job, which restarts a run whose own job cannot be requeued.

Some partitions preempt by cancelling, some sites refuse requeues, and a job that reached its time limit does not
restart by itself. A worker that is about to lose its nodes starts this module in a separate process. The module submits
one more job for the one run, which begins when the worker's job has ended. Its intent and confirmation are in the run's
own folder, where rank 0's attempt is the only writer; the sweep's file has another writer.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from hpc_trainer.errors import HpcTrainerError, SlurmError
from hpc_trainer.launch.batch_job import BatchJob, worker_command
from hpc_trainer.launch.frozen_code.archive import archive_of
from hpc_trainer.launch.plan import clear_exit_codes
from hpc_trainer.runs.layout import RunPaths, SweepPaths
from hpc_trainer.runs.shared_folder import is_there, look_anew
from hpc_trainer.runs.spec import read_spec
from hpc_trainer.runs.states import CANCEL, DONE
from hpc_trainer.slurm.jobs import cancel_jobs
from hpc_trainer.slurm.read_limits import read_limits
from hpc_trainer.state.submissions import (
    SUCCESSOR,
    latest_of_each_run,
    newest_of_run,
    read_submissions,
    write_intent,
)


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
    newest = newest_of_run(run, latest_of_each_run(read_submissions(sweep)).get(run.run_id))
    is_superseded = newest is None or newest[0].element_id(newest[1]) != after
    if is_superseded or _is_over(run):
        return None
    assert newest is not None
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
        after=newest[0].uuid,
        cluster=newest[0].cluster or os.environ.get("SLURM_CLUSTER_NAME"),  # we are inside the job `after`
    )  # fmt: skip
    job = BatchJob(
        sweep=sweep, shape=spec.shape, uuid=intent.uuid, setup=tuple(cluster["setup"]),
        srun_args=tuple(cluster["srun_args"]), sbatch=cluster.get("sbatch") or {}, exit_codes=codes,
        command=worker_command(sweep.folder, ["--run", run.run_id], cluster["python"], archive),
    )  # fmt: skip
    options = [f"--dependency=afterany:{after}", *([f"--exclude={excluded}"] if excluded else [])]
    job_id = hand_over(sweep, intent, job, options, book=run)
    if _is_over(run):  # cancelled while sbatch was at work: the job would start only to end at once
        with contextlib.suppress(SlurmError):
            cancel_jobs([job_id])
    return job_id


def _is_over(run: RunPaths) -> bool:
    return any(is_there(run.marker(name)) for name in (DONE, CANCEL))


def main() -> None:
    """Run `python -m hpc_trainer.launch.successor RUN_FOLDER JOB [EXCLUDED]`, which the worker of that job starts."""
    run, after, *excluded = RunPaths(Path(sys.argv[1]).absolute()), *sys.argv[2:]
    try:
        job_id = submit_successor(run, after, *excluded)
    except (HpcTrainerError, OSError) as error:
        sys.exit(f"error: {error}")
    result = f"nothing to follow job {after}" if job_id is None else f"job {job_id} follows job {after}"
    sys.stdout.write(f"{run.run_id}: {result}.\n")


if __name__ == "__main__":
    main()
