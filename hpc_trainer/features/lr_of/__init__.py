"""`optim.lr_of`: some weights have a learning rate of their own, as a multiple of that of all."""

from hpc_trainer.config.table.feature import OF_SHARED_LOOP, Feature

FEATURE = Feature(
    on="optim.lr_of",
    example="+optim.lr_of={*.bias:0.1}",
    excludes=(OF_SHARED_LOOP,),
    after=("custom_optim", "freeze", "lion", "muon"),
)
