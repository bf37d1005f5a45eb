"""Report of ranks that hold all others up: rank, node and factor. Part of each run of several ranks."""

from hpc_trainer.config.table.feature import Feature

FEATURE = Feature(rank_half="hpc_trainer.features.stragglers.ability")
