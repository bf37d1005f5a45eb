"""Choices of all models or data sets of one sort: rows name no kind by hand, so a new kind is in the right rows.

It gets there by what it declares of itself.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from hpc_trainer.config.schema.model import Trait
from hpc_trainer.config.store import VARIANTS


def models(
    *,
    having: Collection[Trait] = (),
    without: Collection[Trait] = (),
    key: str | None = None,
    also: Collection[str] = (),
) -> str:
    """Return `model=resnet|vit` for all models that are known to have all traits of `having` and none of `without`.

    Args:
        having: traits that the models have.
        without: traits that the models lack.
        key: name of a key that the models have; None for any model.
        also: names to add.
    """
    kinds: dict[str, Any] = VARIANTS["model"]
    names = [
        name
        for name, kind in kinds.items()
        if kind.traits is not None
        and kind.traits.issuperset(having)
        and kind.traits.isdisjoint(without)
        and (key is None or hasattr(kind, key))
    ]
    return f"model={'|'.join((*names, *also))}"


def datasets(*, of_text: bool) -> str:
    """Return `data=digits|arrays` for all data sets that are known to hold text, or to hold none."""
    kinds: dict[str, Any] = VARIANTS["data"]
    names = [name for name, kind in kinds.items() if kind.is_text is of_text]
    return f"data={'|'.join(names)}"
