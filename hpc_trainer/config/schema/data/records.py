"""`data/` for a user's own files: tokens, arrays, tables, Hugging Face data sets; one dataclass each."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar

from hpc_trainer.config.schema.data.shipped import DataConfig
from hpc_trainer.config.schema.key import ALWAYS, COUNTS, RULED, SAFE, key


@dataclass(kw_only=True, slots=True)
class TokensConfig(DataConfig):
    """Folders of tokens, memory-mapped; documents packed to windows without padding, several sources by weight."""

    takes_fed: ClassVar[bool] = True
    is_text: ClassVar[bool | None] = True
    name: str = "tokens"
    _target_: str = "hpc_trainer.datasets.records.tokens.build"
    path: str | None = key(None, ALWAYS, COUNTS, SAFE)
    """Prepared folder: with parts train/ and eval/, or one part alone. For several folders use `sources`."""
    sources: dict[str, float] = key({}, ALWAYS, COUNTS, SAFE, limits="> 0")
    """Folders and their weights in an epoch, as {/data/code: 3, /data/books: 1}; in place of `path`."""
    seq_len: int = key(128, ALWAYS, COUNTS, limits="≥ 2")
    """Tokens that a sample predicts."""
    eval_fraction: float = key(0.1, RULED, COUNTS, limits="(0, 1)")
    """Share of a source without eval/, at its end, held out for evaluation."""
    mask_document_starts: bool = key(False, ALWAYS, COUNTS)
    """The first token of a document is no target, because nothing before it predicts it. Needs tokens with ends of
    documents."""


@dataclass(kw_only=True, slots=True)
class ArraysConfig(DataConfig):
    """Inputs and targets as arrays: a folder of .npy files (memory-mapped), an .npz or a .parquet file."""

    takes_task: ClassVar[bool] = True
    is_text: ClassVar[bool | None] = False
    name: str = "arrays"
    _target_: str = "hpc_trainer.datasets.records.arrays.build"
    path: str | None = key(None, ALWAYS, COUNTS, SAFE)
    """Folder with inputs.npy and targets.npy, or file with arrays or columns of these names."""
    inputs: str = key("inputs", ALWAYS, COUNTS)
    """Name of the array or column of inputs, numbers [rows, ...]."""
    targets: str = key("targets", ALWAYS, COUNTS)
    """Name of the array or column of targets [rows, ...]: classes as whole numbers, or numbers."""
    eval_path: str | None = key(None, ALWAYS, COUNTS, SAFE)
    """Folder or file for evaluation, of the same form; null: a part of `path`."""
    eval_fraction: float = key(0.1, RULED, COUNTS, limits="(0, 1)")
    """Share of the rows held out for evaluation, by a fixed shuffle."""
    num_classes: int | None = key(None, ALWAYS, COUNTS, limits="≥ 2")
    """Number of classes; null: the largest target in `path` + 1."""
    input_scale: float = key(1.0, ALWAYS, COUNTS, limits="> 0")
    """Factor on inputs: 0.00392157 maps bytes to 0 to 1."""


class Missing(str, enum.Enum):
    """Handling of a missing value of a table."""

    refuse = "refuse"
    mean = "mean"


class Encoding(str, enum.Enum):
    """Encoding of a category as numbers."""

    one_hot = "one_hot"
    ordinal = "ordinal"


@dataclass(kw_only=True, slots=True)
class TableConfig(DataConfig):
    """Rows of a .csv or .parquet file: numbers standardised, categories encoded, by the training rows alone."""

    takes_fed: ClassVar[bool] = True
    takes_task: ClassVar[bool] = True
    is_text: ClassVar[bool | None] = False
    name: str = "table"
    _target_: str = "hpc_trainer.datasets.records.table.build"
    path: str | None = key(None, ALWAYS, COUNTS, SAFE)
    """File of the table. A .csv has the names of its columns in its first line."""
    target: str = key("target", ALWAYS, COUNTS)
    """Column to predict: any values with task=classification, numbers with task=regression."""
    numeric: list[str] | None = key(None, ALWAYS, COUNTS)
    """Columns of numbers; null: all columns of numbers that no other key names."""
    categorical: list[str] | None = key(None, ALWAYS, COUNTS)
    """Columns of categories; null: all columns of texts or booleans that no other key names."""
    encoding: Encoding = key(Encoding.one_hot, ALWAYS, COUNTS)
    """one_hot: an input for each category and one for unknown ones. ordinal: one input, the category's number scaled to
    0 to 1."""
    missing: Missing = key(Missing.refuse, ALWAYS, COUNTS)
    """refuse: an error with column and row. mean: a missing number becomes the column's mean, a missing category
    unknown."""
    eval_path: str | None = key(None, ALWAYS, COUNTS, SAFE)
    """File for evaluation, with the same columns; null: a part of `path`."""
    eval_fraction: float = key(0.1, RULED, COUNTS, limits="(0, 1)")
    """Share of the rows held out for evaluation, by a fixed shuffle."""


@dataclass(kw_only=True, slots=True)
class HfDatasetConfig(DataConfig):
    """A folder of Hugging Face's `Dataset.save_to_disk` or `DatasetDict.save_to_disk`, memory-mapped."""

    takes_fed: ClassVar[bool] = True
    takes_task: ClassVar[bool] = True
    name: str = "hf_dataset"
    _target_: str = "hpc_trainer.datasets.records.hf_dataset.build"
    path: str | None = key(None, ALWAYS, COUNTS, SAFE)
    """Folder that `save_to_disk` made."""
    input: str = key("image", ALWAYS, COUNTS)
    """Column of inputs: images, numbers, lists of numbers, or with seq_len lists of tokens."""
    target: str | None = key(None, ALWAYS, COUNTS)
    """Column of targets; null: label, or with seq_len the token after each token."""
    train_split: str = key("train", ALWAYS, COUNTS)
    """Name of the training split, if the folder has several splits."""
    eval_split: str | None = key(None, ALWAYS, COUNTS)
    """Name of the split for evaluation; null: a part of the training split."""
    eval_fraction: float = key(0.1, RULED, COUNTS, limits="(0, 1)")
    """Share of the training split held out for evaluation, by a fixed shuffle."""
    image_size: int | None = key(None, ALWAYS, COUNTS, limits="≥ 1")
    """Height and width to which images are resized (Pillow, bilinear); null: all images have the size of the first."""
    num_channels: int = key(3, ALWAYS, COUNTS, limits="1 or 3")
    """Channels of images: 1 for grey, 3 for colour."""
    seq_len: int | None = key(None, ALWAYS, COUNTS, limits="≥ 2")
    """Tokens that a sample predicts. Longer lists are cut, shorter ones are padded with targets that do not count."""
    vocab_size: int | None = key(None, ALWAYS, COUNTS, limits="2 to 2,147,483,648")
    """Number of tokens in the vocabulary; goes with seq_len."""
