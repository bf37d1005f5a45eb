"""Rules of `monitor`: what its values need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hpc_trainer.config import script_words as words
from hpc_trainer.config.packages import missing
from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.config.schema.monitor import MonitorConfig, OnOverheat


def monitor_problems(monitor: MonitorConfig, executor: Executor) -> Iterator[str]:
    """Yield each problem with `monitor`."""
    if monitor.on_overheat is OnOverheat.move:
        yield from _move_problems(monitor, executor)
    folder = monitor.prometheus_dir
    if folder is None:
        return
    if words.has_control(folder) or not Path(folder).is_absolute():
        yield (
            f"monitor.prometheus_dir={folder!r} must be the absolute path of the folder on each node that "
            "node_exporter reads (--collector.textfile.directory). Use for example /var/lib/node_exporter."
        )
    if not monitor.telemetry_every_s:
        yield "monitor.prometheus_dir shows samples, and monitor.telemetry_every_s=0 takes none. Set that to 15, or so."
    problem = missing("monitor.prometheus_dir", "prometheus_client")
    if problem is not None:
        yield problem


def _move_problems(monitor: MonitorConfig, executor: Executor) -> Iterator[str]:
    if executor is not Executor.slurm:
        yield (
            "monitor.on_overheat=move asks Slurm for another node, and cluster.executor=local has this machine alone. "
            "Use monitor.on_overheat=warn, or cluster=slurm."
        )
    if not monitor.telemetry_every_s:
        yield (
            "monitor.on_overheat=move needs samples, and monitor.telemetry_every_s=0 takes none. Set that to 5, or use "
            "monitor.on_overheat=warn."
        )
