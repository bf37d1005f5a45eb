"""Keys that features declare in their own folders, at their place in the section where users type them.

    @dataclass(kw_only=True, slots=True)
    @with_feature_keys
    class ParallelConfig:
        zero1: bool = of_feature("zero1")

The line in the section is all that the configuration knows of a feature: it gives the key its place and its type for
type checkers. Default, limits, metadata and docstring of the key are in the class `Keys` of the feature's folder,
`hpc_trainer/features/zero1/__init__.py`. That file is imported here while sections are still being made, so it imports
no section at run time (tests/policy/test_core.py).
"""

from __future__ import annotations

import importlib
import typing
from typing import Any, NamedTuple, TypeVar

PACKAGE = "hpc_trainer.features"
T = TypeVar("T")


class _OfFeature(NamedTuple):
    """Place of a key until its section takes the key over."""

    feature: str


def of_feature(feature: str) -> Any:
    """Declare a field of a section as the key of that name that a feature declares."""
    return _OfFeature(feature)


def keys_class(feature: str) -> Any:
    """Return the class `Keys` of a feature, without torch."""
    return importlib.import_module(f"{PACKAGE}.{feature}").Keys


def with_feature_keys(section: type[T]) -> type[T]:
    """Put the keys of features in their places; to be used below `@dataclass`.

    Raises:
        KeyError: the feature declares no such key.
    """
    for name, place in list(vars(section).items()):
        if isinstance(place, _OfFeature):
            keys = keys_class(place.feature)
            setattr(section, name, vars(keys)[name])
            section.__annotations__[name] = typing.get_type_hints(keys)[name]
    return section
