"""Random bits that are a function only of (seed, stream, index), for data sets that are generated, not read.

They come from Philox (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), which computes any part of
its stream directly: sample i is the same in every batch, process and order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

STREAMS = {"train": 1, "eval": 2}
"""Streams of the two splits; stream 0 is for data that they share."""


def random_words(seed: int, stream: int, index: int, count: int) -> NDArray[np.uint64]:
    """Return `count` uniform 64-bit words, [count]; takes some 10 µs and 2 ns a word.

    Args:
        seed: 0 to 2**64 - 1.
        stream: 0 to 2**64 - 1; two streams never overlap.
        index: number of the sample, 0 to 2**64 - 1.
        count: ≥ 0.
    """
    # The stream is the counter's highest word, which counting never reaches.
    bits = np.random.Philox(key=np.array([seed, index], dtype=np.uint64), counter=[0, 0, 0, stream])
    words: NDArray[np.uint64] = bits.random_raw(count)
    return words


def random_bytes(seed: int, stream: int, index: int, count: int) -> NDArray[np.uint8]:
    """Return `count` uniform bytes, [count], the same for both byte orders; arguments as in `random_words`."""
    words = random_words(seed, stream, index, (count + 7) // 8).astype("<u8", copy=False)
    return words.view(np.uint8)[:count]
