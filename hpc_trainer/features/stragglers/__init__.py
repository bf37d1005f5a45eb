"""Ranks that hold all others up, by name: rank, node and factor. Part of each run of several ranks."""

from hpc_trainer.config.table.feature import Feature

FEATURE = Feature()
