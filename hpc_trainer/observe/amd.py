"""AMD's GPUs, read with AMD SMI (amdsmi), in the same form as NVIDIA's. This code has not run on an AMD GPU yet.

The library's Python functions return dicts, in which the text "N/A" means that the device does not have the value.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hpc_trainer.config.packages import optional
from hpc_trainer.errors import ConfigError
from hpc_trainer.observe.host_counters import AddedPower, Notes
from hpc_trainer.observe.telemetry import Device

_LISTS = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""Variables of which HIP uses the first one that is set, to choose among the devices of ROCR_VISIBLE_DEVICES."""
_MIB, _UW = 2**20, 1e-6
_VIOLATIONS = {
    "active_ppt_pwr": "power_cap", "active_socket_thrm": "hw_thermal", "active_vr_thrm": "hw_thermal",
    "active_hbm_thrm": "hw_thermal", "active_prochot_thrm": "hw_slowdown",
}  # fmt: skip


class AmdDevices:
    """GPUs of one rank."""

    def __init__(self, notes: Notes, smi: Any, handles: Sequence[Any]) -> None:
        self._smi = smi
        self.devices = [AmdDevice(smi, notes, handle) for handle in handles]
        self._notes = notes

    @classmethod
    def find(
        cls, notes: Notes, *, names: Sequence[str], index: int | None, environ: Mapping[str, str] = os.environ
    ) -> AmdDevices | None:
        """Return the rank's GPUs; None, with a note in the log, if there is no library, no driver or no such device.

        Args:
            names: names by which torch knows the rank's device: its UUID and its place on the bus.
            index: the device's index among those that HIP sees, taken modulo their number; None for all devices.
        """
        try:
            smi = optional("amdsmi", "reading an AMD GPU")
            smi.amdsmi_init()
            handles = _visible(smi, environ)
            placed = [gpu for gpu in handles if str(smi.amdsmi_get_gpu_device_bdf(gpu)).lower()[:10] in names[1:2]]
        except ConfigError as error:
            notes.tell("driver", f"no GPU figures: {error}")
            return None
        except Exception as error:  # amdsmi raises OSError, KeyError and its own errors if the driver differs
            notes.tell("driver", f"no GPU figures: {type(error).__name__}: {error} (AMD SMI)")
            return None
        mine = handles if index is None else placed[:1] or handles[index % len(handles or [0]) :][:1]
        if not mine:
            notes.tell("driver", "no GPU figures: AMD SMI does not know which device is this rank's")
            return None
        return cls(notes, smi, mine)

    def read(self, now: float) -> list[Device]:
        """Return one sample of each device.

        Args:
            now: seconds of a monotonic clock.
        """
        return [device.read(now) for device in self.devices]

    def lower_power(self, uuid: str | None) -> None:
        """Log that the power limit is unchanged, because only root may set it on AMD's GPUs."""
        self._notes.tell(f"set power limit {uuid}", "only root can set the power limit of an AMD GPU: it is unchanged")

    def close(self) -> None:
        """Shut AMD SMI down."""
        with contextlib.suppress(Exception):
            self._smi.amdsmi_shut_down()


def _visible(smi: Any, environ: Mapping[str, str]) -> list[Any]:
    """Return the handles of the devices that HIP sees, in its order; a list of indices ends at an invalid entry."""
    handles = list(smi.amdsmi_get_processor_handles())
    lists = ["ROCR_VISIBLE_DEVICES", next((name for name in _LISTS if name in environ), "")]
    for name in lists:
        if name in environ:
            entries = [entry.strip() for entry in environ[name].split(",")]
            kept = []
            for entry in entries:
                if not entry.isdecimal() or int(entry) >= len(handles):
                    break
                kept.append(handles[int(entry)])
            handles = kept
    return handles


