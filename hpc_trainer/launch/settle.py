"""What became of intents without an answer: their writer was killed, or the scheduler's reply was lost."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.errors import SilentError
from hpc_trainer.runs.layout import RunPaths, SweepPaths
from hpc_trainer.runs.local_process import find_process, pid_of
from hpc_trainer.runs.shared_folder import age_on_server_s, is_there
from hpc_trainer.slurm.accounting import find_ended
from hpc_trainer.slurm.cluster import cluster_name
from hpc_trainer.slurm.queue import CLOCKS_S, array_of, find_by_uuid, read_queue
from hpc_trainer.state.journal import Journal
from hpc_trainer.state.submissions import (
    SUCCESSOR,
    Submission,
    read_ledger,
    write_confirmation,
    write_dropped,
)

# What sbatch has handed over may take this long to show in squeue: slurmctld's MessageTimeout is 10 s by default.
_ACCEPT_LAG_S = 10.0
# An sbatch that outlived its submit gives up after its own retries: 15 times with 1 to 15 s between.
_ORPHAN_S = 150.0
# A controller under load may work off a request long after sbatch gave up on its answer.
_DOUBT_LAG_S = 60.0


def settle_intents(paths: SweepPaths, run: RunPaths | None = None) -> bool:
    """Confirms the intents that a scheduler has and drops the others. Call it under the sweep's lock.

    A job is known by the intent's uuid (its comment and name), by the journals of its runs, or by the accounting;
    a local queue by its argument. Those of another cluster are left to a command there: this one cannot know.

    Args:
        run: settle its successor jobs instead, whose writer was killed. One that is young is left alone: its sbatch may
            be at work on a node that this host cannot see.

    Returns:
        True if something was settled.

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
    if all(each.cluster is None for each in intents):
        return list(intents)
    here = cluster_name()
    return [each for each in intents if each.cluster in (None, here)]


def look_once(intent: Submission) -> str | None:
    """The job of an intent if the queue shows it now. None is no answer: it may show later.

    Raises:
        SlurmError: squeue does not answer.
    """
    return find_by_uuid(read_queue().values(), intent.uuid)


def _find_job(paths: SweepPaths, intent: Submission, quiet_s: float) -> str | None:
    """The job of an intent, after a wait for what may still come.

    Args:
        quiet_s: how long nobody has written into its book, by the file server's clock: the intent is as old at least.
            Its own time is of another host's clock, perhaps.
    """
    begin = time.time() - quiet_s
    lag = _ACCEPT_LAG_S if intent.doubt_time is None else _DOUBT_LAG_S
    while True:
        # Asked before the queue: an sbatch that ends in between shows in the queue.
        sbatch = find_process(str(paths.script(intent.uuid)))
        age = time.time() - begin
        job_id = look_once(intent)
        if job_id is not None:
            return job_id
        if sbatch is not None and age > _ORPHAN_S:
            raise SilentError(
                f"the sbatch of an earlier submit still tries (process {pid_of(sbatch)}). Wait until it has ended, or "
                "end it; then give the same command again."
            )
        if sbatch is None and age > lag:
            return _from_journals(paths, intent) or find_ended(paths.name, intent.uuid, intent.time)
        time.sleep(lag / 2)  # three looks in all: design, section 9


def _from_journals(paths: SweepPaths, intent: Submission) -> str | None:
    """The array that started one of the intent's runs, and is no other submission's: also without accounting.

    By time only as far as clocks of login nodes and compute nodes may differ: ids come again.
    """
    others = {each.job_id for each in read_ledger(paths).submissions}
    for index, run_id in enumerate(intent.run_ids):
        run = paths.run(run_id)
        others |= {each.job_id for each in read_ledger(run).submissions}
        for attempt in Journal(run).read():
            is_its = "_" not in attempt.job_id if intent.kind == SUCCESSOR else attempt.job_id.endswith(f"_{index}")
            is_new = attempt.start_time >= intent.time - CLOCKS_S and array_of(attempt.job_id) not in others
            if attempt.executor == "slurm" and is_its and is_new:
                return array_of(attempt.job_id)
    return None
