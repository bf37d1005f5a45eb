# ruff: noqa: N802  (functions have NVML's names)
"""A recorded NVML: the real `pynvml` calls it in place of libnvidia-ml.so.1, and gets recorded answers and error codes.

All of pynvml is at work: its structures, its error classes, its Python names. Only the C functions are these.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pynvml

OK, TIMEOUT, NOT_FOUND = pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_TIMEOUT, pynvml.NVML_ERROR_NOT_FOUND
NOT_SUPPORTED, NO_PERMISSION = pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION
GPU_IS_LOST, INVALID = pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_INVALID_ARGUMENT


@dataclass
class Card:
    """A recorded GPU, or a MIG device; figures of an H100 SXM5 80GB at work, as NVML gives them (mW, mJ, MHz)."""

    uuid: str
    name: str = "NVIDIA H100 80GB HBM3"
    is_hidden: bool = False
    """By Slurm's control group."""
    parent: Card | None = None
    parts: list[Card] = field(default_factory=list)
    utilisation: int = 97
    memory: tuple[int, int] = (85_520_809_984, 61_203_283_968)
    temperature: int = 61
    thresholds: dict[int, int] = field(
        default_factory=lambda: {
            pynvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN: 92,
            pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN: 89,
            pynvml.NVML_TEMPERATURE_THRESHOLD_GPU_MAX: 87,
        }
    )
    power_mw: int = 612_345
    limit_mw: int = 700_000
    limits_mw: tuple[int, int] = (200_000, 700_000)
    energy_mj: int = 9_000_000_000
    reasons: int = 0x4
    clocks: dict[int, int] = field(default_factory=lambda: {pynvml.NVML_CLOCK_SM: 1755, pynvml.NVML_CLOCK_MEM: 2619})
    ecc: dict[tuple[int, int], int] = field(default_factory=dict)
    events: list[int] = field(default_factory=list)
    fields: dict[int, int] = field(
        default_factory=lambda: {
            pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES: 5_000, pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES: 7_000,
            pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX: 100, pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX: 200,
        }
    )  # fmt: skip
    errors: dict[str, int] = field(default_factory=dict)
    """Function without its beginning `nvmlDevice` -> the code that it returns; "" for all of them."""


