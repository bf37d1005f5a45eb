"""`train.guard`: reactions to a step with a gradient out of all proportion, and to a training that has diverged."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hpc_trainer.config.schema.key import ALWAYS, SCHEDULE, key, only_with


class OnSpike(str, enum.Enum):
    """Reaction to a step whose gradient norm is a spike."""

    none = "none"
    skip = "skip"
    rollback = "rollback"
    stop = "stop"


class OnDivergence(str, enum.Enum):
    """Reaction to more than `train.max_skipped_steps` skipped steps in a row."""

    stop = "stop"
    rollback = "rollback"


_LOOKS = only_with("train.guard.on_spike=skip", "train.guard.on_spike=rollback", "train.guard.on_spike=stop")
_GOES_BACK = only_with("train.guard.on_spike=rollback", "train.guard.on_divergence=rollback")


@dataclass(kw_only=True, slots=True)
class GuardConfig:
    on_spike: OnSpike = key(OnSpike.none, ALWAYS)
    """none: no check. skip: no rank applies the update. rollback: all ranks return to the last regular checkpoint and
    continue with the batch after the spike. stop: the run ends as FAILED with the cause diverged."""
    spike_factor: float = key(10.0, _LOOKS, resume=SCHEDULE, limits="> 1")
    """A spike is a gradient norm (before clipping) above this many times the median of the last `spike_window`
    norms."""
    spike_window: int = key(100, _LOOKS, limits="4 to 10,000")
    """Number of steps whose norms are remembered, without skipped steps. The steps that fill its first half are no
    spikes, whatever their norm."""
    on_divergence: OnDivergence = key(OnDivergence.stop, ALWAYS)
    """stop: the run ends as FAILED with the cause diverged. rollback: as for a spike, past the batches of those
    steps."""
    max_rollbacks: int = key(3, _GOES_BACK, resume=SCHEDULE, limits="≥ 1")
    """Rollbacks of the whole run; one more ends it, with the cause diverged."""

    @property
    def is_plain(self) -> bool:
        """True if the guard only detects steps that are not finite, and ends a run with too many of them."""
        return self.on_spike is OnSpike.none and self.on_divergence is OnDivergence.stop

    @property
    def rolls_back(self) -> bool:
        """True if anything leads to a rollback."""
        return self.on_spike is OnSpike.rollback or self.on_divergence is OnDivergence.rollback
