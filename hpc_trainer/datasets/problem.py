"""Problems of a data set's files, as `data check` and a start report them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_TOLD = 5


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


def told(problems: Sequence[Problem]) -> str:
    """Return a text with the first five problems and the number of further ones, for a message."""
    more = f"; and {len(problems) - _TOLD} more" if len(problems) > _TOLD else ""
    return "; ".join(map(str, problems[:_TOLD])) + more
