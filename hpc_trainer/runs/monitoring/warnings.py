"""telemetry/attempt-000.rank-0.warnings.json: problems of a rank's device in an attempt. No torch.

A file exists only if there was a problem: `status` looks for such files, and most runs have none.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass

from hpc_trainer.runs.files import write_json
from hpc_trainer.runs.layout import RunPaths
from hpc_trainer.runs.reading import Faults, list_folder, parsed_file
from hpc_trainer.runs.record_values import Kinds, as_count, as_table, as_text, as_time, tuple_of, typed

_NAME = re.compile(r"attempt-(\d{3,9})\.rank-(\d{1,9})\.warnings\.json")


class Trouble(str, enum.Enum):
    """Kinds of problems of a device."""

    slowed = "slowed"
    """The device lowers its clocks to protect itself."""
    hot = "hot"
    """The device is at its temperature limit, and does not report whether it lowers its clocks."""
    ecc = "ecc"
    """The device's memory had errors that were not corrected."""
    xid = "xid"
    """The device's driver reported a fault (Xid)."""
    lost = "lost"
    """The driver has lost the device."""

    @property
    def is_heat(self) -> bool:
        """True if the problem is heat, which may pass; in any other case the device is failing."""
        return self in (Trouble.slowed, Trouble.hot)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWarning:
    """One kind of trouble of one device in one attempt."""

    rank: int
    trouble: Trouble
    node: str
    device: str
    """Name and UUID of the device."""
    detail: str
    """Details, such as `hw_thermal, up to 93 °C, its limit is 87 °C`."""
    since: float
    """Time when the problem was first seen, in seconds since the epoch; `last` is the time when it was last seen."""
    last: float
    seconds: float
    """Seconds for which the problem was seen, in all."""

    @property
    def text(self) -> str:
        """Line for the user."""
        says = {
            Trouble.slowed: "lowers its clocks", Trouble.hot: "is too hot", Trouble.lost: "was lost by its driver",
            Trouble.ecc: "has errors of its memory that were not corrected", Trouble.xid: "has a fault",
        }[self.trouble]  # fmt: skip
        lasted = f", for {self.seconds:.0f} s" if self.trouble.is_heat else ""
        return f"the GPU of rank {self.rank} on {self.node} {says} ({self.detail}{lasted}): {self.device}"


def write_warnings(paths: RunPaths, attempt: int, rank: int, warnings: Sequence[DeviceWarning]) -> None:
    """Replace the file of one rank; raise OSError if the file system refused."""
    items = [{**dataclasses.asdict(warning), "trouble": warning.trouble.value} for warning in warnings]
    write_json(paths.telemetry_file(attempt, rank).with_suffix(".warnings.json"), {"warnings": items}, sync=False)


def read_warnings(paths: RunPaths, attempt: int | None = None, faults: Faults | None = None) -> list[DeviceWarning]:
    """Return the warnings of all ranks of an attempt, or of all attempts if it is None, by attempt and rank."""
    names = list_folder(paths.at("telemetry"), Faults() if faults is None else faults) or []
    matches = [match for name in names if (match := _NAME.fullmatch(name)) and attempt in (None, int(match[1]))]
    return [
        warning
        for match in sorted(matches, key=lambda match: (int(match[1]), int(match[2])))
        for warning in _read(paths.at(f"telemetry/{match[0]}"), faults)
    ]


def _read(path: str, faults: Faults | None) -> Sequence[DeviceWarning]:
    return parsed_file(path, lambda record: _as_warnings(record["warnings"]), faults) or ()


_KINDS: Kinds = {
    "rank": as_count, "trouble": Trouble, "node": as_text, "device": as_text, "detail": as_text, "since": as_time,
    "last": as_time, "seconds": as_time,
}  # fmt: skip
_as_warnings = tuple_of(lambda record: DeviceWarning(**typed(as_table(record), _KINDS)))
