"""The share of a long table that `make test` plays today: others each day, so that some weeks see them all."""

from __future__ import annotations

import datetime
import zlib
from collections.abc import Sequence


def of_the_day(names: Sequence[str], per_day: int, today: datetime.date | None = None) -> list[str]:
    """`per_day` of the names, fewer if there are fewer; `today` is the day in UTC unless it is given."""
    day = (today or datetime.datetime.now(datetime.timezone.utc).date()).toordinal()
    # Not in their own order: neighbours there are much the same.
    ordered = sorted(names, key=lambda name: zlib.crc32(name.encode()))
    count = len(ordered)
    return [ordered[(day * per_day + offset) % count] for offset in range(min(per_day, count))]
