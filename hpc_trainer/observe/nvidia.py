"""NVIDIA's GPUs by NVML (nvidia-ml-py): which of them a process uses, and each counter by itself.

A counter that a device does not have is None, and the log says so once. CUDA numbers devices in another way than NVML.
For a MIG device NVML gives the memory. Temperature, clocks and faults are those of the whole GPU, and the power
of the part is unknown.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from hpc_trainer.config.packages import optional
from hpc_trainer.errors import ConfigError
from hpc_trainer.observe.host_counters import AddedPower, Notes
from hpc_trainer.observe.telemetry import Device

_LIST, _ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"


def visible_devices(nvml: Any, environ: Mapping[str, str], notes: Notes) -> list[Any]:
    """Return NVML's handles of the devices that CUDA sees, in CUDA's order; [] if that order is unknown.

    Raises nvml.NVMLError.
    """
    whole = _whole_devices(nvml)
    text = environ.get(_LIST)
    entries = (
        [str(index) for index in range(len(whole))] if text is None else [part.strip() for part in text.split(",")]
    )
    if len(whole) > 1 and environ.get(_ORDER) != "PCI_BUS_ID" and any(entry.isdecimal() for entry in entries):
        # By default CUDA lists the fastest GPU first: the order on the bus only if all GPUs are of one kind.
        names = {nvml.nvmlDeviceGetName(device) for device in whole}
        if len(names) > 1:
            notes.tell(
                "order",
                f"the GPUs of this node are of several kinds ({', '.join(sorted(names))}), and which is number "
                f"{entries[0]} depends on {_ORDER}: no GPU figures. Set cluster.env.{_ORDER}=PCI_BUS_ID.",
            )
            return []
    handles: list[Any] = []
    for entry in entries:
        handle = _device(nvml, whole, entry)
        if handle is None:
            break
        handles.append(handle)
    return handles


def device_of_uuid(nvml: Any, uuid: str) -> Any | None:
    """Return the handle of the device with torch's UUID, with or without `GPU-`; None if absent or divided by MIG.

    Raises nvml.NVMLError.
    """
    bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
    for name in (f"GPU-{bare}", f"MIG-{bare}"):
        with contextlib.suppress(nvml.NVMLError_NotFound, nvml.NVMLError_InvalidArgument):
            handle = nvml.nvmlDeviceGetHandleByUUID(name)
            return None if name.startswith("GPU-") and parts_of(nvml, handle) else handle
    return None


def parts_of(nvml: Any, device: Any) -> list[Any]:
    """Return the handles of the MIG devices of a GPU; [] if the GPU is not divided."""
    try:
        if nvml.nvmlDeviceGetMigMode(device)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return []
        count = nvml.nvmlDeviceGetMaxMigDeviceCount(device)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
        return []
    parts = []
    for index in range(count):
        with contextlib.suppress(nvml.NVMLError_NotFound, nvml.NVMLError_NoPermission):
            parts.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, index))
    return parts


def _whole_devices(nvml: Any) -> list[Any]:
    """Return the handles of all GPUs that this process may use, in the order of the bus."""
    handles = []
    for index in range(nvml.nvmlDeviceGetCount()):
        with contextlib.suppress(nvml.NVMLError_NoPermission):
            handles.append(nvml.nvmlDeviceGetHandleByIndex(index))
    return handles


def _device(nvml: Any, whole: list[Any], word: str) -> Any | None:
    """Return the device that one entry of the list names; None if there is none."""
    if word.isdecimal():
        device = whole[int(word)] if int(word) < len(whole) else None
        parts = [] if device is None else parts_of(nvml, device)
        return parts[0] if parts else device  # CUDA uses only one part of a GPU
    if word.startswith("MIG-"):
        parts = [part for gpu in whole for part in parts_of(nvml, gpu)]
        return _by_beginning(nvml, parts, word)
    return _by_beginning(nvml, whole, word) if word.startswith("GPU-") else None


def _by_beginning(nvml: Any, devices: list[Any], word: str) -> Any | None:
    matches = [device for device in devices if str(nvml.nvmlDeviceGetUUID(device)).startswith(word)]
    return matches[0] if len(matches) == 1 else None


# nvml.h, nvmlClocksEventReason*: a version of the module one year older has other names for the same bits. 0x1: idle.
_REASONS = {
    0x2: "applications_clocks", 0x4: "power_cap", 0x8: "hw_slowdown", 0x10: "sync_boost", 0x20: "sw_thermal",
    0x40: "hw_thermal", 0x80: "power_brake", 0x100: "display", 0x200: "board_limit", 0x400: "reliability",
}  # fmt: skip
_ALL_LINKS = 2**32 - 1
_MOST_EVENTS = 32  # in one period; a broken device reports the same event without end
_KIB = 1024
_LOWER_BY = 0.9
_NEVER = ("NotSupported", "NoPermission", "FunctionNotFound")
Value = TypeVar("Value")


class NvidiaDevices:
    """GPUs of one rank."""

    def __init__(self, notes: Notes, devices: Sequence[NvidiaDevice], nvml: Any) -> None:
        self._notes, self.devices, self._nvml = notes, devices, nvml

    @classmethod
    def find(
        cls, notes: Notes, *, uuid: str | None, index: int | None, environ: Mapping[str, str] = os.environ
    ) -> NvidiaDevices | None:
        """Return the rank's GPUs; None, with a note in the log, if there is no library, no driver or no such device.

        Args:
            uuid: UUID of the rank's device, as torch writes it.
            index: the device's index among those that CUDA sees, taken modulo their number; None for all devices.
        """
        try:
            nvml = optional("pynvml", "reading an NVIDIA GPU")
        except ConfigError as error:
            notes.tell("driver", f"no GPU figures: {error}")
            return None
        try:
            nvml.nvmlInit()
            handles = _handles(nvml, notes, uuid, index, environ)
        except nvml.NVMLError as error:
            notes.tell("driver", f"no GPU figures: {error} (NVML)")
            return None
        if not handles:
            notes.tell("driver", "no GPU figures: NVML does not know which device is this rank's")
            return None
        return cls(notes, [NvidiaDevice(nvml, notes, handle) for handle in handles], nvml)

    def read(self, now: float) -> list[Device]:
        """Return one sample of each device.

        Args:
            now: seconds of a monotonic clock.
        """
        return [device.read(now) for device in self.devices]

    def lower_power(self, uuid: str | None) -> None:
        """Lower the power limit of one device by a tenth, but not below its minimum; `close` restores the limit."""
        for device in self.devices:
            if device.uuid == uuid:
                device.lower_power()

    def close(self) -> None:
        """Close the devices, and shut NVML down."""
        for device in self.devices:
            device.close()
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()


def _handles(nvml: Any, notes: Notes, uuid: str | None, index: int | None, environ: Mapping[str, str]) -> list[Any]:
    if uuid is not None and index is not None and (handle := device_of_uuid(nvml, uuid)) is not None:
        return [handle]
    seen = visible_devices(nvml, environ, notes)
    return seen if index is None or not seen else [seen[index % len(seen)]]


class NvidiaDevice:
    """One GPU or MIG device."""

    def __init__(self, nvml: Any, notes: Notes, handle: Any) -> None:
        self.nvml, self._notes, self._handle = nvml, notes, handle
        self._absent: dict[str, str] = {}
        self._is_first = True
        self.is_lost = False
        self.uuid = self._ask("uuid", nvml.nvmlDeviceGetUUID, handle)
        self.name = self._ask("name", nvml.nvmlDeviceGetName, handle)
        self.is_part = bool(self._quietly(nvml.nvmlDeviceIsMigDeviceHandle, handle))
        # For a MIG device, the handle of the whole GPU.
        self.gpu = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if self.is_part else handle
        self._limit_c = self._temperature_limit()
        self._energy = _Counted()
        self._added = AddedPower()
        self._energy_j: float | None = None
        self._bytes = {"nvlink": _Counted(), "pcie": _Counted()}
        self._added_bytes = AddedPower()
        self._events = self._event_set()
        self._limit_before: int | None = None

    def read(self, now: float) -> Device:
        """Return one sample of the device; of a lost device only its identity, and the energy used before the loss.

        Args:
            now: seconds of a monotonic clock.
        """
        if self.is_lost:
            return Device(uuid=self.uuid, name=self.name, energy_j=self._energy_j, is_lost=True)
        nvml = self.nvml
        rates = None if self.is_part else self._ask("utilisation", nvml.nvmlDeviceGetUtilizationRates, self._handle)
        memory = self._ask("memory", nvml.nvmlDeviceGetMemoryInfo, self._handle)
        celsius = self._ask("temperature", nvml.nvmlDeviceGetTemperature, self.gpu, nvml.NVML_TEMPERATURE_GPU)
        reasons = self._ask("throttle reasons", nvml.nvmlDeviceGetCurrentClocksThrottleReasons, self.gpu)
        power, limit, energy = self._power(now)
        self._energy_j = self._energy_j if energy is None else energy
        ecc = self._ecc_counts()
        xid = self._faults()
        pcie, nvlink = self._moved(now)
        sample = Device(
            uuid=self.uuid, name=self.name,
            utilisation=None if rates is None else rates.gpu / 100,
            memory_used=None if memory is None else memory.used, memory_total=None if memory is None else memory.total,
            temperature_c=celsius, temperature_limit_c=self._limit_c,
            power_w=power, power_limit_w=limit, energy_j=self._energy_j,
            sm_clock_mhz=self._ask("clocks", nvml.nvmlDeviceGetClockInfo, self.gpu, nvml.NVML_CLOCK_SM),
            mem_clock_mhz=self._ask("clocks", nvml.nvmlDeviceGetClockInfo, self.gpu, nvml.NVML_CLOCK_MEM),
            throttle=None if reasons is None else tuple(word for bit, word in _REASONS.items() if reasons & bit),
            ecc_corrected=ecc[0], ecc_uncorrected=ecc[1],
            xid=xid, nvlink_bytes=nvlink, pcie_bytes=pcie, is_lost=self._lost(),
        )  # fmt: skip
        self._tell_absent()
        return sample

    def _lost(self) -> bool | None:
        return self.is_lost or None

    def lower_power(self) -> None:
        """Lower the power limit by a tenth; a refusal is logged once."""
        nvml = self.nvml
        if self.is_part or self.is_lost or "set power limit" in self._absent:
            return
        try:
            limit = nvml.nvmlDeviceGetPowerManagementLimit(self._handle)
            least, _ = nvml.nvmlDeviceGetPowerManagementLimitConstraints(self._handle)
            lower = max(least, round(limit * _LOWER_BY))
            if lower >= limit:
                return
            nvml.nvmlDeviceSetPowerManagementLimit(self._handle, lower)
        except nvml.NVMLError as error:
            self._absent["set power limit"] = str(error)
            self._notes.tell(
                f"set power limit {self.uuid}",
                f"{self.name} is hot, and its power limit is unchanged: {error} (monitor.on_overheat=lower_power)",
            )
            return
        self._limit_before = limit if self._limit_before is None else self._limit_before
        self._notes.tell(
            f"lowered {lower}", f"{self.name} is hot: its power limit is {lower / 1e3:.0f} W now, not {limit / 1e3:.0f}"
        )

    def close(self) -> None:
        """Restore the original power limit, and free the event set."""
        if self._limit_before is not None and not self.is_lost:
            with contextlib.suppress(self.nvml.NVMLError):
                self.nvml.nvmlDeviceSetPowerManagementLimit(self._handle, self._limit_before)
        if self._events is not None:
            with contextlib.suppress(self.nvml.NVMLError):
                self.nvml.nvmlEventSetFree(self._events)

    def _power(self, now: float) -> tuple[float | None, float | None, float | None]:
        """Return (watts, limit in watts, joules so far), each None if unknown; all are unknown for a MIG device."""
        if self.is_part:
            return None, None, None
        nvml, handle = self.nvml, self._handle
        power = self._ask("power", nvml.nvmlDeviceGetPowerUsage, handle)
        limit = self._ask("power limit", nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        counted = self._ask("energy", nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
        added = None if power is None else self._added.add(now, power / 1e3)
        energy = added if counted is None else self._energy.add(counted) / 1e3
        return None if power is None else power / 1e3, None if limit is None else limit / 1e3, energy

    def _temperature_limit(self) -> float | None:
        """Return the °C at which the device lowers its clocks: its maximum operating or its slowdown temperature."""
        nvml = self.nvml
        kinds = (nvml.NVML_TEMPERATURE_THRESHOLD_GPU_MAX, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
        limits = (self._quietly(nvml.nvmlDeviceGetTemperatureThreshold, self.gpu, kind) for kind in kinds)
        return min((float(limit) for limit in limits if limit), default=None)

    def _ecc_counts(self) -> tuple[int | None, int | None]:
        """Return (corrected, uncorrected) errors since the driver was loaded."""
        nvml = self.nvml
        kinds = (nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)
        ask, since = nvml.nvmlDeviceGetTotalEccErrors, nvml.NVML_VOLATILE_ECC
        corrected, uncorrected = (self._ask("ECC", ask, self.gpu, kind, since) for kind in kinds)
        return corrected, uncorrected

    def _event_set(self) -> Any | None:
        nvml = self.nvml
        made = self._ask("Xid", nvml.nvmlEventSetCreate)
        if made is None:
            return None
        try:
            nvml.nvmlDeviceRegisterEvents(self.gpu, nvml.nvmlEventTypeXidCriticalError, made)
        except nvml.NVMLError as error:
            self._absent["Xid"] = str(error)
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlEventSetFree(made)
            return None
        return made

    def _faults(self) -> tuple[int, ...] | None:
        """Return the Xid codes of the faults since the last call; None if the device does not report faults."""
        if self._events is None:
            return None
        codes: list[int] = []
        try:
            while len(codes) < _MOST_EVENTS:
                codes.append(int(self.nvml.nvmlEventSetWait_v2(self._events, 0).eventData))
        except self.nvml.NVMLError_Timeout:
            pass  # no more events
        except self.nvml.NVMLError as error:
            self._take(error, "Xid")
        return tuple(dict.fromkeys(codes))

    def _moved(self, now: float) -> tuple[int | None, int | None]:
        """Return the bytes moved over (PCIe, NVLink) so far, in both directions together."""
        nvml = self.nvml
        fields = [
            nvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, nvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES,
            (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _ALL_LINKS),
            (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, _ALL_LINKS),
        ]  # fmt: skip
        values = self._ask("bytes", nvml.nvmlDeviceGetFieldValues, self.gpu, fields)
        counts = [None] * 4 if values is None else [_value(nvml, value) for value in values]
        pcie = None if None in counts[:2] else self._bytes["pcie"].add(sum(filter(None, counts[:2])))
        nvlink = None if None in counts[2:] else self._bytes["nvlink"].add(sum(filter(None, counts[2:])) * _KIB)
        return self._sampled_pcie(now) if pcie is None else pcie, nvlink

    def _sampled_pcie(self, now: float) -> int | None:
        """Return the PCIe bytes so far for a device without that counter: two windows of 20 ms represent a period."""
        nvml = self.nvml
        kinds = (nvml.NVML_PCIE_UTIL_TX_BYTES, nvml.NVML_PCIE_UTIL_RX_BYTES)
        rates = [self._ask("PCIe", nvml.nvmlDeviceGetPcieThroughput, self.gpu, kind) for kind in kinds]
        if None in rates:
            return None
        return round(self._added_bytes.add(now, sum(filter(None, rates)) * _KIB))

    def _quietly(self, call: Callable[..., Value], *args: Any) -> Value | None:
        with contextlib.suppress(self.nvml.NVMLError):
            return call(*args)
        return None

    def _ask(self, what: str, call: Callable[..., Value], *args: Any) -> Value | None:
        """Return NVML's answer; None on an error. A value that the device never gives is not asked for again."""
        if self.is_lost or what in self._absent:
            return None
        try:
            return call(*args)
        except self.nvml.NVMLError as error:
            self._take(error, what)
            return None

    def _take(self, error: Any, what: str) -> None:
        nvml = self.nvml
        if isinstance(error, (nvml.NVMLError_GpuIsLost, nvml.NVMLError_ResetRequired)):
            self.is_lost = True
            self._notes.tell(
                f"lost {self.uuid}", f"{self.name} {self.uuid}: {error}. No more figures of this GPU are recorded."
            )
        elif isinstance(error, tuple(getattr(nvml, f"NVMLError_{name}") for name in _NEVER)):
            self._absent[what] = str(error)
        else:
            self._notes.tell(f"{what} {self.uuid}", f"{self.name}: {what} is sometimes unknown: {error}")

    def _tell_absent(self) -> None:
        """Log the missing counters once, after the first sample: most devices lack some."""
        if self._is_first and self._absent:
            missing = ", ".join(f"{what} ({why})" for what, why in self._absent.items())
            self._notes.tell(f"absent {self.uuid}", f"{self.name} does not report: {missing}")
        self._is_first = False


class _Counted:
    """Count of a device's counter since its first value; a restart of the counter loses nothing."""

    def __init__(self) -> None:
        self._last: int | None = None
        self._sum = 0

    def add(self, value: int) -> int:
        if self._last is not None:
            self._sum += value - self._last if value >= self._last else value
        self._last = value
        return self._sum


def _value(nvml: Any, field: Any) -> int | None:
    """Return the value of a field of any type; None if the driver gave no value."""
    if field.nvmlReturn != nvml.NVML_SUCCESS:
        return None
    names = {
        nvml.NVML_VALUE_TYPE_DOUBLE: "dVal", nvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
        nvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal", nvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
        nvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
    }  # fmt: skip
    name = names.get(field.valueType)
    return None if name is None else int(getattr(field.value, name))
