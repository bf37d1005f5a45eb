"""Results cached by the identity of their arguments: the points of a grid share most of their sections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Memo:
    """Cache that calls a function once for each distinct set of argument objects, which must not change afterwards."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], tuple[Any, tuple[object, ...]]] = {}

    def of(self, compute: Callable[..., T], *parts: object) -> T:
        """Return `compute(*parts)`, computed once for the same objects.

        Equal arguments that are other objects compute anew.
        """
        key = (compute, *map(id, parts))
        kept = self._kept.get(key)
        if kept is None:
            # The arguments are kept as well: Python may give the id of a dead object to another one.
            kept = self._kept[key] = (compute(*parts), parts)
        result: T = kept[0]
        return result
