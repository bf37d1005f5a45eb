"""Fitting of a table to the terminal: the least useful columns are dropped, then the longest cells are cut."""

from __future__ import annotations

import re
from collections.abc import Sequence

GAP = 2
"""Spaces between two columns."""
_USUAL, _NARROWEST = 28, 12
_END = 19
_CUT = "…"
_RUN_ID = re.compile(r"-[0-9a-f]{10}\Z")
_PAIRS = re.compile(r"\S+=\S+( \S+=\S+)*( \(.*\))?")
_PAIR_ENDS = re.compile(r" (?=\S+=|\()")
Least = str | tuple[str, int]
"""Column that may be dropped, or (column, smallest useful width) of a column that may be cut."""


def fit_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, least: Sequence[Least] = ()
) -> tuple[list[int], list[int]]:
    """Return the indices of the shown columns and their widths; with the gaps, they take at most `width`.

    Args:
        columns: the headings.
        rows: the cells.
        width: width of the terminal.
        least: columns to drop or cut, the least useful first. In the end, dropped and cut columns come back, the most
            useful first, if there is room.
    """
    sizes = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    whole, kept = list(sizes), list(range(len(columns)))

    def over() -> int:
        return sum(sizes[index] for index in kept) + GAP * (len(kept) - 1) - width

    steps: list[Least] = [(columns[0], _USUAL), *least]  # the name of a row: its end distinguishes runs
    if any(_RUN_ID.search(row[0]) for row in rows):  # cut run ids before figures
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
    while over() > 0 and (wide := [place for place in kept if sizes[place] > _NARROWEST]):
        widest = max(wide, key=lambda place: sizes[place])
        next_widest = max((sizes[place] for place in wide if sizes[place] < sizes[widest]), default=_NARROWEST)
        sizes[widest] = max(next_widest, sizes[widest] - over(), _NARROWEST)
    while over() > 0 and len(kept) > 1:
        kept.pop()
    sizes[kept[0]] = min(sizes[kept[0]], width)
    return kept, [sizes[place] for place in kept]


def cut(text: str, size: int) -> str:
    """Return the text cut to `size` characters.

    Metrics keep the first complete pairs. A run's id keeps its end, which the user may type, and its beginning if there
    is room.
    """
    if len(text) <= size:
        return text
    if _RUN_ID.search(text):
        head = max(0, size - _END - 1)
        return f"{text[:head]}{_CUT}{text[len(text) - size + head + 1 :]}"
    if _PAIRS.fullmatch(text):
        ends = [match.start() for match in _PAIR_ENDS.finditer(text) if match.start() < size]
        whole = [end for end in ends if end + 2 <= size]
        if whole:
            return f"{text[: whole[-1]]} {_CUT}"
        if ends:
            return f"{text[: ends[0]]}{_CUT}"
    return text[: size - 1] + _CUT
