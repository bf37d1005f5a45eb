"""`monitor/`: how often a run reports its progress, and what it watches."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hpc_trainer.config.schema.key import ALWAYS, key, only_with


class OnOverheat(str, enum.Enum):
    """Reaction to a GPU that lowers its clocks to protect itself."""

    warn = "warn"
    lower_power = "lower_power"
    move = "move"


@dataclass(kw_only=True, slots=True)
class MonitorConfig:
    log_every_steps: int = key(10, ALWAYS, limits="≥ 1")
    """Steps between lines of metrics.jsonl. The loss is read from the device only then."""
    heartbeat_every_s: float = key(2.0, ALWAYS, limits="≥ 0")
    """Least seconds between two writes of heartbeat.json in the first minute; five times as many after five minutes."""
    # The stacks of all ranks take some seconds (runtime/watchdog.py).
    watchdog_s: float = key(480.0, ALWAYS, limits="0 or ≥ 10")
    """Seconds without a step, a batch of an evaluation or a save after which the run fails. The rank first writes the
    stacks of its threads into its log. The run restarts (cluster.max_failures). With more than one rank at most 0.8 of
    parallel.timeout_s, or a hung collective would end without the stacks. 0: no watchdog."""
    profile_steps: int = key(0, ALWAYS, limits="0 to 1000")  # a step of a large model leaves 1 MB of spans
    """Steps that rank 0 records with torch.profiler: profile.txt and profile.trace.json.gz in the run folder
    (docs/speed.md). The bits stay the same; those steps are some percent slower. 0: none."""
    profile_warmup_steps: int = key(10, only_with("monitor.profile_steps"), limits="≥ 1")
    """Steps of each attempt before the profile: in the first ones caches, compilers and allocators are cold."""
    telemetry_every_s: float = key(5.0, ALWAYS, limits="≥ 0")
    """Seconds between two samples of each rank's GPU and host (docs/monitoring.md); all ranks together take at most 20
    a second. 0: none."""
    # Healthy ranks differ by some percent.
    straggler_factor: float = key(1.3, ALWAYS, limits="0 or ≥ 1.05")
    """`status` and `why` name a rank whose own work in a step takes longer than this many times the median of the other
    ranks (docs/monitoring.md). 0: no check."""
    on_overheat: OnOverheat = key(OnOverheat.warn, only_with("hardware.gpus_per_node"))
    """warn: `status` warns of a GPU that lowers its clocks for heat. lower_power: its power limit is lowered too, by a
    tenth each minute, if the user may set it, and restored at the end of the attempt. move: after move_after_s, or at
    once if the GPU fails, the run saves and goes back into Slurm's queue without that node (docs/monitoring.md)."""
    move_after_s: float = key(300.0, only_with("monitor.on_overheat=move"), limits="≥ 0")
    """Seconds for which a GPU lowers its clocks without a break before the run leaves its node. A move costs Slurm's
    two minutes for a requeued job, the time in the queue, and a start."""
    co2_g_per_kwh: float | None = key(None, ALWAYS, limits="≥ 0")
    """Grams of CO2 for each kWh at the site, for the column co2_g of `results`. null: no column."""
    prometheus_dir: str | None = key(None, ALWAYS)
    """Folder on each node that node_exporter's textfile collector reads: each rank keeps a file with its newest sample
    there while it works (docs/monitoring.md). null: none."""
