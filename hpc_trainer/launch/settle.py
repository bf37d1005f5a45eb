"""What became of intents without an answer: their writer was killed, or the scheduler's reply was lost."""

from __future__ import annotations

import time
from pathlib import Path

from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.runs.journal import Journal
from hpc_trainer.runs.layout import SweepPaths
from hpc_trainer.runs.local_process import find_process
from hpc_trainer.runs.submissions import Submission, read_ledger, write_confirmation, write_dropped
from hpc_trainer.slurm.queue import array_of, find_by_uuid, find_ended, read_queue

# What sbatch has handed over may take this long to show in squeue: slurmctld's MessageTimeout is 10 s by default.
_ACCEPT_LAG_S = 10.0
# An sbatch that outlived its submit gives up by itself after its own retries.
_ORPHAN_S = 120.0


def settle_intents(paths: SweepPaths) -> None:
    """Confirms the intents that a scheduler has and drops the others. Call it under the sweep's lock.

    A job is known by the intent's uuid (its comment and name), by the journals of its runs, or by the accounting;
    a local queue by its argument.

    Raises:
        SlurmError: Slurm does not answer; submitting again now could submit twice.
    """
    for intent in read_ledger(paths).unsettled:
        on_slurm = intent.executor == Executor.slurm.value
        job_id = _find_job(paths, intent) if on_slurm else find_process(intent.uuid)
        if job_id is not None:
            write_confirmation(paths, intent, job_id)
        else:
            write_dropped(paths, intent, "the scheduler does not know it")


def script_path(paths: SweepPaths, uuid: str) -> Path:
    """The batch script of a submission: its name tells a living sbatch from all others."""
    return paths.scripts / f"{uuid}.sh"


def _find_job(paths: SweepPaths, intent: Submission) -> str | None:
    while True:
        # Asked before the queue: an sbatch that ends in between shows in the queue.
        alive = find_process(str(script_path(paths, intent.uuid))) is not None
        age = time.time() - intent.time
        job_id = find_by_uuid(read_queue().values(), paths.name, intent.uuid)
        if job_id is not None:
            return job_id
        if age > (_ORPHAN_S if alive else _ACCEPT_LAG_S):
            return _from_journals(paths, intent) or find_ended(paths.name, intent.uuid, intent.time)
        time.sleep(_ACCEPT_LAG_S / 2)  # three looks in all at a submit that was killed: design, section 9


def _from_journals(paths: SweepPaths, intent: Submission) -> str | None:
    """The array that started one of the intent's runs after it was written: also where there is no accounting."""
    for index, run_id in enumerate(intent.run_ids):
        for attempt in Journal(paths.run(run_id)).read():
            if attempt.start_time >= intent.time and attempt.job_id.endswith(f"_{index}"):
                return array_of(attempt.job_id)
    return None
