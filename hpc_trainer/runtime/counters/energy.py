"""Energy of a node, as far as it can be read without root rights.

RAPL (/sys/class/powercap, Intel and AMD) counts the microjoules of each processor package, and restarts at 0 after
`max_energy_range_uj`. Since CVE-2020-8694 most kernels let only root read RAPL. A power meter (ACPI or IPMI, by hwmon:
power1_average, microwatts) measures the whole node.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from hpc_trainer.runtime.counters.notes import Notes

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
        self._zones = [zone for zone in zones if zone.name.count(":") == 1 or _word(zone / "name") == "dram"]
        self._meters = [
            folder / "power1_average"
            for folder in sorted((root / "sys/class/hwmon").glob("hwmon*"))
            if _word(folder / "name") in _METERS and (folder / "power1_average").exists()
        ]
        self._last_uj = {zone: value for zone in self._zones if (value := self._read(zone / "energy_uj")) is not None}
        self._last: tuple[float, float] | None = None
        self._energy_j = 0.0
        self._added = AddedPower()

    def read(self, now: float) -> tuple[float | None, float | None]:
        """Return (watts, joules so far), each None if it cannot be read.

        Args:
            now: seconds of a monotonic clock.
        """
        power = next((value / 1e6 for meter in self._meters if (value := self._read(meter)) is not None), None)
        if self._last_uj:
            rapl_w = self._count(now)
            return (rapl_w if power is None else power), self._energy_j
        return power, None if power is None else self._added.add(now, power)

    def _count(self, now: float) -> float | None:
        """Add the energy used by the packages since the last call, and return the mean watts; None if unknown."""
        used = 0.0
        for zone, last in list(self._last_uj.items()):
            value = self._read(zone / "energy_uj")
            if value is None:
                continue
            passed = value - last
            if passed < 0:  # the counter has restarted
                passed += self._read(zone / "max_energy_range_uj") or 0
            used += max(0, passed) / 1e6
            self._last_uj[zone] = value
        before, self._last = self._last, (now, used)
        self._energy_j += used
        return None if before is None or now <= before[0] else used / (now - before[0])

    def _read(self, path: Path) -> int | None:
        try:
            return int(path.read_text())
        except PermissionError:
            self._notes.tell("energy", f"{path} may be read by root only: no energy of the processors")
        except (OSError, ValueError) as error:
            self._notes.tell("energy", f"{path} cannot be read: {error}")
        return None


def _word(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""
