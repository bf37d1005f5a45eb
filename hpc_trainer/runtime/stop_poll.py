"""Polls for a stop by a separate collective: after the step of a user's own loop, and inside an evaluation.

The steps of the shared loop need no poll: there the gradients carry the votes (`training/parallel/share.py`).
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
    """Poll for a stop signal on any rank of `group`; `flag` is this rank's."""

    group: RankGroup
    flag: StopFlag

    def ask(self) -> bool:
        """Return True on all ranks if any got a stop signal; on several GPUs this waits for the step. Collective."""
        return self._ask(0.0, lambda votes: votes.item() > 0)

    def series(self, after_s: float) -> Callable[[], bool]:
        """Return a collective call for repeated polls, which ignores signals until they are `after_s` seconds old.

        On several GPUs a call returns the answer of the previous call: reading its own would wait for the device.
        """
        late = LateFlag()
        return lambda: self._ask(after_s, late.read)

    def _ask(self, after_s: float, read: Callable[[torch.Tensor], bool]) -> bool:
        wish = self.flag.age_s > after_s
        if self.group.world_size == 1:
            return wish
        return read(self.group.sum(torch.full((), float(wish), device=self.group.device)))
