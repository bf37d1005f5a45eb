"""The beginning of an attempt, as rank 0 records it. No torch."""

from __future__ import annotations

import os

from hpc_trainer.runs.layout import RunPaths
from hpc_trainer.runs.monitoring.ledger import keep_spent
from hpc_trainer.runtime.rank_env import RankEnv
from hpc_trainer.state.journal import Journal


def begin_attempt(paths: RunPaths, env: RankEnv, attempt: int) -> Journal:
    """The journal of the run, in which this attempt has begun; what the one before spent is kept. Ranks but 0 write
    nothing.
    """
    journal = Journal(paths)
    if env.rank == 0:
        journal.start(
            attempt,
            job_id=env.job_id,
            restart_count=env.restart_count,
            node=env.node,
            pid=os.getpid(),
            executor=env.launcher,
            world_size=env.world_size,
        )
        keep_spent(paths, attempt)
    return journal
