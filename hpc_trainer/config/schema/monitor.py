"""`monitor/`: how often a run says how it goes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class MonitorConfig:
    log_every_steps: int = 10
    """Steps between lines of metrics.jsonl, ≥ 1. The loss is read from the device only then."""
    heartbeat_every_s: float = 2.0
    """Least seconds between two writes of heartbeat.json, ≥ 0."""
