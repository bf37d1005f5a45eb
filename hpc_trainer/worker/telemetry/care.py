"""Watch over the samples for a device that is too hot or fails: a warning for `status`, and `monitor.on_overheat`.

Being at the power limit (`power_cap`) is the normal state of a GPU under load, and no trouble.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from hpc_trainer.runs.layout import RunPaths
from hpc_trainer.runs.monitoring.telemetry import HARMFUL, Device, Sample
from hpc_trainer.runs.monitoring.warnings import DeviceWarning, Trouble, write_warnings

FATAL_XID = frozenset((48, 62, 64, 74, 79, 94, 95, 119, 120, 140))
"""NVIDIA's Xid codes that are the device's fault (docs.nvidia.com/deploy/xid-errors): memory (48, 64, 94, 95, 140), its
own processors (62, 119, 120), NVLink (74), fallen off the bus (79). A user's program causes 13, 31, 43 and 45."""
_SAMPLES = 2
"""Samples in a row before a warning: clocks go down for a moment when work begins or ends."""
_WRITE_EVERY_S = 60.0
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
        self._written_s = -_WRITE_EVERY_S

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
        if self._found and (is_new or now - self._written_s >= _WRITE_EVERY_S):
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