class AmdDevice:
    """One AMD GPU."""

    def __init__(self, smi: Any, notes: Notes, handle: Any) -> None:
        self._smi, self._notes, self._handle = smi, notes, handle
        self._absent: dict[str, str] = {}
        self._is_first = True
        self._added = AddedPower()
        self._first_ticks: float | None = None
        self.uuid = self._ask("uuid", lambda: str(smi.amdsmi_get_gpu_device_uuid(handle)))
        self.name = self._ask("name", lambda: str(smi.amdsmi_get_gpu_asic_info(handle)["market_name"]))

    def read(self, now: float) -> Device:
        """Return one sample of the device.

        Args:
            now: seconds of a monotonic clock.
        """
        smi, handle = self._smi, self._handle
        kinds, metrics = smi.AmdSmiTemperatureType, smi.AmdSmiTemperatureMetric
        activity = self._ask("utilisation", lambda: _number(smi.amdsmi_get_gpu_activity(handle)["gfx_activity"]))
        memory = self._ask("memory", lambda: smi.amdsmi_get_gpu_vram_usage(handle)) or {}
        power = self._ask("power", lambda: smi.amdsmi_get_power_info(handle)) or {}
        names = ("socket_power", "current_socket_power", "average_socket_power")
        watts = next((number for name in names if (number := _number(power.get(name))) is not None), None)
        limit = _number(power.get("power_limit"))
        ecc = self._ask("ECC", lambda: smi.amdsmi_get_gpu_total_ecc_count(handle)) or {}
        status = self._ask("throttle reasons", lambda: smi.amdsmi_get_violation_status(handle))
        reasons = [word for name, word in _VIOLATIONS.items() if (status or {}).get(name) is True]
        added = None if watts is None else self._added.add(now, watts)
        counted = self._ask("energy", self._joules)

        def celsius(metric: Any) -> float | None:
            return _number(self._ask("temperature", lambda: smi.amdsmi_get_temp_metric(handle, kinds.HOTSPOT, metric)))

        def clock(kind: Any) -> int | None:
            clocks = self._ask("clocks", lambda: smi.amdsmi_get_clock_info(handle, kind)) or {}
            value = _number(clocks.get("clk", clocks.get("cur_clk")))
            return None if value is None else int(value)

        total, used = _number(memory.get("vram_total")), _number(memory.get("vram_used"))
        corrected, uncorrected = _number(ecc.get("correctable_count")), _number(ecc.get("uncorrectable_count"))
        sample = Device(
            uuid=self.uuid, name=self.name, utilisation=None if activity is None else activity / 100,
            memory_used=None if used is None else int(used * _MIB),
            memory_total=None if total is None else int(total * _MIB),
            temperature_c=celsius(metrics.CURRENT), temperature_limit_c=celsius(metrics.CRITICAL),
            # Microwatts since ROCm 6; no GPU takes 10 kW.
            power_w=watts, power_limit_w=limit * _UW if limit is not None and limit > 1e4 else limit,
            energy_j=added if counted is None else counted,
            sm_clock_mhz=clock(smi.AmdSmiClkType.GFX), mem_clock_mhz=clock(smi.AmdSmiClkType.MEM),
            throttle=None if status is None else tuple(dict.fromkeys(reasons)),
            ecc_corrected=None if corrected is None else int(corrected),
            ecc_uncorrected=None if uncorrected is None else int(uncorrected),
        )  # fmt: skip
        if self._is_first and self._absent:
            absent = ", ".join(f"{what} ({why})" for what, why in self._absent.items())
            self._notes.tell(f"absent {self.uuid}", f"{self.name} does not report: {absent}")
        self._is_first = False
        return sample

    def _joules(self) -> float | None:
        """Return the joules that the device has counted since the first call; None if it counts none."""
        counter = self._smi.amdsmi_get_energy_count(self._handle)
        ticks = _number(counter.get("energy_accumulator", counter.get("power")))  # the second key before ROCm 6.1
        resolution = _number(counter.get("counter_resolution"))  # microjoules
        if ticks is None or resolution is None:
            return None
        self._first_ticks = ticks if self._first_ticks is None or ticks < self._first_ticks else self._first_ticks
        return (ticks - self._first_ticks) * resolution * 1e-6

    def _ask(self, what: str, call: Callable[[], Any]) -> Any:
        """Return the library's answer; None if the library refuses. A refused value is not asked for again."""
        if what in self._absent:
            return None
        try:
            return call()
        except Exception as error:
            self._absent[what] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
            return None


def _number(value: Any) -> float | None:
    """Return a value as a float; None for "N/A"."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
