"""Counters of a node and of a rank's processes: cores, memory, disk and energy.

Processes are read from /proc, the control group and psutil. proc(5): in `stat` of a process, the name in brackets is
followed by the state. Counted from the state as field 1, field 10 is majflt, 11 cmajflt, 12 utime, 13 stime, 14 cutime,
15 cstime (times in ticks), 22 rss (in pages).

Energy is read as far as that needs no root rights. RAPL (/sys/class/powercap, Intel and AMD) counts the microjoules of
each processor package, and restarts at 0 after `max_energy_range_uj`. Since CVE-2020-8694 most kernels let only root
read RAPL. A power meter (ACPI or IPMI, by hwmon: power1_average, microwatts) measures the whole node.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from hpc_trainer.observe.telemetry import Host

_LOG = logging.getLogger(__name__)


class Notes:
    """Notes of one rank of one attempt."""

    def __init__(self) -> None:
        self._subjects: set[str] = set()

    def tell(self, what: str, text: str) -> None:
        """Log `text`, unless a note on `what` was logged before."""
        if what not in self._subjects:
            self._subjects.add(what)
            _LOG.warning("telemetry: %s", text)

    @property
    def subjects(self) -> frozenset[str]:
        """Subjects of the notes logged so far."""
        return frozenset(self._subjects)


_METERS = ("power_meter", "ipmi")


class AddedPower:
    """Energy of a device that reports only its power: the sum over the sample intervals, by the mean of both ends."""

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None
        self.energy_j = 0.0

    def add(self, now: float, power_w: float) -> float:
        """Add a sample, and return the joules so far. A clock that stands still or goes back adds nothing."""
        if self._last is not None and now > self._last[0]:
            self.energy_j += (now - self._last[0]) * (power_w + self._last[1]) / 2
        self._last = (now, power_w)
        return self.energy_j


class HostEnergy:
    """Energy of the node since this object was created."""

    def __init__(self, notes: Notes, root: Path = Path("/")) -> None:
        self._notes = notes
        zones = sorted((root / "sys/class/powercap").glob("intel-rapl:*"))
        # Packages only: their subzones (cores, memory) are counted in them, except for memory outside the package.
        self._zones = [zone for zone in zones if zone.name.count(":") == 1 or _text_of(zone / "name") == "dram"]
        self._meters = [
            folder / "power1_average"
            for folder in sorted((root / "sys/class/hwmon").glob("hwmon*"))
            if _text_of(folder / "name") in _METERS and (folder / "power1_average").exists()
        ]
        self._last_uj = {zone: value for zone in self._zones if (value := self._read(zone / "energy_uj")) is not None}
        self._energy_j = 0.0
        self._added = AddedPower()

    def read(self, now: float) -> float | None:
        """Return the joules so far; None if they cannot be read.

        Args:
            now: seconds of a monotonic clock.
        """
        if self._last_uj:
            return self._count()
        power = next((value / 1e6 for meter in self._meters if (value := self._read(meter)) is not None), None)
        return None if power is None else self._added.add(now, power)

    def _count(self) -> float:
        """Add the energy used by the packages since the last call, and return the joules so far."""
        for zone, last in list(self._last_uj.items()):
            value = self._read(zone / "energy_uj")
            if value is None:
                continue
            passed = value - last
            if passed < 0:  # the counter has restarted
                passed += self._read(zone / "max_energy_range_uj") or 0
            self._energy_j += max(0, passed) / 1e6
            self._last_uj[zone] = value
        return self._energy_j

    def _read(self, path: Path) -> int | None:
        try:
            return int(path.read_text())
        except PermissionError:
            self._notes.tell("energy", f"{path} may be read by root only: no energy of the processors")
        except (OSError, ValueError) as error:
            self._notes.tell("energy", f"{path} cannot be read: {error}")
        return None


def _text_of(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""


_TICK, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
# Control groups of version 1 without a limit report the largest number of pages, in bytes.
_NO_LIMIT = 2**60
Value = TypeVar("Value")


@dataclass(slots=True)
class _Tree:
    """Sums over processes; a child that ended and was waited for counts in its parent."""

    cpu_s: float = 0.0
    major_faults: int = 0
    rss_bytes: int = 0
    read_bytes: int = 0
    write_bytes: int = 0


class HostCounters:
    """Counters of this process and all processes that it started. The first `read` gives no number of busy cores."""

    def __init__(self, notes: Notes, *, has_energy: bool = True, root: Path = Path("/")) -> None:
        """Read the values from which later calls count.

        Args:
            has_energy: True if this rank reports the node's energy, as one rank per node does.
            root: folder that contains `proc` and `sys`.
        """
        self._notes, self._root = notes, root
        self._energy = HostEnergy(notes, root) if has_energy else None
        self._first = self._tree()
        self._last_cpu: tuple[float, float] | None = None
        self._group = _MemoryGroup.find(root)
        self._most_cpu = self._first.cpu_s

    def read(self, now: float) -> Host:
        """Return one sample of the host.

        Args:
            now: seconds of a monotonic clock.
        """
        tree = self._tree()
        # The time of a child that ended without being waited for is lost: the sum must not fall.
        self._most_cpu = max(self._most_cpu, tree.cpu_s)
        before, self._last_cpu = self._last_cpu, (now, self._most_cpu)
        limit, available = self._or_note("memory", self._memory) or (None, None)
        return Host(
            cpus=None if before is None or now <= before[0] else (self._most_cpu - before[1]) / (now - before[0]),
            cpus_allowed=self._or_note("cores", self._cpus_allowed),
            rss_bytes=tree.rss_bytes or None,
            memory_available=available,
            memory_limit=limit,
            major_faults=max(0, tree.major_faults - self._first.major_faults),
            disk_read_bytes=max(0, tree.read_bytes - self._first.read_bytes),
            disk_write_bytes=max(0, tree.write_bytes - self._first.write_bytes),
            energy_j=None if self._energy is None else self._energy.read(now),
        )

    def _or_note(self, what: str, read: Callable[[], Value]) -> Value | None:
        try:
            return read()
        except (OSError, ValueError, IndexError, psutil.Error) as error:
            self._notes.tell(what, f"no figures of the host's {what}: {error}")
            return None

    def _tree(self) -> _Tree:
        tree = _Tree()
        for pid in _descendants(os.getpid()):
            with contextlib.suppress(OSError, ValueError, IndexError):  # the process has just ended
                fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
                tree.cpu_s += sum(map(int, fields[11:15])) / _TICK
                tree.major_faults += int(fields[9]) + int(fields[10])
                tree.rss_bytes += int(fields[21]) * _PAGE
                read, written = _io_of(pid)
                tree.read_bytes += read
                tree.write_bytes += written
        return tree

    def _memory(self) -> tuple[int, int]:
        """Return (limit, available) in bytes."""
        node = psutil.virtual_memory()
        if self._group is None:
            return int(node.total), int(node.available)
        limit = self._group.limit()
        if limit is None or limit > node.total:
            return int(node.total), int(node.available)
        return limit, max(0, min(int(node.available), limit - self._group.used()))

    def _cpus_allowed(self) -> float:
        allowed = float(len(os.sched_getaffinity(os.getpid())))  # 0 would mean this thread, which is not pinned
        quota = _cpu_quota(self._root)
        return allowed if quota is None else min(allowed, quota)


def _descendants(pid: int) -> Iterator[int]:
    """Yield a process and all its descendants that still run, from the kernel's list of the children of each thread."""
    waiting = [pid]
    while waiting:
        process = waiting.pop()
        yield process
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{process}/task"):  # noqa: PTH208
                with contextlib.suppress(OSError):
                    text = Path(f"/proc/{process}/task/{thread}/children").read_text()
                    waiting += map(int, text.split())


