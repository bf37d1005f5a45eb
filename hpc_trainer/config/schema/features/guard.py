"""`train.guard`: what a step with a gradient out of all proportion leads to, and a training that has diverged."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hpc_trainer.config.schema.key import ALWAYS, SCHEDULE, key, only_with


class OnSpike(str, enum.Enum):
    """What follows a step whose gradient norm is a spike."""

    none = "none"
    skip = "skip"
    rollback = "rollback"
    stop = "stop"


class OnDivergence(str, enum.Enum):
    """What follows more than `train.max_skipped_steps` skipped steps in a row."""

    stop = "stop"
    rollback = "rollback"


_LOOKS = only_with("train.guard.on_spike=skip", "train.guard.on_spike=rollback", "train.guard.on_spike=stop")
_GOES_BACK = only_with("train.guard.on_spike=rollback", "train.guard.on_divergence=rollback")


@dataclass(kw_only=True, slots=True)
class GuardConfig:
    on_spike: OnSpike = key(OnSpike.none, ALWAYS)
    """none: nobody looks. skip: the update is not taken, by no rank. rollback: all ranks go back to the last regular
    checkpoint and go on with the batch after the spike. stop: the run ends, FAILED with the cause diverged."""
    spike_factor: float = key(10.0, _LOOKS, resume=SCHEDULE, limits="> 1")
    """A spike is a gradient norm (before clipping) above so many times the median of the last `spike_window`."""
    spike_window: int = key(100, _LOOKS, limits="4 to 10,000")
    """Steps whose norms are remembered, those of skipped steps left out; the first half of it is no spike
    whatever its norm."""
    on_divergence: OnDivergence = key(OnDivergence.stop, ALWAYS)
    """stop: the run ends, FAILED with the cause diverged. rollback: as for a spike, past the batches of those steps."""
    max_rollbacks: int = key(3, _GOES_BACK, resume=SCHEDULE, limits="≥ 1")
    """Rollbacks of the whole run; the next one ends it, with the cause diverged."""

    @property
    def is_plain(self) -> bool:
        """True if only steps that are not finite are looked for, and end the run where they are too many."""
        return self.on_spike is OnSpike.none and self.on_divergence is OnDivergence.stop

    @property
    def rolls_back(self) -> bool:
        """True if anything leads to a rollback."""
        return self.on_spike is OnSpike.rollback or self.on_divergence is OnDivergence.rollback
