"""Sampler of a rank's devices and host: a separate thread that writes samples into a file of the run folder.

The sampler can never harm a training. An error of a counter, a library or the file system is logged once in the rank's
log, and the thread goes on or ends. The file stays below 2,048 lines (`runs/monitoring/telemetry.py`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from hpc_trainer.config.program import is_one_a_node
from hpc_trainer.config.schema.monitor import OnOverheat
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.runs.files import OwnLines
from hpc_trainer.runs.layout import RunPaths
from hpc_trainer.runs.modes import make_folder
from hpc_trainer.runs.monitoring.telemetry import MAX_LINES, Device, Host, Sample, append_samples, thin_out
from hpc_trainer.runtime.counters.notes import Notes
from hpc_trainer.runtime.rank_env import RankEnv
from hpc_trainer.runtime.stop import StopFlag, wait_for_record
from hpc_trainer.worker.telemetry.care import Care
from hpc_trainer.worker.telemetry.move import Mover
from hpc_trainer.worker.telemetry.prometheus import PrometheusFile

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
            self.notes.tell("start", f"there is none: {error}")
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
            self.notes.tell("start", f"there is none: {type(error).__name__}: {error}")
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
            self.notes.tell("file", f"a sample could not be written, training goes on: {error}")
        except Exception as error:
            self.notes.tell(f"{type(error).__name__}", f"a sample is lost: {type(error).__name__}: {error}")

    def _sample(self, host: Hosts, devices: Devices | None) -> None:
        now, clock = time.monotonic(), self.clock()
        if clock < self._newest_time - 1.0:
            self.notes.tell("clock", f"the node's clock went back by {self._newest_time - clock:.0f} s")
        self._newest_time = clock
        step = self.step()
        used = host.read(now)
        gpus: Sequence[Device | None] = ([] if devices is None else devices.read(now)) or [None]
        samples = [
            Sample(
                attempt=self.attempt, rank=self.env.rank, time=clock, elapsed_s=now - self._first, node=self.env.node,
                step=step, device=device, host=used if index == 0 else None,
            )
            for index, device in enumerate(gpus)
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
            self.notes.tell(what, f"{what} lost a sample, training goes on: {type(error).__name__}: {error}")


def devices_of(config: TrainConfig, env: RankEnv, notes: Notes, gpu: Sequence[str]) -> Devices | None:
    """Return the GPUs of a rank; None if it has none, or if no library reports them."""
    if config.hardware.device_type != "cuda":
        return None
    index = None if is_one_a_node(config) else env.local_rank
    if _AMD.exists() and not _NVIDIA.exists():
        from hpc_trainer.runtime.counters.amd import AmdDevices

        return AmdDevices.find(notes, names=gpu, index=index)
    from hpc_trainer.runtime.counters.nvidia import NvidiaDevices

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
        from hpc_trainer.runtime.counters.host import HostCounters

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
