"""Formats and choices of FSDP2 that test_fsdp_formats_ranks.py plays."""

from __future__ import annotations

import dataclasses

from hpc_trainer.config.schema.parallel import Dtype, FsdpDtype, ParallelConfig, Strategy

NUM_STEPS, WISH, NUM_BLOCKS = 10, 8, 2
FSDP = ParallelConfig(strategy=Strategy.fsdp)
BF16 = dataclasses.replace(FSDP, param_dtype=FsdpDtype.bf16)
LOW = dataclasses.replace(BF16, reduce_dtype=FsdpDtype.bf16)
# Name -> (ranks, how they share the work, number format of the step).
WAYS: dict[str, tuple[int, ParallelConfig, Dtype]] = {
    "fp32": (2, FSDP, Dtype.fp32),
    "fp32_reduced": (2, dataclasses.replace(FSDP, reduce_dtype=FsdpDtype.bf16), Dtype.fp32),
    "fp32_kept": (2, dataclasses.replace(FSDP, reshard_after_forward=False), Dtype.fp32),
    "bf16": (2, FSDP, Dtype.bf16),
    "bf16_gathered": (2, BF16, Dtype.bf16),
    "bf16_reduced": (2, LOW, Dtype.bf16),
    "bf16_kept": (2, dataclasses.replace(BF16, reshard_after_forward=False), Dtype.bf16),
    "fp16": (2, FSDP, Dtype.fp16),
    "fp16_reduced": (
        2, dataclasses.replace(FSDP, param_dtype=FsdpDtype.fp16, reduce_dtype=FsdpDtype.fp16), Dtype.fp16,
    ),
    "hsdp": (4, dataclasses.replace(LOW, data_parallel_replicate=2), Dtype.bf16),
    "fsdp_tp": (4, dataclasses.replace(LOW, tensor_parallel=2, reshard_after_forward=False), Dtype.bf16),
    "bf16_four": (4, FSDP, Dtype.bf16),
}  # fmt: skip
