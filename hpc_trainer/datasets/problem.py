"""What is wrong with a file of a data set, as `data check` and a start tell it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_TOLD = 5


@dataclass(frozen=True, slots=True)
class Problem:
    """One file that cannot be used as it is. `offset`: the byte in it at which that shows, where there is one."""

    file: str
    cause: str
    offset: int | None = None

    def __str__(self) -> str:
        return f"{name_of(self.file, self.offset)}: {self.cause}"


def name_of(file: str, offset: int | None) -> str:
    """A place in a file, as messages name it."""
    return file if offset is None else f"{file} at byte {offset}"


def told(problems: Sequence[Problem]) -> str:
    """The first few, for a message, and how many there are."""
    more = f"; and {len(problems) - _TOLD} more" if len(problems) > _TOLD else ""
    return "; ".join(map(str, problems[:_TOLD])) + more
