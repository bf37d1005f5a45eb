"""Rows held out for evaluation, chosen as a function only of the number of rows and the fraction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_trainer.config.data_files.array_files import num_held_out
from hpc_trainer.training.data.protocol import Split

_SEED = 0
_BLOCK = 1 << 20


def part_of(num_rows: int, fraction: float, split: Split) -> NDArray[np.unsignedinteger[Any]]:
    """Return the rows of a split in their order; evaluation has the rows with the smallest words of PCG64's raw bits.

    numpy never changes these bits, unlike the output of `Generator.permutation`. They are computed twice, in blocks,
    because the words of 10 million rows would take 80 MB.
    """
    count = num_held_out(num_rows, fraction)
    largest = _smallest(num_rows, count)
    wanted = count if split == "eval" else num_rows - count
    rows: NDArray[Any] = np.empty(wanted, dtype=np.uint32 if num_rows <= 2**32 else np.uint64)
    done = 0
    for start, words in _words(num_rows):
        chosen = np.flatnonzero((words <= largest) == (split == "eval"))
        rows[done : done + len(chosen)] = chosen + start
        done += len(chosen)
    return rows


def _smallest(num_rows: int, count: int) -> np.uint64:
    """Return the largest of the `count` smallest words."""
    # With a probability of 1 - 10^-9 there are `count` or a few more words below this bound.
    bound = (count + 6 * count**0.5 + 6) / num_rows
    kept = [words[words < np.uint64(bound * 2**64)] if bound < 1 else words for _, words in _words(num_rows)]
    candidates = np.concatenate(kept)
    if len(candidates) < count:
        candidates = np.concatenate([words for _, words in _words(num_rows)])
    word: np.uint64 = np.partition(candidates, count - 1)[count - 1]
    return word


def _words(num_rows: int) -> Iterator[tuple[int, NDArray[np.uint64]]]:
    bits = np.random.PCG64(_SEED)
    for start in range(0, num_rows, _BLOCK):
        yield start, bits.random_raw(min(_BLOCK, num_rows - start))