def _io_of(pid: int) -> tuple[int, int]:
    """Return the bytes read and written, from /proc/PID/io; 0 if unreadable, as for a child of another user."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        rows = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        return int(rows["read_bytes"]), int(rows["write_bytes"])
    return 0, 0


@dataclass(frozen=True, slots=True)
class _MemoryGroup:
    """Control groups of this process that count memory, the innermost first."""

    folders: tuple[Path, ...]
    limit_name: str
    usage_name: str
    inactive: str
    """Key in memory.stat of the bytes that the kernel would free at once."""

    @classmethod
    def find(cls, root: Path) -> _MemoryGroup | None:
        place = _group_of(root, "memory")
        if place is not None:
            folders = _upwards(root / "sys/fs/cgroup/memory", place)
            return cls(folders, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        place = _group_of(root, "")
        if place is not None:
            return cls(_upwards(root / "sys/fs/cgroup", place), "memory.max", "memory.current", "inactive_file")
        return None

    def limit(self) -> int | None:
        """Return the smallest limit of all groups, in bytes; None if there is no limit."""
        limits = []
        for folder in self.folders:
            with contextlib.suppress(OSError, ValueError):
                limits.append(int((folder / self.limit_name).read_text()))  # "max" is no number
        return min((limit for limit in limits if limit < _NO_LIMIT), default=None)

    def used(self) -> int:
        """Return the bytes used by the group with the smallest limit, without files that were read once."""
        limit = self.limit()
        for folder in self.folders:
            with contextlib.suppress(OSError, ValueError):
                if int((folder / self.limit_name).read_text()) == limit:
                    used = int((folder / self.usage_name).read_text())
                    rows = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
                    return used - next((int(row[1]) for row in rows if row[0] == self.inactive), 0)
        return 0


def _group_of(root: Path, controller: str) -> str | None:
    """Return the path of our control group from /proc/self/cgroup; the controller `""` means version 2."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, names, place = line.split(":", 2)
            if controller in names.split(","):
                return place
    return None


def _upwards(top: Path, place: str) -> tuple[Path, ...]:
    inner = top / place.lstrip("/")
    # In a container the path may be the host's; then the top folder is our own group.
    return (inner, *(parent for parent in inner.parents if parent == top or top in parent.parents))


def _cpu_quota(root: Path) -> float | None:
    """Return the number of cores by the quota of the control groups; None if there is no quota."""
    quotas = []
    place = _group_of(root, "cpu")
    if place is not None:
        for folder in _upwards(root / "sys/fs/cgroup/cpu", place):
            with contextlib.suppress(OSError, ValueError):
                quota = int((folder / "cpu.cfs_quota_us").read_text())
                if quota > 0:
                    quotas.append(quota / int((folder / "cpu.cfs_period_us").read_text()))
    elif (place := _group_of(root, "")) is not None:
        for folder in _upwards(root / "sys/fs/cgroup", place):
            with contextlib.suppress(OSError, ValueError):
                quota_us, period_us = (folder / "cpu.max").read_text().split()
                quotas.append(int(quota_us) / int(period_us))  # "max" is no number
    return min(quotas, default=None)
