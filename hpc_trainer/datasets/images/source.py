"""What a source of pictures is: bytes and a class for each number. No torch: `data check` reads it too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hpc_trainer.config.schema.data_images import ImagesConfig, ImageShardsConfig
from hpc_trainer.datasets.images.folder import FolderSource
from hpc_trainer.datasets.images.shards import ShardSource
from hpc_trainer.datasets.pictures import decode
from hpc_trainer.datasets.problem import Problem
from hpc_trainer.errors import BrokenPictureError, DataError


class PictureSource(Protocol):
    """Pictures of one split, numbered from 0: the same ones on every node."""

    num_classes: int

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


def open_source(config: ImagesConfig, split: str) -> PictureSource:
    """The pictures of one split, `train` or `eval`.

    Raises DataError: a folder, an index or a shard is missing, or has not what it must have.
    """
    if isinstance(config, ImageShardsConfig):
        return ShardSource(config, split)
    return FolderSource(config, split)


def problems(config: ImagesConfig, split: str) -> Iterator[Problem]:
    """Every file of a split that training could not use: each picture is decoded. In the order of the samples."""
    try:
        source = open_source(config, split)
    except DataError as error:
        yield Problem(str(config.folder), str(error))
        return
    missing = list(source.missing())
    yield from missing
    gone = {problem.file for problem in missing}
    for row in range(len(source)):
        problem = None if gone and source.place(row)[0] in gone else problem_of(source, row, config.num_channels)
        if problem is not None:
            yield problem


def problem_of(source: PictureSource, row: int, num_channels: int) -> Problem | None:
    """What is wrong with one picture; None: nothing. `data check` may ask many processes for a part each."""
    file, offset = source.place(row)
    try:
        decode(source.read(row), "", num_channels)
    except BrokenPictureError as error:
        return Problem(file, str(error).strip(), offset)
    except DataError as error:
        return Problem(file, str(error), offset)
    return None
