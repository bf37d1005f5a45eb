"""The page of the docs that shows the table of what goes with what."""

from __future__ import annotations

from collections.abc import Iterable

from hpc_trainer.config.feature import Feature, Row

_HEAD = """# What goes with what

Each line is a refusal of `plan` and `submit`, with the reason. What is not here goes together, and is tried in pairs.
This page is made from the declarations of the features (`hpc_trainer/features/`) and of the core's own choices
(`hpc_trainer/config/core_table.py`).

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
    """`a=b` and `c`, each in code; a bar would end a cell."""
    ways = [" and ".join(f"`{part.replace('|', ' or ')}`" for part in way.split(" & ")) for way in choice.split(" or ")]
    return ", ".join(ways)
