"""Split of pictures into training and evaluation: by separate folders, or by a hash. No torch."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_trainer.config.schema.data.images import EVAL_FOLDERS, ImagesConfig
from hpc_trainer.errors import DataError

_WORD = 2**64


def split_folder(config: ImagesConfig, split: str) -> Path:
    """Return the folder of a split's pictures: its own folder, or with `eval_fraction` the shared folder.

    Raises:
        DataError: the split's folder does not exist.
    """
    path = config.folder
    if config.eval_fraction is not None:
        return path
    names = ("train",) if split == "train" else EVAL_FOLDERS
    folder = next((path / name for name in names if (path / name).is_dir()), None)
    if folder is None:
        raise DataError(
            f"data.path={config.path} must hold the folders train and eval (data.eval_fraction=null); {names[0]} is "
            "not there, as this node sees it. Fix: make it, or hold out a share of all: data.eval_fraction=0.1."
        )
    return folder


def is_held_out(name: str, eval_fraction: float) -> bool:
    """Return True if a file belongs to the eval split, by a hash of its name.

    The result is the same on any machine, and does not depend on other files.

    Args:
        name: the file's name with its folders, separated by /.
    """
    return _hash(name) < int(eval_fraction * _WORD)


def held_out_rows(rows: NDArray[Any], shard_names: list[str], eval_fraction: float) -> NDArray[np.bool_]:
    """Return True for each row of an index that belongs to the eval split, by its shard's name and its offset."""
    seeds = np.array([_hash(name) for name in shard_names], dtype=np.uint64)
    limit = np.uint64(int(eval_fraction * _WORD))
    held_out = np.empty(len(rows), dtype=np.bool_)
    for start in range(0, len(rows), 1 << 18):  # in blocks, so that few of 10 million rows are in memory at once
        part = rows[start : start + (1 << 18)]
        held_out[start : start + len(part)] = _mixed(seeds[part["shard"]] ^ part["offset"].astype(np.uint64)) < limit
    return held_out


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=8).digest(), "little")


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply splitmix64's output function (Steele, Lea and Flood 2014): each output bit depends on all input bits."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
