"""Which scenarios `make test` plays today: a few, others each day, so that a fortnight sees them all."""

from __future__ import annotations

import datetime
import os
import zlib
from collections.abc import Sequence

VARIABLE = "HPC_TRAINER_SCENARIOS"
PER_DAY = 3


def chosen(names: Sequence[str], short: Sequence[str], today: datetime.date | None = None) -> list[str]:
    """Names to play, from the variable HPC_TRAINER_SCENARIOS: `all`, names with commas, else today's share of `short`.

    Raises:
        ValueError: the variable names what is not among `names`.
    """
    wish = os.environ.get(VARIABLE, "").strip()
    if wish == "all":
        return list(names)
    if wish:
        wished = [word.strip() for word in wish.split(",") if word.strip()]
        unknown = sorted(set(wished) - set(names))
        if unknown:
            raise ValueError(f"{VARIABLE}={wish}: unknown {', '.join(unknown)}. Known: {', '.join(names)}, or all.")
        return wished
    day = (today or datetime.datetime.now(datetime.timezone.utc).date()).toordinal()
    # Not in the order of the alphabet: neighbours there are much the same.
    ordered = sorted(short, key=lambda name: zlib.crc32(name.encode()))
    count = len(ordered)
    return [ordered[(day * PER_DAY + offset) % count] for offset in range(min(PER_DAY, count))]
