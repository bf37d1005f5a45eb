"""`budget`: what one grid may take at most; `submit` refuses more, with the number."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_trainer.config.schema.key import ALWAYS, key


@dataclass(kw_only=True, slots=True)
class BudgetConfig:
    max_gpu_hours: float | None = key(None, ALWAYS, limits="> 0")
    """GPU-hours of all runs that wait or work, each with its full time limit once; null: no bound."""
    max_jobs: int | None = key(None, ALWAYS, limits="≥ 1")
    """Runs of the grid that may wait or work at once; null: no bound."""
