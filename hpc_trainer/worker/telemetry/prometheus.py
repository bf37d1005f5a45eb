"""Newest sample as a text file for the textfile collector of Prometheus' node_exporter (`monitor.prometheus_dir`).

Each rank has its own file in the folder of its node: no rank waits for another. Names and units follow the rules of
Prometheus (https://prometheus.io/docs/practices/naming/).
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hpc_trainer.config.packages import optional
from hpc_trainer.errors import ConfigError
from hpc_trainer.runs.monitoring.telemetry import THROTTLE, Device, Host, Sample

_PREFIX = "hpc_trainer_"
# Age in seconds of a file that a killed rank left behind, and that the next rank removes.
_STALE_S = 3_600.0
# Field -> name, kind, factor.
_OF_DEVICE: dict[str, tuple[str, str, float]] = {
    "utilisation": ("gpu_utilisation_ratio", "gauge", 1),
    "memory_used": ("gpu_memory_used_bytes", "gauge", 1),
    "memory_total": ("gpu_memory_total_bytes", "gauge", 1),
    "temperature_c": ("gpu_temperature_celsius", "gauge", 1),
    "temperature_limit_c": ("gpu_temperature_limit_celsius", "gauge", 1),
    "power_w": ("gpu_power_watts", "gauge", 1),
    "power_limit_w": ("gpu_power_limit_watts", "gauge", 1),
    "energy_j": ("gpu_energy_joules", "counter", 1),
    "sm_clock_mhz": ("gpu_sm_clock_hertz", "gauge", 1e6),
    "mem_clock_mhz": ("gpu_memory_clock_hertz", "gauge", 1e6),
    "ecc_corrected": ("gpu_ecc_corrected_errors", "counter", 1),
    "ecc_uncorrected": ("gpu_ecc_uncorrected_errors", "counter", 1),
    "nvlink_bytes": ("gpu_nvlink_bytes", "counter", 1),
    "pcie_bytes": ("gpu_pcie_bytes", "counter", 1),
}
_OF_HOST: dict[str, tuple[str, str, float]] = {
    "cpus": ("cpus_busy", "gauge", 1),
    "cpus_allowed": ("cpus_allowed", "gauge", 1),
    "rss_bytes": ("resident_memory_bytes", "gauge", 1),
    "memory_available": ("memory_available_bytes", "gauge", 1),
    "major_faults": ("major_page_faults", "counter", 1),
    "disk_read_bytes": ("disk_read_bytes", "counter", 1),
    "disk_write_bytes": ("disk_written_bytes", "counter", 1),
    "energy_j": ("node_energy_joules", "counter", 1),
}


class PrometheusFile:
    """Text file of one rank; for the sampler's thread alone."""

    def __init__(self, folder: Path, run_id: str, rank: int) -> None:
        self._labels = {"run_id": run_id, "rank": str(rank)}
        self._folder, self._path = folder, folder / f"{_PREFIX}{run_id}.rank-{rank}.prom"
        self._prometheus: Any = None
        self._families: Any = None

    def take(self, samples: Sequence[Sample]) -> None:
        """Replace the whole file.

        Raises:
            OSError: the file could not be written.
            ConfigError: the package prometheus_client or the folder is missing.
        """
        if not self._folder.is_dir():
            raise ConfigError(
                f"monitor.prometheus_dir={self._folder} is no folder on {socket.gethostname()}. Make it there, or name "
                "the one that node_exporter reads (--collector.textfile.directory)."
            )
        if self._prometheus is None:  # in the sampler's thread: nothing of this may end the training
            self._families = optional("prometheus_client.core", "monitor.prometheus_dir")
            self._prometheus = optional("prometheus_client", "monitor.prometheus_dir")
            _remove_stale(self._folder)
        # The collector runs as another user, whom our umask would keep out, and reads only names that end in .prom.
        part = self._path.with_name(f".{self._path.name}.part")
        self._prometheus.write_to_textfile(str(part), _Collector(self._collected(samples)))
        part.chmod(0o644)
        part.replace(self._path)

    def close(self) -> None:
        """Remove the file: an old value would count as a present one."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _collected(self, samples: Sequence[Sample]) -> list[Any]:
        made: dict[str, Any] = {}

        def add(name: str, kind: str, value: float, more: dict[str, str]) -> None:
            labels = {**self._labels, **more}
            if name not in made:
                family = self._families.CounterMetricFamily if kind == "counter" else self._families.GaugeMetricFamily
                made[name] = family(_PREFIX + name, f"{name.replace('_', ' ')} of a rank", labels=list(labels))
            made[name].add_metric(list(labels.values()), value)

        for sample in samples:
            if sample.host is not None:
                add("sample_timestamp_seconds", "gauge", sample.time, {})
                if sample.step is not None:
                    add("step", "gauge", sample.step, {})
                for name, kind, value in _values(sample.host, _OF_HOST):
                    add(name, kind, value, {})
            if sample.device is not None:
                gpu = {"gpu": sample.device.uuid or "?"}
                for name, kind, value in _values(sample.device, _OF_DEVICE):
                    add(name, kind, value, gpu)
                for word in THROTTLE if sample.device.throttle is not None else ():
                    add("gpu_throttled", "gauge", float(word in sample.device.throttle), {**gpu, "reason": word})  # type: ignore[operator]
        return list(made.values())


def _values(part: Device | Host, table: dict[str, tuple[str, str, float]]) -> Iterator[tuple[str, str, float]]:
    for field, (name, kind, factor) in table.items():
        value = getattr(part, field)
        if value is not None:
            yield name, kind, value * factor


class _Collector:
    """Object that `write_to_textfile` accepts as a registry."""

    def __init__(self, families: Iterable[Any]) -> None:
        self._families = families

    def collect(self) -> Iterable[Any]:
        """Return all families."""
        return self._families


def _remove_stale(folder: Path) -> None:
    for path in folder.glob(f"{_PREFIX}*.prom"):
        with contextlib.suppress(OSError):
            info = path.stat()
            if info.st_uid == os.getuid() and time.time() - info.st_mtime > _STALE_S:
                path.unlink()