class Library:
    """The C functions that pynvml calls; `cards` by their place on the bus."""

    def __init__(self, *cards: Card, init: int = OK) -> None:
        self.cards, self._init = list(cards), init
        self.asked: list[str] = []
        self._handles: list[Card] = []
        self.set_limits: list[int] = []

    @contextlib.contextmanager
    def playing(self) -> Iterator[Library]:
        """pynvml has this library while the block runs."""
        before = pynvml.nvmlLib
        pynvml.nvmlLib = self
        pynvml._nvmlGetFunctionPointer_cache.clear()
        try:
            yield self
        finally:
            pynvml.nvmlLib = before
            pynvml._nvmlGetFunctionPointer_cache.clear()

    def __getattr__(self, name: str) -> Any:
        recorded = getattr(type(self), f"_{name.removeprefix('nvml').removesuffix('_v2')}", None)
        if recorded is None:
            raise AttributeError(name)  # pynvml makes NVML_ERROR_FUNCTION_NOT_FOUND of it
        short = name.removeprefix("nvmlDevice")

        def call(*args: Any) -> int:
            self.asked.append(short)
            card = self._card(args[0]) if args and isinstance(args[0], pynvml.c_nvmlDevice_t) else None
            if card is not None and (code := card.errors.get(short, card.errors.get("", OK))) != OK:
                return code
            return int(recorded(self, *(args if card is None else (card, *args[1:]))))

        return call

    def _card(self, handle: Any) -> Card:
        return self._handles[ctypes.cast(handle, ctypes.c_void_p).value - 1]  # type: ignore[operator]

    def _handle(self, card: Card, out: Any) -> int:
        if not any(each is card for each in self._handles):
            self._handles.append(card)
        number = next(index for index, each in enumerate(self._handles) if each is card) + 1
        place = ctypes.cast(ctypes.pointer(out._obj), ctypes.POINTER(ctypes.c_void_p))
        place[0] = ctypes.c_void_p(number)
        return OK

    def _InitWithFlags(self, flags: int) -> int:
        return self._init

    def _Shutdown(self) -> int:
        return OK

    def _DeviceGetCount(self, out: Any) -> int:
        out._obj.value = len(self.cards)  # the hidden ones too
        return OK

    def _DeviceGetHandleByIndex(self, index: Any, out: Any) -> int:
        if index.value >= len(self.cards):
            return INVALID
        card = self.cards[index.value]
        return NO_PERMISSION if card.is_hidden else self._handle(card, out)

    def _DeviceGetHandleByUUID(self, uuid: Any, out: Any) -> int:
        everything = [each for card in self.cards for each in (card, *card.parts)]
        card = next((each for each in everything if each.uuid == uuid.value.decode()), None)
        return NOT_FOUND if card is None else self._handle(card, out)

    def _DeviceGetMigMode(self, card: Card, now: Any, later: Any) -> int:
        now._obj.value = later._obj.value = int(bool(card.parts))
        return OK

    def _DeviceGetMaxMigDeviceCount(self, card: Card, out: Any) -> int:
        out._obj.value = 7
        return OK

    def _DeviceGetMigDeviceHandleByIndex(self, card: Card, index: Any, out: Any) -> int:
        place = getattr(index, "value", index)
        return self._handle(card.parts[place], out) if place < len(card.parts) else NOT_FOUND

    def _DeviceIsMigDeviceHandle(self, card: Card, out: Any) -> int:
        out._obj.value = int(card.parent is not None)
        return OK

    def _DeviceGetDeviceHandleFromMigDeviceHandle(self, card: Card, out: Any) -> int:
        return INVALID if card.parent is None else self._handle(card.parent, out)

    def _DeviceGetUUID(self, card: Card, out: Any, size: Any) -> int:
        out.value = card.uuid.encode()
        return OK

    def _DeviceGetName(self, card: Card, out: Any, size: Any) -> int:
        out.value = card.name.encode()
        return OK

    def _DeviceGetUtilizationRates(self, card: Card, out: Any) -> int:
        if card.parent is not None:
            return NOT_SUPPORTED
        out._obj.gpu, out._obj.memory = card.utilisation, 40
        return OK

    def _DeviceGetMemoryInfo(self, card: Card, out: Any) -> int:
        out._obj.total, out._obj.used = card.memory
        out._obj.free = card.memory[0] - card.memory[1]
        return OK

    def _DeviceGetTemperature(self, card: Card, sensor: Any, out: Any) -> int:
        return self._give(card, card.temperature, out)

    def _DeviceGetTemperatureThreshold(self, card: Card, kind: Any, out: Any) -> int:
        return self._give(card, card.thresholds.get(kind.value), out)

    def _DeviceGetPowerUsage(self, card: Card, out: Any) -> int:
        return self._give(card, card.power_mw, out)

    def _DeviceGetEnforcedPowerLimit(self, card: Card, out: Any) -> int:
        return self._give(card, card.limit_mw, out)

    def _DeviceGetPowerManagementLimit(self, card: Card, out: Any) -> int:
        return self._give(card, card.limit_mw, out)

    def _DeviceGetPowerManagementLimitConstraints(self, card: Card, least: Any, most: Any) -> int:
        least._obj.value, most._obj.value = card.limits_mw
        return OK

    def _DeviceSetPowerManagementLimit(self, card: Card, limit: Any) -> int:
        value = int(getattr(limit, "value", limit))
        if not card.limits_mw[0] <= value <= card.limits_mw[1]:
            return INVALID
        card.limit_mw = value
        self.set_limits.append(value)
        return OK

    def _DeviceGetTotalEnergyConsumption(self, card: Card, out: Any) -> int:
        return self._give(card, card.energy_mj, out)

    def _DeviceGetClockInfo(self, card: Card, kind: Any, out: Any) -> int:
        return self._give(card, card.clocks.get(kind.value), out)

    def _DeviceGetCurrentClocksThrottleReasons(self, card: Card, out: Any) -> int:
        return self._give(card, card.reasons, out)

    def _DeviceGetTotalEccErrors(self, card: Card, kind: Any, since: Any, out: Any) -> int:
        return self._give(card, card.ecc.get((kind.value, since.value), 0), out)

    def _DeviceGetPcieThroughput(self, card: Card, kind: Any, out: Any) -> int:
        return self._give(card, 1_000, out)

    def _DeviceGetFieldValues(self, card: Card, count: Any, out: Any) -> int:
        for each in out._obj:
            value = card.fields.get(each.fieldId)
            each.nvmlReturn = NOT_SUPPORTED if value is None else OK
            if value is not None:
                each.valueType, each.value.ullVal = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, value
        return OK

    def _EventSetCreate(self, out: Any) -> int:
        return OK

    def _EventSetFree(self, events: Any) -> int:
        return OK

    def _DeviceRegisterEvents(self, card: Card, kinds: Any, events: Any) -> int:
        return OK

    def _EventSetWait(self, events: Any, out: Any, timeout: Any) -> int:
        card = next((each for each in self._handles if each.events), None)
        if card is None:
            return TIMEOUT
        out._obj.eventType, out._obj.eventData = pynvml.nvmlEventTypeXidCriticalError, card.events.pop(0)
        return OK

    def _give(self, card: Card, value: int | None, out: Any) -> int:
        if value is None or card.parent is not None:  # of a MIG device NVML tells none of these
            return NOT_SUPPORTED
        out._obj.value = value
        return OK
