"""`data.stage_dir`: shards are copied to each node's own disk before the data are opened. It goes with everything."""

from hpc_trainer.config.table.feature import Feature

FEATURE = Feature()
