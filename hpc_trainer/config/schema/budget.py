"""`budget`: what one grid may take at most; `submit` refuses more, with the number."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class BudgetConfig:
    max_gpu_hours: float | None = None
    """GPU-hours of all runs that wait or work, each with its full time limit once, > 0; null: no bound."""
    max_jobs: int | None = None
    """Runs of the grid that may wait or work at once, ≥ 1; null: no bound."""
