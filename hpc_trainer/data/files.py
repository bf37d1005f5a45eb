"""Files of a data set: their problems, their digests, and the rows that are held out for evaluation. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hpc_trainer.config.user_files import open_given
from hpc_trainer.errors import ConfigError

if TYPE_CHECKING:  # `plan` of other data needs no numpy
    import numpy as np
    from numpy.typing import NDArray

_MOST_SHOWN = 5
_NUM_BLOCKS, _BLOCK = 64, 65_536
_SEED = 0
_ROWS_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class Problem:
    """Problem of one file that makes it unusable. `offset` is the byte at which the problem appears, if known."""

    file: str
    cause: str
    offset: int | None = None

    def __str__(self) -> str:
        return f"{name_of(self.file, self.offset)}: {self.cause}"


def name_of(file: str, offset: int | None) -> str:
    """Return the name of a place in a file, for messages."""
    return file if offset is None else f"{file} at byte {offset}"


def first_problems(problems: Sequence[Problem]) -> str:
    """Return a text with the first five problems and the number of further ones, for a message."""
    more = f"; and {len(problems) - _MOST_SHOWN} more" if len(problems) > _MOST_SHOWN else ""
    return "; ".join(map(str, problems[:_MOST_SHOWN])) + more


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


def num_held_out(num_rows: int, fraction: float) -> int:
    """Return the rows for evaluation: the nearest whole number, and at least one if a fraction is given."""
    return max(1, round(num_rows * fraction)) if fraction else 0


def check_parts(own: str | None, eval_fraction: float, usual: float, key: str = "eval_path") -> None:
    """Check that only one key says which samples evaluations use.

    Raises:
        ConfigError: both `eval_fraction` and the key `key` are set.
    """
    if own is not None and eval_fraction != usual:
        raise ConfigError(
            f"data.eval_fraction={eval_fraction:g} has no effect with data.{key}={own}. Use "
            f"data.eval_fraction={usual:g}, its default, or data.{key}=null."
        )


def part_of(num_rows: int, fraction: float, split: Literal["train", "eval"]) -> NDArray[np.unsignedinteger[Any]]:
    """Return the rows of a split, ascending; evaluation gets the rows with the smallest of PCG64's raw 64-bit words.

    numpy never changes these bits, unlike the output of `Generator.permutation`. They are computed twice, in blocks,
    because the words of 10 million rows would take 80 MB.
    """
    import numpy as np

    count = num_held_out(num_rows, fraction)
    largest = _smallest(num_rows, count)
    wanted = count if split == "eval" else num_rows - count
    rows: NDArray[Any] = np.empty(wanted, dtype=np.uint32 if num_rows <= 2**32 else np.uint64)
    done = 0
    for start, words in _blocks_of_words(num_rows):
        chosen = np.flatnonzero((words <= largest) == (split == "eval"))
        rows[done : done + len(chosen)] = chosen + start
        done += len(chosen)
    return rows


def _smallest(num_rows: int, count: int) -> np.uint64:
    """Return the largest of the `count` smallest random words of the rows (`_blocks_of_words`)."""
    import numpy as np

    # With a probability of 1 - 10^-9 there are `count` or a few more words below this bound.
    bound = (count + 6 * count**0.5 + 6) / num_rows
    kept = [words[words < np.uint64(bound * 2**64)] if bound < 1 else words for _, words in _blocks_of_words(num_rows)]
    candidates = np.concatenate(kept)
    if len(candidates) < count:
        candidates = np.concatenate([words for _, words in _blocks_of_words(num_rows)])
    word: np.uint64 = np.partition(candidates, count - 1)[count - 1]
    return word


def _blocks_of_words(num_rows: int) -> Iterator[tuple[int, NDArray[np.uint64]]]:
    import numpy as np

    bits = np.random.PCG64(_SEED)
    for start in range(0, num_rows, _ROWS_AT_ONCE):
        yield start, bits.random_raw(min(_ROWS_AT_ONCE, num_rows - start))
