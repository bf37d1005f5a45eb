"""Random bits that are a function of (seed, stream, index) alone, for data sets that are made and not read.

They come from Philox (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), which computes any part of
its stream directly: sample i is the same in whatever batch, process or order it is asked for.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

STREAMS = {"train": 1, "eval": 2}
"""Of the two splits; 0 is for what they share."""


def random_words(seed: int, stream: int, index: int, count: int) -> NDArray[np.uint64]:
    """`count` uniform 64-bit words, [count]; takes some 10 µs and 2 ns a word.

    Args:
        seed: 0 to 2**64 - 1.
        stream: 0 to 2**64 - 1; two streams never meet.
        index: of the sample, 0 to 2**64 - 1.
        count: ≥ 0.
    """
    # The stream sits in the counter's highest word, which counting never reaches.
    bits = np.random.Philox(key=np.array([seed, index], dtype=np.uint64), counter=[0, 0, 0, stream])
    words: NDArray[np.uint64] = bits.random_raw(count)
    return words


def random_bytes(seed: int, stream: int, index: int, count: int) -> NDArray[np.uint8]:
    """`count` uniform bytes, [count]; the same on machines of either byte order. Arguments as of `random_words`."""
    words = random_words(seed, stream, index, (count + 7) // 8).astype("<u8", copy=False)
    return words.view(np.uint8)[:count]
