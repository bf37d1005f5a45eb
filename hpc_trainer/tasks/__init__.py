"""What a run is trained for: the loss of a batch, and what an evaluation tells. Small, readable, a file each.

Each file has a `build(config)` that `task._target_` names. What is built follows `hpc_trainer.tasks.protocol.Task`.
"""
