"""Beginning of an attempt, as rank 0 records it. No torch."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.errors import LowGoodputError
from hpc_trainer.runs.layout import RunPaths
from hpc_trainer.runs.monitoring.ledger import keep_spent
from hpc_trainer.runtime.pace import better_limit_min
from hpc_trainer.runtime.rank_env import RankEnv
from hpc_trainer.state.journal import Attempt, Journal
from hpc_trainer.state.monitoring.ledger import most_timeouts, newest_timeouts
from hpc_trainer.state.monitoring.ledger_words import timed_out_words

if TYPE_CHECKING:  # the import brings torch
    from hpc_trainer.runtime.rank_group import RankGroup


def begin_attempt(paths: RunPaths, env: RankEnv, attempt: int) -> Journal:
    """Record the beginning of this attempt, keep the time spent by the previous one, and return the run's journal.

    Only rank 0 writes.
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


def check_goodput(
    config: TrainConfig, paths: RunPaths, attempts: list[Attempt], group: RankGroup | None = None
) -> None:
    """Check that the attempts that the time limit ended trained enough to start another attempt.

    Args:
        group: ranks to which rank 0 sends its result, in a collective call; None if this is rank 0, and the other ranks
            learn of its end in another way.

    Raises:
        LowGoodputError: less than `cluster.min_goodput` of their time was training.
    """
    problem = _goodput_problem(config, paths, attempts) if group is None or group.is_rank_zero else None
    problem = problem if group is None else group.broadcast(problem)
    if problem is not None:
        raise LowGoodputError(problem)


def _goodput_problem(config: TrainConfig, paths: RunPaths, attempts: list[Attempt]) -> str | None:
    cluster, limit_min = config.cluster, config.hardware.time_limit_min
    most = most_timeouts(cluster.max_no_progress)
    times = newest_timeouts(paths, attempts, most, least=most) if cluster.min_goodput else None
    if times is None or times.share >= cluster.min_goodput:
        return None
    longer_min = better_limit_min(limit_min, times.other_s, cluster.signal_lead_s)
    return (
        f"{timed_out_words(times, limit_min)}: less than cluster.min_goodput={cluster.min_goodput:g}, so it is stopped "
        f"for good. An attempt spends {times.other_s:.0f} s on other things than training. To go on: hpc-trainer retry "
        f"{paths.run_id} hardware.time_limit_min={longer_min}"
    )
