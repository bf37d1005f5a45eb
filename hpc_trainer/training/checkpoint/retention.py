"""Rules for keeping checkpoints: the last ones, every n-th, the best by a metric, and those that a user pinned."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc_trainer.errors import CheckpointError
from hpc_trainer.record import checkpoint_folders as folders


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Rules for keeping checkpoints; a checkpoint stays if any rule names it.

    `keep_last`: number of newest valid checkpoints to keep, ≥ 1. `keep_every_steps`: keep all steps that it divides;
    0: none. `best_is_max`: the largest score is the best, else the smallest. `newest_of_every_steps`: keep the newest
    step that it divides, or the oldest checkpoint if there is none, for a rollback; 0: none.
    """

    keep_last: int = 2
    keep_every_steps: int = 0
    best_is_max: bool = False
    newest_of_every_steps: int = 0

    def __post_init__(self) -> None:
        for key, least in (("keep_last", 1), ("keep_every_steps", 0)):
            if getattr(self, key) < least:
                raise CheckpointError(
                    f"checkpoint.{key}={getattr(self, key)!r} must be ≥ {least}; nearest legal: {least}."
                )

    def best(self, scores: Mapping[int, float]) -> int | None:
        """Return the step with the best score, the newest of equal ones; None if no score is a number."""
        sign = 1 if self.best_is_max else -1
        ranked = [(sign * score, step) for step, score in scores.items() if not math.isnan(score)]
        return max(ranked)[1] if ranked else None

    def apply(
        self, folder: Path, *, saved: Path, scores: Mapping[int, float], is_valid: Callable[[Path], bool]
    ) -> list[Path]:
        """Delete the checkpoints that no rule names, and return them.

        Goes from the newest to the oldest and deletes nothing before it has seen `keep_last` valid ones: the newest
        valid checkpoint survives a kill at any time. A deletion is one rename: after a kill the name is there or gone.

        Args:
            folder: the checkpoints of one run.
            saved: a checkpoint to keep whatever its step is: newer ones may be unreadable now.
            scores: scores of the steps that were evaluated.
            is_valid: reads all of a checkpoint, unless that was done before; quarantines a damaged one.

        Raises:
            OSError: a rename failed; no checkpoint is half deleted under its name.
        """
        checkpoints = folders.committed(folder)
        best = self.best({step: scores[step] for step, _ in checkpoints if step in scores})
        regular = self._newest_regular([step for step, _ in checkpoints])
        num_valid, deleted = 0, []
        for step, path in checkpoints:
            if num_valid < self.keep_last:
                num_valid += is_valid(path)
            elif not (path == saved or step in (best, regular) or self.is_nth(step) or folders.is_pinned(path)):
                folders.discard(path)
                deleted.append(path)
        folders.discard_old_bad(folder)
        return deleted

    def _newest_regular(self, steps: list[int]) -> int | None:
        if not self.newest_of_every_steps or not steps:
            return None
        return next((step for step in steps if step % self.newest_of_every_steps == 0), steps[-1])

    def is_nth(self, step: int) -> bool:
        """Return True if `keep_every_steps` keeps the checkpoint of this step for good."""
        return self.keep_every_steps > 0 and step % self.keep_every_steps == 0
