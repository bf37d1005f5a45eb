"""`parallel/`: how ranks share the work."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Strategy(str, enum.Enum):
    none = "none"
    ddp = "ddp"


@dataclass(kw_only=True, slots=True)
class ParallelConfig:
    strategy: Strategy = Strategy.ddp
    """ddp: every rank holds the model, gradients are averaged. none: one rank only."""
    timeout_s: int = 600
    """Seconds that a collective may take before the run fails, ≥ 1."""
