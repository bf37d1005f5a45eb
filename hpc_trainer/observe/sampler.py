"""Sampling of a rank's device and host, in a thread of its own, into a file of the run folder.

Each sample is checked for a device that is too hot or fails: that becomes a warning in `status`, and
`monitor.on_overheat` may lower the power limit or move the run to another node. The newest sample is also written for
the textfile collector of Prometheus' node_exporter (`monitor.prometheus_dir`). An error of a counter never ends the
training. The file stays below 2,048 lines (telemetry.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hpc_trainer.config.packages import optional
from hpc_trainer.config.program import is_one_a_node
from hpc_trainer.config.schema.output import OnOverheat
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.errors import ConfigError, NoRoomError, SlurmError
from hpc_trainer.observe.host_counters import Notes
from hpc_trainer.observe.telemetry import (
    HARMFUL,
    MAX_LINES,
    THROTTLE,
    Device,
    DeviceWarning,
    Host,
    Sample,
    Trouble,
    append_samples,
    thin_out,
    write_warnings,
)
from hpc_trainer.record.files import OwnLines, make_folder
from hpc_trainer.record.journal import DEVICE_FAILED, MAX_MOVES, OVERHEATED, Move, num_moves, write_move
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.runtime.rank_env import RankEnv
from hpc_trainer.runtime.stop import DEVICE, StopFlag, wait_for_record
from hpc_trainer.slurm.commands import estimate_start
from hpc_trainer.slurm.jobs import read_script, show_job

FATAL_XID = frozenset((48, 62, 64, 74, 79, 94, 95, 119, 120, 140))
"""NVIDIA's Xid codes that are the device's fault (docs.nvidia.com/deploy/xid-errors): memory (48, 64, 94, 95, 140), its
own processors (62, 119, 120), NVLink (74), fallen off the bus (79). A user's program causes 13, 31, 43 and 45."""
_SAMPLES = 2
"""Samples in a row before a warning: clocks go down for a moment when work begins or ends."""
_WARN_EVERY_S = 60.0
_LOWER_EVERY_S = 60.0


