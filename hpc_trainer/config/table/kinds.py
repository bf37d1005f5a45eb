"""Choices of all models or data sets with some property, for rows that name no kind by hand.

A new kind joins the right rows by the properties that it declares.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

from hpc_trainer.config.schema.model import Trait


def models(
    *,
    having: Collection[Trait] = (),
    without: Collection[Trait] = (),
    key: str | None = None,
    also: Collection[str] = (),
) -> Callable[[], str]:
    """Return a function that names all models with all traits of `having` and none of `without`: `model=resnet|vit`.

    Models whose traits are unknown are left out. The function is for a `Row`, which is read when all models are known.

    Args:
        having: traits that the models have.
        without: traits that the models lack.
        key: name of a key that the models have; None for any model.
        also: names to add.
    """

    @functools.cache
    def named() -> str:
        names = [
            name
            for name, kind in _variants("model").items()
            if kind.traits is not None
            and kind.traits.issuperset(having)
            and kind.traits.isdisjoint(without)
            and (key is None or hasattr(kind, key))
        ]
        return f"model={'|'.join((*names, *also))}"

    return named


def datasets(*, of_text: bool) -> Callable[[], str]:
    """Return a function that names all data sets that are known to hold text, or to hold none: `data=digits|arrays`."""

    @functools.cache
    def named() -> str:
        names = [name for name, kind in _variants("data").items() if kind.is_text is of_text]
        return f"data={'|'.join(names)}"

    return named


@functools.cache
def optimizers_by_weight() -> str:
    """Return `optim=sgd|adamw` for all optimizers that update each weight alone."""
    names = [name for name, kind in _variants("optim").items() if kind.updates_each_weight_alone]
    return f"optim={'|'.join(names)}"


def _variants(group: str) -> dict[str, Any]:
    from hpc_trainer.config.store import VARIANTS  # late: features are declared before all sections are made

    return VARIANTS[group]
