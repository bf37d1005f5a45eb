"""The page of the docs that shows the table of what goes with what."""

from __future__ import annotations

from collections.abc import Iterable

from hpc_trainer.config.table.choice import split
from hpc_trainer.config.table.feature import Feature, Row

_HEAD = """# What goes with what

Some settings exclude or need each other. Each row of the table is a rule of `plan` and `submit`: they refuse a setting
of the first column together with a setting of the third ("not with"), or without it ("only with"). In a reason,
"it" is one of the two settings. If a key stands alone, the row holds for every value except the default. Combinations
that are not in the table work: `make test-long` trains each such pair that needs no GPU.

A test generates this page from the declarations of features (`hpc_trainer/features/`) and of the core's own choices
(`hpc_trainer/config/table/declarations.py`); `HPC_TRAINER_UPDATE_GOLDEN=1 make unit` writes it again.

| this | | with this | because |
|---|---|---|---|
"""


def page(features: Iterable[Feature]) -> str:
    """Markdown: a line for each row of each feature, in the order of their names."""
    lines = []
    for feature in sorted(features, key=lambda each: each.on):
        lines += [_line(feature, row, "only with") for row in feature.needs]
        lines += [_line(feature, row, "not with") for row in feature.excludes]
    return _HEAD + "\n".join(lines) + "\n"


def _line(feature: Feature, row: Row, verb: str) -> str:
    return f"| {_code(row.when or feature.on)} | {verb} | {_code(row.what)} | {row.why} |"


def _code(choice: str) -> str:
    """What one types is in code; a bar would end a cell."""
    return ", or ".join(" with ".join(_part(part) for part in way.split(" & ")) for way in choice.split(" or "))


def _part(part: str) -> str:
    key, sign, values = split(part)
    first, *others = values.split("|")
    if sign == "!=":
        return f"`{key}` other than " + " or ".join(f"`{value}`" for value in (first, *others))
    return " or ".join((f"`{part.partition('|')[0]}`", *(f"`{value}`" for value in others)))
