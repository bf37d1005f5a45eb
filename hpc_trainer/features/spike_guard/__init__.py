"""`train.guard`: spikes are skipped, or the run returns to a checkpoint before them."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hpc_trainer.config.schema.key import ALWAYS, INCOMPATIBLE, ONCE_SET, SCHEDULE, key, only_with, section
from hpc_trainer.config.table.feature import Feature, Row


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
    """stop: the run ends as FAILED with the cause diverged. rollback: the run goes back as after a spike, and
    continues after the batches of the skipped steps."""
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


class Keys:
    """Key in the section `train`."""

    guard: GuardConfig = section(GuardConfig, ONCE_SET, INCOMPATIBLE)


FEATURE = Feature(
    on="train.guard.on_spike or train.guard.on_divergence",
    example="train.guard.on_spike=skip",
    logs=("spikes", "rollbacks"),
    excludes=(
        Row(
            "train.max_skipped_steps=null",
            "it needs the norm of each gradient, and none is computed",
            use="train.max_skipped_steps=10",
        ),
        Row(
            "checkpoint.every=auto",
            "it goes back to a step that checkpoint.every_steps divides, and auto saves at other steps",
            when="train.guard.on_spike=rollback or train.guard.on_divergence=rollback",
        ),
        Row(
            "precision=fp16",
            "it counts skipped steps, and fp16 skips some while it looks for its loss scale",
            when="train.guard.on_divergence=rollback",
            use="precision=bf16, or train.guard.on_divergence=stop",
        ),
        Row("parallel.sync", "ranks that step alone do not agree on a spike"),
        Row(
            "parallel.comm_hook=powersgd",
            "the gradient of a skipped step would stay in its memory",
            use="parallel.comm_hook=bf16",
        ),
        Row("parallel.pipeline_parallel", "the combination is untested"),
        Row("optim.in_backward", "a weight is updated before the norm of all gradients is known"),
        Row("optim.offload", "the combination is untested"),
    ),
)
