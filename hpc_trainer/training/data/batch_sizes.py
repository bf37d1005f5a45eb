"""How many samples go through the model at a time."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_trainer.config.schema.train import LoopConfig

LEAST_EVALUATED = 256
"""Samples of a forward pass of evaluations, where more than the micro-batch fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """Samples of a forward pass in training and in evaluations, and forward passes a step."""

    micro_batch_size: int
    grad_accum_steps: int
    eval_batch_size: int

    @classmethod
    def of(cls, micro_batch_size: int, grad_accum_steps: int) -> BatchSizes:
        """With those of evaluations that fit a run for which nobody chose."""
        return cls(
            micro_batch_size=micro_batch_size,
            grad_accum_steps=grad_accum_steps,
            eval_batch_size=max(LEAST_EVALUATED, micro_batch_size),
        )

    @classmethod
    def given(cls, train: LoopConfig) -> BatchSizes:
        """What the configuration says; one sample at a time where that is left to be found out."""
        return cls.of(train.given_micro_batch_size or 1, train.grad_accum_steps or 1)
