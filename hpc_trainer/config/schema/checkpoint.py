"""`checkpoint/`: when to save, and how much to keep."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    every_steps: int = 100
    """Steps between saves, ≥ 1. A stop and the last step save besides."""
    keep_last: int = 2
    """Valid checkpoints that are kept, ≥ 1. Two: one to fall back on if the newest is damaged."""
