"""Random tokens of any vocabulary, generated on the fly for speed and shape tests of language models. No file.

Some tokens are more common than others: a token is floor(V a b) of two uniform a, b in [0, 1), so token t has the
probability density -ln(t / V). A model can learn only these frequencies: its loss falls from ln V to about ln V - 0.42.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hpc_trainer.config.schema.data.shipped import SyntheticTokensConfig
from hpc_trainer.data.generated.random_bits import STREAMS, random_words
from hpc_trainer.training.data.protocol import Split, index_array


class SyntheticTokens:
    """Windows of seq_len + 1 tokens; window i depends only on the data seed, the split, i and the sizes."""

    all_targets_count = True

    def __init__(self, config: SyntheticTokensConfig, split: Split) -> None:
        self.input_shape = (config.seq_len,)
        self.num_classes = config.vocab_size
        self._length = config.num_samples if split == "train" else config.num_eval
        self._seed = config.data_seed
        self._stream = STREAMS[split]

    def __len__(self) -> int:
        return self._length

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return tokens int64 [batch, seq_len] and targets of the same shape: each token's target is the next token."""
        rows = index_array(indices, len(self))
        (seq_len,) = self.input_shape
        words = np.empty((len(rows), seq_len + 1), dtype=np.uint64)
        for slot, index in enumerate(rows.tolist()):
            words[slot] = random_words(self._seed, self._stream, index, seq_len + 1)
        # Only integers, so that tokens do not depend on a machine's floating point.
        half = np.uint64(32)
        product = (words >> half) * (words & np.uint64(2**32 - 1)) >> half
        tokens = torch.from_numpy((product * np.uint64(self.num_classes) >> half).astype(np.int64))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def build(config: SyntheticTokensConfig, split: Split) -> SyntheticTokens:
    """Build the train or the eval windows."""
    return SyntheticTokens(config, split)
