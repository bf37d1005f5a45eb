"""Agreement of all ranks on how a loop ended."""

from __future__ import annotations

import enum

from hpc_trainer.errors import LoopError
from hpc_trainer.runtime.rank_group import RankGroup


class Outcome(enum.Enum):
    """The two ways in which a loop ends without an error."""

    done = "done"
    stopped = "stopped"


def agree_on_end(
    name: str, group: RankGroup, *, has_finished: bool, has_stopped: bool, step: int, num_steps: int
) -> Outcome:
    """Return how `name`, a main that has returned at `step`, ended on all ranks. Collective.

    Raises:
        LoopError: it neither finished nor stopped as all ranks had agreed, or the ranks differ.
    """
    mine = "finished" if has_finished else "stopped" if has_stopped else "left early"
    ends = group.gather([mine, step])
    if len({how for how, _ in ends}) > 1:
        listed = ", ".join(f"rank {rank} {how} at step {at}" for rank, (how, at) in enumerate(ends))
        raise LoopError(f"{name}: all ranks must finish, or all must stop, and {listed}.")
    if mine == "left early":
        raise LoopError(
            f"{name} returned at step {step} of {num_steps}, neither finished nor stopped. Call "
            "run.finish(metrics) when all steps are done; before, return only after run.should_stop(step) is True."
        )
    return Outcome.done if has_finished else Outcome.stopped
