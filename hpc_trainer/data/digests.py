"""Digests of large files that are cheap to make."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from hpc_trainer.config.user_files import open_given

_NUM_BLOCKS, _BLOCK = 64, 65_536


def spread_digest(path: Path, start: int, stop: int) -> str:
    """Return the SHA-256 (16 hex digits) of the size of a file's part and of 64 blocks spread over it.

    At most 4 MB are read. A part of up to 4 MB is read completely; in a larger part a change between the blocks is not
    detected.
    """
    size = stop - start
    digest = hashlib.sha256(str(size).encode())
    with open_given(path) as file:
        for number in range(_NUM_BLOCKS):
            # Blocks of a small part overlap; the last one ends where the part ends.
            offset = max(0, size - _BLOCK) * number // (_NUM_BLOCKS - 1)
            file.seek(start + offset)
            digest.update(file.read(min(_BLOCK, size)))
    return digest.hexdigest()[:16]


def digest_of_files(paths: Iterable[Path], facts: object) -> str:
    """Return the SHA-256 (16 hex digits) of the spread digests of whole files, in order, and of the repr of `facts`."""
    digests = [spread_digest(path, 0, path.stat().st_size) for path in paths]
    return hashlib.sha256(repr((digests, facts)).encode()).hexdigest()[:16]
