"""Protocol of a source of pictures: bytes and a class for each number. No torch: `data check` uses sources too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hpc_trainer.config.schema.data.images import ImagesConfig, ImageShardsConfig
from hpc_trainer.data.files import Problem
from hpc_trainer.data.images.folder import FolderSource
from hpc_trainer.data.images.shards import ShardSource


class PictureSource(Protocol):
    """Pictures of one split, numbered from 0, with the same numbers on every node."""

    num_classes: int

    @property
    def classes(self) -> Sequence[str] | None:
        """Return the class names by number; None if the classes have no names."""
        ...

    def __len__(self) -> int: ...

    def labels(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the class numbers of these pictures, 0 to num_classes - 1."""
        ...

    def place(self, row: int) -> tuple[str, int | None]:
        """Return the picture's file, and the byte at which the picture begins; None if the file is the picture."""
        ...

    def read(self, row: int) -> bytes:
        """Return the picture's bytes as they are stored.

        Raises:
            DataError: the bytes cannot be read.
        """
        ...

    def digest(self) -> str:
        """Return a SHA-256 that is the same for equal names, sizes and classes."""
        ...

    def missing(self) -> Iterator[Problem]:
        """Return the files that are known to be missing on this node; quick, because no picture is read."""
        ...

    def damaged(self) -> Iterator[Problem]:
        """Return the files that are missing, or whose bytes differ from a recorded checksum; read all files."""
        ...


def open_source(config: ImagesConfig, split: str, classes: Sequence[str] | None = None) -> PictureSource:
    """Open the pictures of one split, `train` or `eval`.

    Args:
        classes: class names of a model; pictures get the model's class numbers if names are shared.

    Raises:
        DataError: a folder, an index or a shard is missing or invalid.
    """
    if isinstance(config, ImageShardsConfig):
        return ShardSource(config, split, classes)
    return FolderSource(config, split, classes)
