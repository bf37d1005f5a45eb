"""Numbers of samples that go through the model at a time."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_trainer.config.schema.train import LoopConfig

LEAST_EVALUATED = 256
"""Minimum samples of a forward pass in evaluations, if more than the micro-batch fits in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """Samples per forward pass in training and in evaluations, and forward passes per step."""

    micro_batch_size: int
    grad_accum_steps: int
    eval_batch_size: int

    @classmethod
    def of(cls, micro_batch_size: int, grad_accum_steps: int) -> BatchSizes:
        """Return these sizes with the default size for evaluations."""
        return cls(
            micro_batch_size=micro_batch_size,
            grad_accum_steps=grad_accum_steps,
            eval_batch_size=max(LEAST_EVALUATED, micro_batch_size),
        )

    @classmethod
    def given(cls, train: LoopConfig) -> BatchSizes:
        """Return the sizes of the configuration; sizes that are still to be determined are 1."""
        return cls.of(train.given_micro_batch_size or 1, train.grad_accum_steps or 1)
