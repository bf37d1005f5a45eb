"""Facts about a data set before a run, by its kind: from its keys alone, or from the headers of its files.

A data set without an entry here is accepted unchecked: its builder reports problems, on the nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hpc_trainer.config.data_files.array_files import check_headers, num_train_rows
from hpc_trainer.config.data_files.hf_folder import check_hf_folder
from hpc_trainer.config.data_files.image_files import image_problems, num_train_images
from hpc_trainer.config.data_files.table_files import check_table
from hpc_trainer.config.data_files.text_file import num_train_windows, window_problems
from hpc_trainer.config.data_files.token_sources import check_tokens, num_train_samples, vocabulary
from hpc_trainer.config.schema.data.images import ImagesConfig
from hpc_trainer.config.schema.data.records import ArraysConfig, HfDatasetConfig, TableConfig, TokensConfig
from hpc_trainer.config.schema.data.shipped import (
    DataConfig,
    DigitsConfig,
    SyntheticImagesConfig,
    SyntheticTokensConfig,
    TextBytesConfig,
)
from hpc_trainer.config.schema.task import TargetKind

_NUM_DIGITS = 1797
_NUM_BYTES = 256


def _none(data: Any) -> int | None:
    return None


def _nothing(data: Any) -> Iterable[str]:
    return ()


def _as_it_is(data: Any, kind: TargetKind) -> object:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Functions for one kind of data set; each is called with the data set's configuration."""

    num_train_samples: Callable[[Any], int | None] = _none
    """Number of training samples; None, or 0, if only reading gives it or something is wrong."""
    vocabulary: Callable[[Any], int | None] = _none
    """Number of ids of text that a model distinguishes."""
    problems: Callable[[Any], Iterable[str]] = _nothing
    """Problems with the keys and files, a line each."""
    check: Callable[[Any, TargetKind], object] = _as_it_is
    """Check of the files, with targets read as the second argument says. Raises ConfigError or DataError for the first
    problem."""


_KNOWN: dict[type[DataConfig], Known] = {
    DigitsConfig: Known(num_train_samples=lambda data: _NUM_DIGITS - data.num_eval),
    SyntheticImagesConfig: Known(num_train_samples=lambda data: data.num_samples),
    SyntheticTokensConfig: Known(
        num_train_samples=lambda data: data.num_samples, vocabulary=lambda data: data.vocab_size
    ),
    TextBytesConfig: Known(
        num_train_samples=num_train_windows, vocabulary=lambda _: _NUM_BYTES, problems=window_problems
    ),
    ImagesConfig: Known(num_train_samples=num_train_images, problems=image_problems),
    TokensConfig: Known(
        num_train_samples=num_train_samples,
        vocabulary=lambda data: vocabulary(data.path, data.sources),
        check=lambda data, _: check_tokens(data),
    ),
    ArraysConfig: Known(num_train_samples=num_train_rows, check=check_headers),
    TableConfig: Known(check=check_table),
    HfDatasetConfig: Known(vocabulary=lambda data: data.vocab_size, check=check_hf_folder),
}


def known_of(data: DataConfig) -> Known:
    """Return the entry for the data set's class, or for the nearest base class; an entry without facts for others."""
    kinds: tuple[Any, ...] = type(data).__mro__
    return next((_KNOWN[kind] for kind in kinds if kind in _KNOWN), Known())


def known_vocabulary(data: DataConfig) -> int | None:
    """Return the number of ids of text that a model distinguishes, if the configuration or its folder gives it."""
    return known_of(data).vocabulary(data)