class Care:
    """Watch over the devices of one rank in one attempt; for the sampler's thread alone."""

    def __init__(
        self, paths: RunPaths, lower_power: Callable[[str | None], None] | None,
        move: Callable[[DeviceWarning], None] | None = None, move_after_s: float = 0.0,
    ) -> None:  # fmt: skip
        """Begin the watch without warnings.

        Args:
            lower_power: lowers the power limit of the device with this UUID a little; None if it was not configured.
            move: asks the run to leave the node of this device, again and again; None if it was not configured.
            move_after_s: seconds that heat must last without a break before the move.
        """
        self._paths, self._lower_power = paths, lower_power
        self._move, self._move_after_s = move, move_after_s
        self._found: dict[tuple[str | None, Trouble], DeviceWarning] = {}
        self._in_row: dict[tuple[str | None, Trouble], int] = {}
        self._begun_s: dict[tuple[str | None, Trouble], float] = {}
        self._hottest: dict[str | None, float] = {}
        self._first_ecc: dict[str | None, int] = {}
        self._seen_s: dict[str | None, float] = {}
        self._lowered_s: dict[str | None, float] = {}
        self._written_s = -_WARN_EVERY_S

    def close(self) -> None:
        """Do nothing: the warnings stay in the run folder, where `why` reads them."""

    def take(self, samples: Sequence[Sample]) -> None:
        """Take the samples of a period.

        Raises:
            OSError: the warning could not be written.
        """
        is_new = False
        for sample in samples:
            if sample.device is not None:
                passed = sample.elapsed_s - self._seen_s.get(sample.device.uuid, sample.elapsed_s)
                self._seen_s[sample.device.uuid] = sample.elapsed_s
                for trouble, detail in self._troubles(sample.device).items():
                    is_new |= self._add(sample, sample.device, trouble, detail, passed)
        now = samples[0].elapsed_s
        if self._found and (is_new or now - self._written_s >= _WARN_EVERY_S):
            self._written_s = now
            write_warnings(self._paths, samples[0].attempt, samples[0].rank, list(self._found.values()))
        if self._move is not None and (due := next(self._due(now), None)) is not None:
            self._move(due)

    def _due(self, now: float) -> Iterator[DeviceWarning]:
        """Yield the warnings that hold now and are reason enough to leave the node."""
        for key in self._in_row:
            if key in self._found and (not key[1].is_heat or now - self._begun_s[key] >= self._move_after_s):
                yield self._found[key]

    def _troubles(self, device: Device) -> dict[Trouble, str]:
        """Return the text of each trouble that the device has now."""
        heat = ""
        if device.temperature_c is not None:
            hottest = max(device.temperature_c, self._hottest.get(device.uuid, 0.0))
            self._hottest[device.uuid] = hottest
            limit = "" if device.temperature_limit_c is None else f", its limit is {device.temperature_limit_c:.0f} °C"
            heat = f"up to {hottest:.0f} °C{limit}"
        troubles = {}
        reasons = [reason for reason in device.throttle or () if reason in HARMFUL]
        if reasons:
            troubles[Trouble.slowed] = ", ".join([*reasons, *([heat] if heat else [])])
        elif device.throttle is None and (device.temperature_c or 0.0) >= (device.temperature_limit_c or math.inf):
            troubles[Trouble.hot] = heat
        if device.ecc_uncorrected is not None:
            more = device.ecc_uncorrected - self._first_ecc.setdefault(device.uuid, device.ecc_uncorrected)
            if more > 0:
                troubles[Trouble.ecc] = f"{more} since the attempt began"
        fatal = [number for number in device.xid or () if number in FATAL_XID]
        if fatal:
            troubles[Trouble.xid] = f"Xid {', '.join(map(str, fatal))}"
        if device.is_lost:
            troubles[Trouble.lost] = "GPU is lost"
        for key in [key for key in self._in_row if key[0] == device.uuid and key[1] not in troubles]:
            del self._in_row[key], self._begun_s[key]
        return troubles

    def _add(self, sample: Sample, device: Device, trouble: Trouble, detail: str, passed_s: float) -> bool:
        """Record a trouble, lower the power limit if configured, and return True if the warning is new."""
        key = (device.uuid, trouble)
        self._in_row[key] = self._in_row.get(key, 0) + 1
        self._begun_s.setdefault(key, sample.elapsed_s)
        is_heat = trouble.is_heat
        if is_heat and self._in_row[key] < _SAMPLES:
            return False
        since_s = sample.elapsed_s - self._lowered_s.get(device.uuid, -_LOWER_EVERY_S)
        if is_heat and self._lower_power is not None and since_s >= _LOWER_EVERY_S:
            self._lowered_s[device.uuid] = sample.elapsed_s
            self._lower_power(device.uuid)
        before = self._found.get(key)
        if before is None:
            self._found[key] = DeviceWarning(
                rank=sample.rank, trouble=trouble, node=sample.node or "?", detail=detail, since=sample.time,
                device=" ".join(part for part in (device.name, device.uuid) if part), last=sample.time,
                seconds=passed_s,
            )  # fmt: skip
            return True
        if trouble is Trouble.xid:
            detail = f"Xid {', '.join(dict.fromkeys((before.detail + ', ' + detail).replace('Xid ', '').split(', ')))}"
        self._found[key] = dataclasses.replace(
            before, detail=detail, last=sample.time, seconds=before.seconds + passed_s
        )
        return False


def move_of(warning: DeviceWarning) -> Move:
    """Return the move that a warning causes."""
    cause = OVERHEATED if warning.trouble.is_heat else DEVICE_FAILED
    return Move(node=warning.node, cause=cause, why=warning.text, time=time.time())


# A node that was drained or busy may be free by then.
_ASK_AGAIN_S = 600.0


