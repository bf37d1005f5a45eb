"""Choices of all models, or data sets, that are of one sort: rows name no kind by hand, so a new one is in the right
rows by what it declares of itself.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from hpc_trainer.config.schema.model.traits import Trait
from hpc_trainer.config.store import VARIANTS


def models(
    *,
    having: Collection[Trait] = (),
    without: Collection[Trait] = (),
    key: str | None = None,
    also: Collection[str] = (),
) -> str:
    """`model=resnet|vit`: all of which one knows that they have each of these traits, or none of those.

    Args:
        key: they have a key of this name.
        also: names besides.
    """
    kinds: dict[str, Any] = VARIANTS["model"]
    found = [
        name
        for name, kind in kinds.items()
        if kind.traits is not None
        and kind.traits.issuperset(having)
        and kind.traits.isdisjoint(without)
        and (key is None or hasattr(kind, key))
    ]
    return f"model={'|'.join((*found, *also))}"


def datasets(*, of_text: bool) -> str:
    """`data=digits|arrays`: all of which one knows that they hold text, or that they hold none."""
    kinds: dict[str, Any] = VARIANTS["data"]
    found = [name for name, kind in kinds.items() if kind.is_text is of_text]
    return f"data={'|'.join(found)}"
