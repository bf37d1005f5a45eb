"""What a source of pictures is: bytes and a class for each number. No torch: `data check` reads it too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hpc_trainer.config.schema.data.images import ImagesConfig, ImageShardsConfig
from hpc_trainer.datasets.images.folder import FolderSource
from hpc_trainer.datasets.images.shards import ShardSource
from hpc_trainer.datasets.problem import Problem


class PictureSource(Protocol):
    """Pictures of one split, numbered from 0: the same ones on every node."""

    num_classes: int

    @property
    def classes(self) -> Sequence[str] | None:
        """Their names, by number; None: they have none."""
        ...

    def __len__(self) -> int: ...

    def labels(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Class numbers, 0 to num_classes - 1."""
        ...

    def place(self, row: int) -> tuple[str, int | None]:
        """Which file, and the byte in it from which on the picture lies; None: the file is the picture."""
        ...

    def read(self, row: int) -> bytes:
        """The file's bytes as they are stored. Raises DataError: they cannot be read."""
        ...

    def digest(self) -> str:
        """SHA-256: the same where names, sizes and classes are the same."""
        ...

    def missing(self) -> Iterator[Problem]:
        """Files that are known to be missing on this node. Quick: reads no picture."""
        ...

    def damaged(self) -> Iterator[Problem]:
        """Files that are missing, or whose bytes are not those of a recorded checksum. Reads all of them."""
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
