"""Memory of a training step: an estimate without a GPU (`plan --memory`), and the largest micro-batch that fits.

`train.micro_batch_size=auto` turns the search for that size on. The search asks the estimate for what a trial does not
have yet, such as the optimizer's state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpc_trainer.config.schema.key import ONCE_SET, SAFE, key, only_with
from hpc_trainer.config.table.feature import OF_SHARED_LOOP, Feature, Row

if TYPE_CHECKING:
    from hpc_trainer.config.schema.train import TrainConfig


class Keys:
    """Key in the section `train`."""

    memory_margin: float = key(0.1, only_with("train.micro_batch_size=auto"), ONCE_SET, SAFE, limits="[0, 1)")
    """Share of a rank's memory that `micro_batch_size=auto` leaves free, for fragments and communication."""


def _problems(config: TrainConfig) -> Iterator[str]:
    train = config.train
    if isinstance(train.micro_batch_size, str):
        yield f"train.micro_batch_size={train.micro_batch_size!r} must be a number ≥ 1, auto or null. Use auto."


FEATURE = Feature(
    on="train.micro_batch_size=auto",
    rank_half="hpc_trainer.features.memory.search",
    example="train.micro_batch_size=auto",
    excludes=(
        Row("train.grad_accum_steps", "it also chooses that number"),
        Row("train.logical_ranks", "those promise the same bits on any hardware, and what fits depends on it"),
        OF_SHARED_LOOP,
        Row("parallel.tensor_parallel", "it tries the whole model on one rank"),
        Row("hardware.device=mps|xla", "the memory of such a device is not counted"),
    ),
    problems_if_off=_problems,
)
