"""Sparsity of a run after a number of steps: a function of the step, so a resumed run needs no state for it."""

from __future__ import annotations

from hpc_trainer.config.schema.features.compress import PruneConfig
from hpc_trainer.config.schema.train import TrainConfig


def end_step(config: TrainConfig) -> int:
    """Return the step after which `prune.sparsity` is reached."""
    prune = config.prune
    if prune.end_step is not None:
        return prune.end_step
    return max(prune.start_step, config.train.num_steps // 2)


def is_due(config: TrainConfig, step: int) -> bool:
    """Return True if what becomes zero is chosen anew when `step` steps are done."""
    start, end = config.prune.start_step, end_step(config)
    return step == end or (start < step < end and (step - start) % config.prune.every_steps == 0)


def share_done(config: TrainConfig, step: int) -> float:
    """Return the share of the final sparsity that is reached after `step` steps; 0 to 1.

    1 - (1 - t)^3, where t goes from 0 at start_step to 1 at end_step (Zhu and Gupta 2017, arXiv:1710.01878): many
    weights are pruned while many are superfluous, few at the end.
    """
    start, end = config.prune.start_step, end_step(config)
    if step >= end:
        return 1.0
    return 1.0 - (1.0 - max(0, step - start) / (end - start)) ** 3


def final_sparsity(prune: PruneConfig) -> float:
    """Return the sparsity that is asked for, 0 to 1."""
    return 1.0 - prune.n / prune.m if prune.method.name == "n_m" else prune.sparsity
