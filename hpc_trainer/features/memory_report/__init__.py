"""Report of the contents of a rank's memory, in memory.json and in the log. Part of each run."""

from hpc_trainer.config.table.feature import Feature

FEATURE = Feature()
