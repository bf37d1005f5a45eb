"""`data/` of files that a person has: tokens, arrays, tables, Hugging Face data sets; one dataclass each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hpc_trainer.config.schema.data import DataConfig
from hpc_trainer.config.schema.key import ALWAYS, COUNTS, RULED, SAFE, key


@dataclass(kw_only=True, slots=True)
class TokensConfig(DataConfig):
    """Folders of tokens, memory-mapped; documents packed to windows without padding, several sources by weight."""

    name: str = "tokens"
    _target_: str = "hpc_trainer.datasets.tokens.build"
    path: str | None = key(None, ALWAYS, COUNTS, SAFE)
    """A prepared folder: with parts train/ and eval/, or one part alone; of several sources `sources` has them."""
    sources: dict[str, float] = key({}, ALWAYS, COUNTS, SAFE, limits="> 0")
    """Folders and how much of an epoch each makes up, as {/data/code: 3, /data/books: 1}; in place of `path`."""
    seq_len: int = key(128, ALWAYS, COUNTS, limits="≥ 2")
    """Tokens a sample predicts."""
    eval_fraction: float = key(0.1, RULED, COUNTS, limits="(0, 1)")
    """Share of a source without eval/, at its end, held out for evaluation."""
    mask_document_starts: bool = key(False, ALWAYS, COUNTS)
    """The first token of a document is no target: nothing before it tells it. Needs tokens with ends of documents."""


@dataclass(kw_only=True, slots=True)
class ArraysConfig(DataConfig):
    """Inputs and targets as arrays: a folder of .npy files (memory-mapped), an .npz or a .parquet file."""

    takes_task: ClassVar[bool] = True
    name: str = "arrays"
    _target_: str = "hpc_trainer.datasets.arrays.build"
    path: str | None = key(None, ALWAYS, COUNTS, SAFE)
    """A folder with inputs.npy and targets.npy, or a file with these as names of arrays or columns."""
    inputs: str = key("inputs", ALWAYS, COUNTS)
    """Name of the array or column of inputs, numbers [rows, ...]."""
    targets: str = key("targets", ALWAYS, COUNTS)
    """Name of that of targets [rows, ...]: classes as whole numbers, or numbers."""
    eval_path: str | None = key(None, ALWAYS, COUNTS, SAFE)
    """The same for evaluation; null: a part of `path`."""
    eval_fraction: float = key(0.1, RULED, COUNTS, limits="(0, 1)")
    """Share of the rows held out for evaluation, by a fixed shuffle."""
    num_classes: int | None = key(None, ALWAYS, COUNTS, limits="≥ 2")
    """Classes to tell apart; null: the largest target in `path` + 1."""
    input_scale: float = key(1.0, ALWAYS, COUNTS, limits="> 0")
    """Inputs are multiplied by it: 0.00392157 makes bytes 0 to 1."""
