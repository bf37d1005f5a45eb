"""`monitor/`: how often a run says how it goes."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpc_trainer.config.schema.effect import only_with


@dataclass(kw_only=True, slots=True)
class MonitorConfig:
    log_every_steps: int = 10
    """Steps between lines of metrics.jsonl, ≥ 1. The loss is read from the device only then."""
    heartbeat_every_s: float = 2.0
    """Least seconds between two writes of heartbeat.json, ≥ 0."""
    watchdog_s: float = 480.0
    """Seconds without a step, a batch of an evaluation or a save after which a rank writes the stacks of its threads
    into its log and the run fails (it comes back, cluster.max_failures), ≥ 10; with more ranks than one at most 0.8 of
    parallel.timeout_s, or a hung collective would end without the stacks. 0: no watchdog."""
    profile_steps: int = 0
    """Steps that rank 0 watches with torch.profiler, 0 to 1000: profile.txt and profile.trace.json.gz in the run folder
    (docs/speed.md). The same bits; those steps are some percent slower. 0: none."""
    profile_warmup_steps: int = field(default=10, metadata=only_with("monitor.profile_steps"))
    """Steps of each attempt before the profile, ≥ 1: caches, compilers and allocators are cold in the first ones."""
