"""`train.guard`: spikes are skipped, or the run goes back before them."""

from hpc_trainer.config.feature import Feature

FEATURE = Feature(
    name="spike_guard",
    on="train.guard",
    off="train.guard.on_spike=none",
    example="train.guard.on_spike=skip",
)
