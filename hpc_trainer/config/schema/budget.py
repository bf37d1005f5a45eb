"""`budget`: limits of one grid; `submit` refuses a grid above them, with the number."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_trainer.config.schema.key import ALWAYS, key


@dataclass(kw_only=True, slots=True)
class BudgetConfig:
    max_gpu_hours: float | None = key(None, ALWAYS, limits="> 0")
    """Most GPU-hours of all runs that wait or work, each counted once with its full time limit; null: no bound."""
    max_jobs: int | None = key(None, ALWAYS, limits="≥ 1")
    """Most runs of the grid that may wait or work at once; null: no bound."""
