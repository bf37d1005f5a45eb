"""Tasks of a run: the loss of a batch, and the metrics of an evaluation. They are small, with a file each.

Each file has a `build(config)` that `task._target_` names. Its result follows `hpc_trainer.tasks.protocol.Task`.
"""
