"""`train.logical_ranks`: the same bits on any number of ranks."""

from hpc_trainer.config.feature import Feature

FEATURE = Feature(
    name="logical_ranks",
    on="train.logical_ranks",
    off="train.logical_ranks=null",
    example="train.logical_ranks=4",
    num_threads=1,  # two add in another order than one, and two ranks may have fewer cores each than one has
)
