"""Rows held out for evaluation: which ones is a function of their number and the fraction alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_trainer.config.data_files.array_files import num_held_out
from hpc_trainer.datasets.protocol import Split

_SEED = 0
_BLOCK = 1 << 20


def part_of(num_rows: int, fraction: float, split: Split) -> NDArray[np.unsignedinteger[Any]]:
    """Rows of a split in their order: evaluation has those with the smallest words of PCG64's raw bits.

    numpy promises these bits for ever, but not the output of `Generator.permutation`. They are made twice, in blocks:
    of 10 million rows all words would take 80 MB.
    """
    count = num_held_out(num_rows, fraction)
    largest = _smallest(num_rows, count)
    wanted = count if split == "eval" else num_rows - count
    rows: NDArray[Any] = np.empty(wanted, dtype=np.uint32 if num_rows <= 2**32 else np.uint64)
    done = 0
    for start, words in _words(num_rows):
        found = np.flatnonzero((words <= largest) == (split == "eval"))
        rows[done : done + len(found)] = found + start
        done += len(found)
    return rows


def _smallest(num_rows: int, count: int) -> np.uint64:
    """The largest of the `count` smallest words."""
    # Of words below this bound there are `count` or a few more, but with a probability of 1 in 10^9.
    bound = (count + 6 * count**0.5 + 6) / num_rows
    kept = [words[words < np.uint64(bound * 2**64)] if bound < 1 else words for _, words in _words(num_rows)]
    found = np.concatenate(kept)
    if len(found) < count:
        found = np.concatenate([words for _, words in _words(num_rows)])
    word: np.uint64 = np.partition(found, count - 1)[count - 1]
    return word


def _words(num_rows: int) -> Iterator[tuple[int, NDArray[np.uint64]]]:
    bits = np.random.PCG64(_SEED)
    for start in range(0, num_rows, _BLOCK):
        yield start, bits.random_raw(min(_BLOCK, num_rows - start))
