"""`monitor/`: how often a run says how it goes."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hpc_trainer.config.schema.key import ALWAYS, key, only_with


class OnOverheat(str, enum.Enum):
    """What is done where a GPU lowers its clocks to protect itself."""

    warn = "warn"
    lower_power = "lower_power"
    move = "move"


@dataclass(kw_only=True, slots=True)
class MonitorConfig:
    log_every_steps: int = key(10, ALWAYS, limits="≥ 1")
    """Steps between lines of metrics.jsonl. The loss is read from the device only then."""
    heartbeat_every_s: float = key(2.0, ALWAYS, limits="≥ 0")
    """Least seconds between two writes of heartbeat.json in the first minute; five times that after five minutes."""
    # It needs some seconds for the stacks of all ranks (runtime/watchdog.py).
    watchdog_s: float = key(480.0, ALWAYS, limits="0 or ≥ 10")
    """Seconds without a step, a batch of an evaluation or a save after which a rank writes the stacks of its threads
    into its log and the run fails (it comes back, cluster.max_failures); with more ranks than one at most 0.8 of
    parallel.timeout_s, or a hung collective would end without the stacks. 0: no watchdog."""
    profile_steps: int = key(0, ALWAYS, limits="0 to 1000")  # a step of a large model leaves 1 MB of spans
    """Steps that rank 0 watches with torch.profiler: profile.txt and profile.trace.json.gz in the run folder
    (docs/speed.md). The same bits; those steps are some percent slower. 0: none."""
    profile_warmup_steps: int = key(10, only_with("monitor.profile_steps"), limits="≥ 1")
    """Steps of each attempt before the profile: caches, compilers and allocators are cold in the first ones."""
    telemetry_every_s: float = key(5.0, ALWAYS, limits="≥ 0")
    """Seconds between two samples of each rank's GPU and host (docs/monitoring.md); all ranks together take 20 a second
    at most. 0: none."""
    # Ranks that are well differ by some percent.
    straggler_factor: float = key(1.3, ALWAYS, limits="0 or ≥ 1.05")
    """A rank whose own work in a step takes longer than this many times the median of the other ranks' is named in
    `status` and `why` (docs/monitoring.md). 0: nobody is looked for."""
    on_overheat: OnOverheat = key(OnOverheat.warn, only_with("hardware.gpus_per_node"))
    """A GPU that lowers its clocks for heat is a warning in `status`. lower_power: its power limit is lowered too, by a
    tenth each minute, where the user may set it, and put back at the end of the attempt. move: after move_after_s, or
    at once if it fails, the run saves and goes back into Slurm's queue without that node (docs/monitoring.md)."""
    move_after_s: float = key(300.0, only_with("monitor.on_overheat=move"), limits="≥ 0")
    """Seconds for which a GPU lowers its clocks without a break before the run leaves its node. To move costs Slurm's
    two minutes for a requeued job, its queue, and a start."""
    co2_g_per_kwh: float | None = key(None, ALWAYS, limits="≥ 0")
    """Grams of CO2 for each kWh at the site: `results` has a column co2_g. null: none."""
    prometheus_dir: str | None = key(None, ALWAYS)
    """Folder on each node that node_exporter's textfile collector reads: each rank keeps a file with its newest sample
    there while it works (docs/monitoring.md). null: none."""
