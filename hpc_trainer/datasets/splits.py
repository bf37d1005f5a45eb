"""Rows held out for evaluation: which ones is a function of their number and the fraction alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpc_trainer.config.data_files.array_files import num_held_out
from hpc_trainer.datasets.protocol import Split

_SEED = 0


def part_of(num_rows: int, fraction: float, split: Split) -> NDArray[np.unsignedinteger]:
    """Rows of a split in their order: evaluation has those with the smallest words of PCG64's raw bits.

    numpy promises these bits for ever, but not the output of `Generator.permutation`. For 10 million rows it takes
    160 MB while it works.
    """
    words = np.random.PCG64(_SEED).random_raw(num_rows)
    count = num_held_out(num_rows, fraction)
    is_held_out = words <= np.partition(words, count - 1)[count - 1]
    del words
    rows = np.flatnonzero(is_held_out if split == "eval" else ~is_held_out)
    return rows.astype(np.uint32 if num_rows <= 2**32 else np.uint64)
