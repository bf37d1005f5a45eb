"""Which scenarios `make test` plays: a lost node, a successor, and a time limit, which no other test there has.

The other causes play in CI's second part each time (tests/chosen.py).
"""

from __future__ import annotations

import os
from collections.abc import Sequence

VARIABLE = "HPC_TRAINER_SCENARIOS"
SAMPLE = ("node_set_down-x4", "requeue_refused-x1", "timed_out_after_a_minute-x1")
"""With the hardware of each: what needs two nodes has them."""


def chosen(names: Sequence[str]) -> list[str]:
    """Ids (`name-x1`) to play, of the variable HPC_TRAINER_SCENARIOS: `all`, names with commas, else the sample.

    Raises:
        ValueError: the variable names what is not among `names`.
    """
    wish = os.environ.get(VARIABLE, "").strip()
    if wish == "all":
        return list(names)
    if wish:
        wished = [word.strip() for word in wish.split(",") if word.strip()]
        unknown = sorted(set(wished) - {name.rpartition("-")[0] for name in names})
        if unknown:
            known = ", ".join(dict.fromkeys(name.rpartition("-")[0] for name in names))
            raise ValueError(f"{VARIABLE}={wish}: unknown {', '.join(unknown)}. Known: {known}, or all.")
        return [name for name in names if name.rpartition("-")[0] in wished]
    return list(SAMPLE)
