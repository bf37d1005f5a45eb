"""Windows of tokens from prepared folders (`files.py`), memory-mapped; documents are packed without padding."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpc_trainer.data.files import Problem
from hpc_trainer.data.tokens import Source, TokensConfig, epoch_shares, find_sources
from hpc_trainer.data.tokens.files import check_tokens, read_tokens
from hpc_trainer.errors import DataError
from hpc_trainer.tasks.cross_entropy import IGNORED
from hpc_trainer.training.data.preprocessing import check_tokenizer
from hpc_trainer.training.data.preprocessing import tokens as described_tokens
from hpc_trainer.training.data.protocol import Split, index_array


class Tokens:
    """Windows of tokens from several sources, in fixed proportions.

    The source of sample i is a function of i alone, so that proportions are exact in each epoch. A source with fewer
    windows than its share starts again with its first window.

    A pickled copy has no tokens; it maps the files itself at its first batch, as loader processes need.
    """

    def __init__(self, sources: Sequence[Source], shares: Sequence[int], *, seq_len: int, mask_starts: bool) -> None:
        self.input_shape = (seq_len,)
        meta = sources[0].meta
        self.num_classes = meta.vocab_size
        self.preprocessing = described_tokens(
            seq_len=seq_len, vocab_size=meta.vocab_size, tokenizer=meta.tokenizer, sha256=meta.tokenizer_sha256
        )  # fmt: skip
        self.all_targets_count = not mask_starts
        self._end = sources[0].meta.end_of_document if mask_starts else None
        self._sources = sources
        self._stops = np.cumsum(shares)
        self._num_windows = np.array([source.num_windows(seq_len) for source in sources])
        self._tokens: list[NDArray[np.unsignedinteger[Any]]] = []

    def __len__(self) -> int:
        return int(self._stops[-1])

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return tokens int64 [batch, seq_len] and targets of the same shape: each token's target is the next token.

        Raises:
            DataError: a file is missing, or has a token outside the vocabulary.
        """
        rows = index_array(indices, len(self))
        if not self._tokens:
            self._tokens = [read_tokens(source.folder).tokens for source in self._sources]
        numbers = np.searchsorted(self._stops, rows, side="right")
        firsts = (rows - np.concatenate(([0], self._stops))[numbers]) % self._num_windows[numbers]
        (seq_len,) = self.input_shape
        windows = np.empty((len(rows), seq_len + 1), dtype=np.int64)
        for slot, (number, window) in enumerate(zip(numbers.tolist(), firsts.tolist(), strict=True)):
            first = self._sources[number].start + window * seq_len
            windows[slot] = self._tokens[number][first : first + seq_len + 1]
        if windows.size and int(windows.max()) >= self.num_classes:
            slot = int(windows.max(axis=1).argmax())
            raise DataError(
                f"{self._sources[numbers[slot]].folder} has the token {int(windows.max())}, and a vocabulary of "
                f"{self.num_classes}: it is damaged. Prepare it again, then submit again."
            )
        tokens = torch.from_numpy(windows)
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        if self._end is not None:
            targets = targets.masked_fill(inputs == self._end, IGNORED)  # a single row shares its inputs' storage
        return inputs, targets

    def fingerprint(self) -> str:
        """Return the SHA-256 (16 hex digits) of the folders' metadata, the parts that are used, and the shares."""
        facts = [[*source.meta.to_json().items(), source.start, source.stop] for source in self._sources]
        return hashlib.sha256(json.dumps([facts, self._stops.tolist()]).encode()).hexdigest()[:16]

    def problems(self) -> Iterator[Problem]:
        """Yield the folders whose bytes differ from their checksums, for `data check`."""
        for folder in dict.fromkeys(source.folder for source in self._sources):
            try:
                check_tokens(folder)
            except DataError as error:  # noqa: PERF203 -- each folder has its own error
                yield Problem(str(folder), str(error))

    def __getstate__(self) -> dict[str, Any]:
        # A pickled memmap is a copy of all its bytes.
        return {**self.__dict__, "_tokens": []}


def build(config: TokensConfig, split: Split, fed: Mapping[str, Any] | None = None) -> Tokens:
    """Build the windows of the train or the eval parts. An evaluation has each window of each source once.

    Args:
        fed: `preprocessing` of the model that is evaluated on the windows; its tokenizer must be that of the tokens.

    Raises:
        ConfigError: the sources have different tokenizers, or the parts are too small for a window.
        DataError: a folder is missing, unfinished or damaged, or its tokens are not of the model's tokenizer.
    """
    sources = find_sources(config, split)
    was = (fed or {}).get("preprocessing")
    if was is not None:
        meta = sources[0].meta
        check_tokenizer(was, meta.tokenizer_sha256, meta.tokenizer, str(sources[0].folder))
    for source in sources:
        read_tokens(source.folder)
    sizes = [source.num_windows(config.seq_len) for source in sources]
    shares = epoch_shares(sizes, [source.weight for source in sources]) if split == "train" else sizes
    return Tokens(sources, shares, seq_len=config.seq_len, mask_starts=config.mask_document_starts)
