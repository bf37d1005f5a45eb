"""Results kept by the identity of what they were made of: the points of a grid share most of their sections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Memo:
    """Calls a function once for each distinct choice of argument objects; the objects must not change afterwards."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], tuple[Any, tuple[object, ...]]] = {}

    def of(self, compute: Callable[..., T], *parts: object) -> T:
        """`compute(*parts)`, made once. Equal arguments that are other objects are computed anew."""
        key = (compute, *map(id, parts))
        kept = self._kept.get(key)
        if kept is None:
            # The arguments are kept as well: the id of a dead object may come back for another one.
            kept = self._kept[key] = (compute(*parts), parts)
        result: T = kept[0]
        return result
