"""Windows of bytes from one memory-mapped file: next-byte prediction on any text; no tokenizer, no copy."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpc_trainer.config.schema.data import BYTES
from hpc_trainer.config.user_files import open_given
from hpc_trainer.data.files import spread_digest
from hpc_trainer.data.text import TextBytesConfig
from hpc_trainer.errors import DataError
from hpc_trainer.training.data.preprocessing import tokens
from hpc_trainer.training.data.protocol import Split, index_array

_BUILT_IN_TEXT = "pydoc_data.topics"


class TextBytes:
    """Windows of seq_len + 1 bytes; window i begins at byte `start + i * seq_len` and ends before `stop`.

    Inputs are the first seq_len bytes, targets the last seq_len: each byte's target is the byte that follows.
    A pickled copy has no bytes; it maps the file itself at its first batch, as loader processes need.
    """

    num_classes = 256
    all_targets_count = True

    def __init__(self, path: Path, *, seq_len: int, start: int, stop: int) -> None:
        self.input_shape = (seq_len,)
        self.preprocessing = tokens(seq_len=seq_len, vocab_size=self.num_classes, tokenizer=BYTES)
        self._path = path
        self._seq_len = seq_len
        self._start = start
        self._stop = stop
        self._bytes: NDArray[np.uint8] | None = None

    def __len__(self) -> int:
        return (self._stop - self._start - 1) // self._seq_len

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return tokens int64 [batch, seq_len] and targets of the same shape.

        Raises:
            DataError: the file is missing or has shrunk.
        """
        rows = index_array(indices, len(self))
        if self._bytes is None:
            self._bytes = _map(self._path, self._stop)
        windows = np.empty((len(rows), self._seq_len + 1), dtype=np.uint8)
        for slot, index in enumerate(rows.tolist()):
            first = self._start + index * self._seq_len
            windows[slot] = self._bytes[first : first + self._seq_len + 1]
        sequences = torch.from_numpy(windows).long()
        return sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()

    def fingerprint(self) -> str:
        """Return the digest of this part of the file; see `spread_digest`."""
        return spread_digest(self._path, self._start, self._stop)

    def __getstate__(self) -> dict[str, Any]:
        # A pickled memmap is a copy of all its bytes.
        return {**self.__dict__, "_bytes": None}


def build(config: TextBytesConfig, split: Split) -> TextBytes:
    """Build the windows of the train part (the file's beginning) or the eval part (its last `eval_fraction`).

    The parts share no byte.

    Raises:
        DataError: the file is missing, unreadable, or too small for one window in each part.
    """
    path = built_in_text() if config.path is None else Path(config.path).expanduser().absolute()
    size = _size(path)
    num_eval = round(size * config.eval_fraction)
    cut = size - num_eval
    smaller = min(cut, num_eval)
    if smaller <= config.seq_len:
        fix = f"set data.seq_len={smaller - 1} or less" if smaller > 2 else "choose a larger file"
        raise DataError(
            f"data.path={path} is too small: of {size} bytes {cut} are for train, {num_eval} for eval, "
            f"and each needs data.seq_len + 1 = {config.seq_len + 1}. Fix: {fix}, or change "
            f"data.eval_fraction={config.eval_fraction}."
        )
    start, stop = (0, cut) if split == "train" else (cut, size)
    return TextBytes(path, seq_len=config.seq_len, start=start, stop=stop)


def built_in_text() -> Path:
    """Return the file of Python's language reference for `pydoc`: about 0.7 MB of English, found without importing it.

    The text differs between Python versions; set `data.path` for figures that must be comparable across versions.

    Raises:
        DataError: this Python lacks the file.
    """
    try:
        spec = importlib.util.find_spec(_BUILT_IN_TEXT)
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        raise DataError(
            f"data.path=null means the text of {_BUILT_IN_TEXT}, which this Python lacks (some systems package it "
            "separately). Fix: set data.path to any text file."
        )
    return Path(spec.origin)


def _size(path: Path) -> int:
    """Return the size of a readable file in bytes.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        with open_given(path) as file:
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(
            f"data.path={path} must be a file that this user can read, on every node: {error.strerror}. "
            "Fix: check the path (a relative one starts at the working folder) and its permissions."
        ) from error


def _map(path: Path, stop: int) -> NDArray[np.uint8]:
    size = _size(path)
    if size < stop:
        raise DataError(
            f"data.path={path} has shrunk to {size} bytes since the run began; its windows reach to {stop}. "
            "Fix: restore the file, or start a new run."
        )
    # A plain array over the map, because slicing np.memmap itself makes a memmap object each time.
    return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
