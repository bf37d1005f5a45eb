"""`data/`: data sets, one dataclass each; `_target_` names the builder in `hpc_trainer.datasets`."""
