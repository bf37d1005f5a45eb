"""Which scenarios `make test` plays today: a few, others each day, so that a fortnight sees them all."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence

from tests.of_the_day import of_the_day

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
    return of_the_day(short, PER_DAY, today)
