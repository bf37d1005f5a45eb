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
_PAIRS = re.compile(r"\S+=\S+( \S+=\S+)*( \(.*\))?")
_PAIR_ENDS = re.compile(r" (?=\S+=|\()")
Least = str | tuple[str, int]
"""A column that may be left out, or one that may be cut and the width below which it tells nothing."""


def fit_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, least: Sequence[Least] = ()
) -> tuple[list[int], list[int]]:
    """The columns that are shown, by their numbers, and how wide each is: with gaps between them at most `width`.

    Args:
        least: what gives way, what tells least first: a column that may be left out, or cut to a width. As much of it
            comes back, what tells most first, as still has room in the end.
    """
    sizes = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    whole, kept = list(sizes), list(range(len(columns)))

    def over() -> int:
        return sum(sizes[each] for each in kept) + GAP * (len(kept) - 1) - width

    steps: list[Least] = [(columns[0], _USUAL), *least]  # what a row is called: its end tells runs apart
    if any(_RUN_ID.search(row[0]) for row in rows):  # sooner than figures
        steps.append((columns[0], _END + 1))
    taken: list[tuple[int, bool]] = []
    for step in steps:
        name, narrow = (step, 0) if isinstance(step, str) else step
        index = columns.index(name) if name in columns else None
        if over() <= 0 or index not in kept:
            continue
        taken.append((index, not narrow))
        if narrow:
            sizes[index] = max(min(sizes[index], narrow), sizes[index] - over())
        else:
            kept.remove(index)
    for index, is_out in reversed(taken) if over() <= 0 else ():
        if is_out and over() + sizes[index] + GAP <= 0:
            kept.append(index)
        elif index in kept:
            sizes[index] = min(whole[index], sizes[index] - over())
    kept.sort()
    while over() > 0 and (wide := [each for each in kept if sizes[each] > _NARROWEST]):
        widest = max(wide, key=lambda each: sizes[each])
        next_widest = max((sizes[each] for each in wide if sizes[each] < sizes[widest]), default=_NARROWEST)
        sizes[widest] = max(next_widest, sizes[widest] - over(), _NARROWEST)
    while over() > 0 and len(kept) > 1:
        kept.pop()
    sizes[kept[0]] = min(sizes[kept[0]], width)
    return kept, [sizes[each] for each in kept]


def cut(text: str, size: int) -> str:
    """The text in so many columns: of metrics the first ones, whole; of a run's id the end, which one may type, and the
    beginning where there is room.
    """
    if len(text) <= size:
        return text
    if _RUN_ID.search(text):
        head = max(0, size - _END - 1)
        return f"{text[:head]}{_CUT}{text[len(text) - size + head + 1 :]}"
    if _PAIRS.fullmatch(text):
        ends = [found.start() for found in _PAIR_ENDS.finditer(text) if found.start() < size]
        whole = [end for end in ends if end + 2 <= size]
        if whole:
            return f"{text[: whole[-1]]} {_CUT}"
        if ends:
            return f"{text[: ends[0]]}{_CUT}"
    return text[: size - 1] + _CUT
