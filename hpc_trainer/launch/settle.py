"""Settlement of intents without an answer: their writer was killed, or the scheduler's reply was lost."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.errors import SilentError
from hpc_trainer.record.files import age_on_server_s
from hpc_trainer.record.journal import Journal
from hpc_trainer.record.layout import RunPaths, SweepPaths
from hpc_trainer.record.processes import find_process, pid_of
from hpc_trainer.record.reading import is_there
from hpc_trainer.record.submissions import SUCCESSOR, Submission, read_ledger, write_confirmation, write_dropped
from hpc_trainer.slurm.commands import cluster_name
from hpc_trainer.slurm.queue import CLOCKS_S, array_of, find_by_uuid, find_ended, read_queue

# A job that sbatch has handed over may take this long to appear in squeue: slurmctld's MessageTimeout is 10 s by
# default.
_ACCEPT_LAG_S = 10.0
# An sbatch that outlived its submit gives up after its own retries: 15 times with 1 to 15 s between.
_ORPHAN_S = 150.0
# A controller under load may process a request long after sbatch gave up waiting for the answer.
_DOUBT_LAG_S = 60.0


def settle_intents(paths: SweepPaths, run: RunPaths | None = None) -> bool:
    """Confirm the intents that a scheduler has, and drop the others. The caller holds the sweep's lock.

    A job is found by the intent's uuid (in its comment and name), by the journals of its runs, or by the accounting; a
    local queue by its argument. Intents of another cluster are left to a command on that cluster.

    Args:
        run: settle this run's successor jobs instead, whose writer was killed. A recent intent is left alone: its
            sbatch may be at work on a node that this host cannot see.

    Returns:
        True if an intent was settled.

    Raises:
        SlurmError: Slurm does not answer; submitting again now could submit twice.
    """
    book = paths if run is None else run
    unsettled = _of_this_cluster(read_ledger(book).unsettled)
    quiet_s = age_on_server_s(book.submissions) if unsettled and is_there(book.submissions) else 0.0
    if not unsettled or (run is not None and quiet_s <= _ORPHAN_S):
        return False
    for intent in unsettled:
        on_slurm = intent.executor == Executor.slurm.value
        job_id = _find_job(paths, intent, quiet_s) if on_slurm else find_process(intent.uuid)
        if job_id is not None:
            write_confirmation(book, intent, job_id)
        else:
            write_dropped(book, intent, "the scheduler does not know it")
    return True


def _of_this_cluster(intents: Sequence[Submission]) -> list[Submission]:
    if all(intent.cluster is None for intent in intents):
        return list(intents)
    here = cluster_name()
    return [intent for intent in intents if intent.cluster in (None, here)]


def look_once(intent: Submission) -> str | None:
    """Return the job of an intent if the queue shows it now; after None the job may still appear later.

    Raises:
        SlurmError: squeue does not answer.
    """
    return find_by_uuid(read_queue().values(), intent.uuid)


def _find_job(paths: SweepPaths, intent: Submission, quiet_s: float) -> str | None:
    """Return the job of an intent, after waiting for a job that may still appear; None if there is none.

    Args:
        quiet_s: seconds since the last write to the intent's file, by the file server's clock. The intent is at least
            this old; its own time may come from another host's clock.
    """
    begin = time.time() - quiet_s
    lag = _ACCEPT_LAG_S if intent.doubt_time is None else _DOUBT_LAG_S
    while True:
        # Look for sbatch before the queue: the job of an sbatch that ends in between is in the queue.
        sbatch = find_process(str(paths.script(intent.uuid)))
        age = time.time() - begin
        job_id = look_once(intent)
        if job_id is not None:
            return job_id
        if sbatch is not None and age > _ORPHAN_S:
            raise SilentError(
                f"the sbatch of an earlier submit is still running (process {pid_of(sbatch)}). Wait until it has "
                f"ended, or "
                "end it; then run the same command again."
            )
        if sbatch is None and age > lag:
            return _from_journals(paths, intent) or find_ended(paths.name, intent.uuid, intent.time)
        time.sleep(lag / 2)  # the queue is read three times in all: design, section 9


def _from_journals(paths: SweepPaths, intent: Submission) -> str | None:
    """Return the job that started one of the intent's runs and belongs to no other submission; None if none did.

    This works without accounting. An attempt must not have begun before the intent, as far as clocks of login nodes and
    compute nodes agree, because Slurm reuses ids.
    """
    others = {submission.job_id for submission in read_ledger(paths).submissions}
    for index, run_id in enumerate(intent.run_ids):
        run = paths.run(run_id)
        others |= {submission.job_id for submission in read_ledger(run).submissions}
        for attempt in Journal(run).read():
            is_its = "_" not in attempt.job_id if intent.kind == SUCCESSOR else attempt.job_id.endswith(f"_{index}")
            is_new = attempt.start_time >= intent.time - CLOCKS_S and array_of(attempt.job_id) not in others
            if attempt.executor == "slurm" and is_its and is_new:
                return array_of(attempt.job_id)
    return None
