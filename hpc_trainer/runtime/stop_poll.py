"""Polls on a stop by a collective of their own: after the step of an own loop, and inside an evaluation.

The shared loop's steps need none: there the gradients carry the votes (`training/parallel/share.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.runtime.stop import StopFlag
from hpc_trainer.runtime.tensors import LateFlag


@dataclass(frozen=True, slots=True)
class StopPoll:
    """Whether any rank of `group` got a stop signal; `flag` is this rank's."""

    group: RankGroup
    flag: StopFlag

    def ask(self) -> bool:
        """The same on all ranks, now; on several GPUs the step has to end for it. Collective."""
        return self._ask(0.0, lambda votes: votes.item() > 0)

    def series(self, after_s: float) -> Callable[[], bool]:
        """A collective call that is made again and again, for signals that are older than `after_s` seconds.

        On several GPUs a signal is heard one call later: to read this call's would wait for the device.
        """
        late = LateFlag()
        return lambda: self._ask(after_s, late.read)

    def _ask(self, after_s: float, read: Callable[[torch.Tensor], bool]) -> bool:
        wish = self.flag.age_s > after_s
        if self.group.world_size == 1:
            return wish
        return read(self.group.sum(torch.full((), float(wish), device=self.group.device)))