class Mover:
    """Requests of one rank in one attempt to leave the node; for the sampler's thread alone."""

    def __init__(
        self, paths: RunPaths, env: RankEnv, attempt: int, flag: StopFlag, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._paths, self._env, self._attempt, self._flag, self._clock = paths, env, attempt, flag, clock
        self._asked_s: float | None = None
        self._notes = Notes()

    def __call__(self, warning: DeviceWarning) -> None:
        """Ask the run to stop, if it may and can go to another node; else log once why it stays.

        Raises:
            OSError: the request could not be written; the next sample tries again.
        """
        now = self._clock()
        if self._flag.is_set or (self._asked_s is not None and now - self._asked_s < _ASK_AGAIN_S):
            return
        stays = self._stays(warning.node)
        if stays is not None:
            self._asked_s = now
            self._notes.tell(stays, f"{warning.text}. The run continues on this node: {stays}")
            return
        write_move(self._paths, self._attempt, move_of(warning))
        self._notes.tell("move", f"{warning.text}. The run is asked to save, and to leave {warning.node}.")
        self._flag.request(DEVICE)

    def _stays(self, node: str) -> str | None:
        """Return why the run cannot leave this node; None if it can."""
        job_id = self._env.job_id
        if not job_id[:1].isdecimal():
            return "it is not a Slurm job, so no scheduler would give it another node."
        if num_moves(self._paths) >= MAX_MOVES:
            return f"it has left {MAX_MOVES} nodes since it was submitted, which is the limit."
        without = node
        try:
            without = ",".join(filter(None, (show_job(job_id).excluded, node)))
            # One element: a limit on the number of jobs says nothing against this one.
            estimate_start(read_script(job_id), ["--array=0", f"--exclude={without}"])
        except NoRoomError:  # the job has its place in the queue
            return None
        except SlurmError as error:
            return f"without {without} Slurm would not start it: {error}"
        return None


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
                f"monitor.prometheus_dir={self._folder} is not a folder on {socket.gethostname()}. Create it there, or "
                "name the one that node_exporter reads (--collector.textfile.directory)."
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
    for key, (name, kind, factor) in table.items():
        value = getattr(part, key)
        if value is not None:
            yield name, kind, value * factor


class _Collector:
    """Object that `write_to_textfile` accepts as a registry."""

    def __init__(self, families: Iterable[Any]) -> None:
        self._families = families

    def collect(self) -> Iterable[Any]:
        """Return all families of metrics."""
        return self._families


def _remove_stale(folder: Path) -> None:
    for path in folder.glob(f"{_PREFIX}*.prom"):
        with contextlib.suppress(OSError):
            info = path.stat()
            if info.st_uid == os.getuid() and time.time() - info.st_mtime > _STALE_S:
                path.unlink()


# Largest number of lines per second that a run writes to the file server.
_MOST_A_SECOND = 20
# After the first minute samples are collected and written together: each write loads the file server.
_YOUNG_S, _WRITE_EVERY_S = 60.0, 10.0
# The end of a run waits no longer than this for a driver that does not answer.
_LAST_S = 2.0
# The wait at a stop: enough to restore the power limit of a device and to free its handles.
_AT_STOP_S = 0.2
# Files that show which driver is there: torch gives AMD's GPUs the name cuda too.
_NVIDIA, _AMD = Path("/dev/nvidiactl"), Path("/dev/kfd")


class Devices(Protocol):
    """GPUs of one rank."""

    def read(self, now: float) -> Sequence[Device]:
        """Return one sample of each GPU; [] if nothing is known.

        Args:
            now: seconds of a monotonic clock.
        """

    def lower_power(self, uuid: str | None) -> None:
        """Lower the power limit of one GPU a little, until `close`."""

    def close(self) -> None:
        """Release the GPUs at the end of the attempt."""


class Hosts(Protocol):
    """Host counters of one rank."""

    def read(self, now: float) -> Host:
        """Return the host usage of the rank's processes; `now` is in seconds of a monotonic clock."""


class Watcher(Protocol):
    """Receiver of the samples of each period, in the sampler's thread."""

    def take(self, samples: Sequence[Sample]) -> None:
        """Take the samples of one period."""

    def close(self) -> None:
        """Clean up at the end of the attempt."""


@dataclass(slots=True, kw_only=True)
class Sampler:
    """Sampler of one rank in one attempt. `devices` and `host` are called in the thread: their imports take time."""

    paths: RunPaths
    env: RankEnv
    attempt: int
    every_s: float
    step: Callable[[], int | None]
    devices: Callable[[Notes], Devices | None]
    host: Callable[[Notes], Hosts]
    notes: Notes = field(default_factory=Notes)
    stop: StopFlag = field(default_factory=StopFlag)
    clock: Callable[[], float] = time.time
    watchers: Sequence[Watcher] = ()
    _lines: int = 0
    _held: list[Sample] = field(default_factory=list)
    _written: float = 0.0
    _first: float = field(default_factory=time.monotonic)
    _newest_time: float = 0.0
    _ended: threading.Event = field(default_factory=threading.Event)
    _file: OwnLines = field(init=False)

    def __post_init__(self) -> None:
        self._file = OwnLines(self.paths.telemetry_file(self.attempt, self.env.rank))

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        """Sample while the block runs, and once at its end; an error of the block is not hidden."""
        thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads for this user
            self.notes.tell("start", f"no samples are taken: {error}")
            yield
            return
        try:
            yield
        finally:
            self._ended.set()
            wait_for_record(thread, _LAST_S, self.stop, _AT_STOP_S)

    def _run(self) -> None:
        try:
            make_folder(self.paths.telemetry)
            host, devices = self.host(self.notes), self.devices(self.notes)
        except Exception as error:
            self.notes.tell("start", f"no samples are taken: {type(error).__name__}: {error}")
            return
        self._first = time.monotonic()
        try:
            self.sample(host, devices)
            while not self._ended.wait(self.every_s):
                self.sample(host, devices)
            self.sample(host, devices)
        finally:
            self._file.close()
            for part in (devices, *self.watchers):
                if part is not None:
                    with contextlib.suppress(Exception):
                        part.close()

    def sample(self, host: Hosts, devices: Devices | None) -> None:
        """Read all counters, and write the lines of one period. Raises nothing."""
        try:
            self._sample(host, devices)
        except OSError as error:
            self.notes.tell("file", f"a sample could not be written, training continues: {error}")
        except Exception as error:
            self.notes.tell(f"{type(error).__name__}", f"a sample is lost: {type(error).__name__}: {error}")

    def _sample(self, host: Hosts, devices: Devices | None) -> None:
        now, clock = time.monotonic(), self.clock()
        if clock < self._newest_time - 1.0:
            self.notes.tell("clock", f"the node's clock went back by {self._newest_time - clock:.0f} s")
        self._newest_time = clock
        step = self.step()
        used = host.read(now)
        gpus = [] if devices is None else [_share_of(device, self.env.per_gpu) for device in devices.read(now)]
        samples = [
            Sample(
                attempt=self.attempt, rank=self.env.rank, time=clock, elapsed_s=now - self._first, node=self.env.node,
                step=step, device=device, host=used if index == 0 else None,
            )
            for index, device in enumerate(gpus or [None])
        ]  # fmt: skip
        self._held += samples
        try:
            is_young = now - self._first < _YOUNG_S
            if is_young or self._ended.is_set() or now - self._written >= _WRITE_EVERY_S - 0.5 * self.every_s:
                self._write(now)
        finally:
            for watcher in self.watchers:
                self._show(watcher, samples)

    def _write(self, now: float) -> None:
        """Append the samples that wait.

        Raises:
            OSError: the file system refused, and the samples are lost.
        """
        samples, self._held, self._written = self._held, [], now
        append_samples(self.paths, samples, self._file)
        self._lines += len(samples)
        if self._lines >= MAX_LINES:
            self._file.close()  # `thin_out` replaces the file
            self._lines = thin_out(self.paths.telemetry_file(self.attempt, self.env.rank))

    def _show(self, watcher: Watcher, samples: Sequence[Sample]) -> None:
        try:
            watcher.take(samples)
        except Exception as error:
            what = type(watcher).__name__
            self.notes.tell(what, f"{what} lost a sample, training continues: {type(error).__name__}: {error}")


def _share_of(device: Device, per_gpu: int) -> Device:
    """Return a sample with this run's share of the energy; the other figures are those of the whole GPU."""
    if per_gpu == 1 or device.energy_j is None:
        return device
    return dataclasses.replace(device, energy_j=device.energy_j / per_gpu)


def devices_of(config: TrainConfig, env: RankEnv, notes: Notes, gpu: Sequence[str]) -> Devices | None:
    """Return the GPUs of a rank; None if it has none, or if no library reports them."""
    if config.hardware.device_type != "cuda":
        return None
    index = None if is_one_a_node(config) else env.local_rank
    if _AMD.exists() and not _NVIDIA.exists():
        from hpc_trainer.observe.amd import AmdDevices

        return AmdDevices.find(notes, names=gpu, index=index)
    from hpc_trainer.observe.nvidia import NvidiaDevices

    return NvidiaDevices.find(notes, uuid=gpu[0] if gpu else None, index=index)


def sampler_of(
    config: TrainConfig, paths: RunPaths, env: RankEnv, attempt: int, flag: StopFlag, *,
    step: Callable[[], int | None], gpu: Sequence[str] = (),
) -> contextlib.AbstractContextManager[None]:  # fmt: skip
    """Return a context manager that samples while its block runs, as configured in `monitor`.

    Args:
        flag: stop flag of this rank, for `monitor.on_overheat=move`.
        step: returns the newest step; None if unknown.
        gpu: names of the rank's GPU, if torch knows them (`DeviceKind.names`).
    """
    if not config.monitor.telemetry_every_s:
        return contextlib.nullcontext()

    opened: list[Devices] = []

    def host(notes: Notes) -> Hosts:
        from hpc_trainer.observe.host_counters import HostCounters

        return HostCounters(notes, has_energy=env.local_rank == 0)

    def devices(notes: Notes) -> Devices | None:
        made = devices_of(config, env, notes, gpu)
        opened.extend([] if made is None else [made])
        return made

    def lower_power(uuid: str | None) -> None:
        for device in opened:
            device.lower_power(uuid)

    does = config.monitor.on_overheat
    care = Care(
        paths, lower_power if does is OnOverheat.lower_power else None,
        Mover(paths, env, attempt, flag) if does is OnOverheat.move else None, config.monitor.move_after_s,
    )  # fmt: skip
    watchers: list[Watcher] = [care]
    if config.monitor.prometheus_dir is not None:
        watchers.append(PrometheusFile(Path(config.monitor.prometheus_dir), paths.run_id, env.rank))
    sampler = Sampler(
        paths=paths, env=env, attempt=attempt,
        every_s=max(config.monitor.telemetry_every_s, env.world_size / _MOST_A_SECOND),
        step=step, devices=devices, host=host, watchers=watchers, stop=flag,
    )  # fmt: skip
    return sampler.sampling()
