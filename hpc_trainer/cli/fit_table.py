"""A table that is as wide as the terminal: what tells least is left out, then the longest cells are cut."""

from __future__ import annotations

import re
from collections.abc import Sequence

GAP = 2
"""Blanks between two columns."""
_USUAL, _NARROWEST = 28, 12
_END = 19
_CUT = "…"
_RUN_ID = re.compile(r"-[0-9a-f]{10}\Z")


def fit_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, least: Sequence[str] = ()
) -> tuple[list[int], list[int]]:
    """The columns that are shown, by their numbers, and how wide each is: with gaps between them at most `width`.

    Args:
        least: columns that may be left out, what tells least first.
    """
    sizes = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    kept = list(range(len(columns)))

    def over(more: int = 0) -> int:
        return sum(sizes[each] for each in kept) + GAP * (len(kept) - 1) + more - width

    if over() > 0:  # what a row is called: its end tells runs apart
        sizes[0] = max(min(sizes[0], _USUAL), sizes[0] - over())
    dropped = []
    for name in least:
        if over() > 0 and name in columns:
            dropped.append(columns.index(name))
            kept.remove(dropped[-1])
    while back := [index for index in dropped if index not in kept and over(sizes[index] + GAP) <= 0]:
        kept.append(back[-1])  # one that was wide has made room for narrow ones
    kept.sort()
    if over() > 0 and any(_RUN_ID.search(row[0]) for row in rows):  # sooner than figures
        sizes[0] = max(min(sizes[0], _END + 1), sizes[0] - over())
    while over() > 0 and (wide := [each for each in kept if sizes[each] > _NARROWEST]):
        widest = max(wide, key=lambda each: sizes[each])
        next_widest = max((sizes[each] for each in wide if sizes[each] < sizes[widest]), default=_NARROWEST)
        sizes[widest] = max(next_widest, sizes[widest] - over(), _NARROWEST)
    while over() > 0 and len(kept) > 1:
        kept.pop()
    sizes[kept[0]] = min(sizes[kept[0]], width)
    return kept, [sizes[each] for each in kept]


def cut(text: str, size: int) -> str:
    """The text in so many columns; of a run's id the end, which one may type, and the beginning where there is room."""
    if len(text) <= size:
        return text
    head = max(0, size - _END - 1) if _RUN_ID.search(text) else size - 1
    return f"{text[:head]}{_CUT}{text[len(text) - size + head + 1 :]}"
