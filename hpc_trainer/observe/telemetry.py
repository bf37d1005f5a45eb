"""Files of a run with samples of its GPUs and hosts, and with warnings about GPUs. No torch.

telemetry/attempt-000.rank-0.jsonl has a sample of a rank's GPU and host for each period, and
attempt-000.rank-0.warnings.json the problems of the GPU. sampler.py writes both, telemetry_views.py shows them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import itertools
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hpc_trainer.record.files import OwnLines, append_lines, to_json, write_atomic, write_json
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.reading import (
    Faults,
    Kinds,
    as_count,
    as_table,
    as_text,
    as_time,
    is_number,
    list_folder,
    parse_record,
    parsed_file,
    read_ends,
    records,
    tuple_of,
    typed,
)

MAX_LINES, _DENSE = 2_048, 256
"""Most lines of a file, which stays below 2 MB. A full file is thinned out to half, except for the newest `_DENSE`."""
_MOST_READ = 2 * MAX_LINES  # of a file that another program wrote, or that has several devices
_TAIL = 8_192  # bytes that hold the last line
_LINE = 1_024  # bytes of most lines
_NAME = re.compile(r"attempt-(\d{3,9})\.rank-(\d{1,9})\.jsonl")
J_PER_KWH = 3.6e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU, or a part of a GPU (MIG). Clocks are current values; `throttle` says why they are below their maximum."""

    uuid: str | None = None
    name: str | None = None
    utilisation: float | None = None
    """Share of time in which a kernel ran, 0 to 1, over NVML's own window of up to a second."""
    memory_used: int | None = None
    memory_total: int | None = None
    temperature_c: float | None = None
    temperature_limit_c: float | None = None
    """Temperature from which on the device lowers its clocks."""
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_j: float | None = None
    """Energy since the attempt began, by the device's counter or else its summed power; of a GPU that runs of a pool
    share, the run's share."""
    sm_clock_mhz: int | None = None
    mem_clock_mhz: int | None = None
    throttle: tuple[str, ...] | None = None
    """Reasons from THROTTLE; () if the clocks are not limited."""
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    """Memory errors since the driver was loaded (volatile)."""
    xid: tuple[int, ...] | None = None
    """NVIDIA's numbers of the faults since the previous line."""
    nvlink_bytes: int | None = None
    pcie_bytes: int | None = None
    """Bytes in both directions together, since the attempt began."""
    is_lost: bool | None = None
    """True once the driver has lost the device (NVML: GPU is lost)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Usage by a rank's processes and their children; for resources that a node has only once, by the node."""

    cpus: float | None = None
    """Cores that the rank kept busy since the previous line."""
    cpus_allowed: float | None = None
    """Cores that the rank may use, by affinity and by the control group's quota."""
    rss_bytes: int | None = None
    """Sum of the resident memory of the rank's processes; shared pages count in each."""
    memory_available: int | None = None
    memory_limit: int | None = None
    """Memory of the control group, as Slurm sets it, or else of the node; `memory_available` is its free part."""
    major_faults: int | None = None
    """Pages read from the disk since the attempt began."""
    disk_read_bytes: int | None = None
    disk_write_bytes: int | None = None
    """Bytes of the rank's processes since the attempt began; network file systems count if the kernel counts them."""
    energy_j: float | None = None
    """Energy of the node's processors and their memory (RAPL), else of the whole node by its power meter.

    The value counts from the attempt's begin; only the first rank of a node has it.
    """


THROTTLE = (
    "power_cap", "hw_slowdown", "sw_thermal", "hw_thermal", "power_brake", "sync_boost", "applications_clocks",
    "display", "board_limit", "reliability",
)  # fmt: skip
"""Reasons for lowered clocks. `power_cap` is normal for a GPU that works hard: it is at its power limit."""
HARMFUL = ("hw_slowdown", "sw_thermal", "hw_thermal", "power_brake")
"""Reasons that a healthy, well cooled device does not show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Sample of a rank's device and host."""

    attempt: int
    rank: int
    time: float
    """Seconds since the epoch by the node's clock, which may be set back."""
    elapsed_s: float
    """Seconds since sampling began in the attempt, by a monotonic clock."""
    node: str | None
    step: int | None
    device: Device | None
    host: Host | None


Part = TypeVar("Part", Device, Host)


def append_samples(paths: RunPaths, samples: Sequence[Sample], file: OwnLines | None = None) -> None:
    """Append samples of one rank of one attempt.

    Args:
        paths: paths of the run.
        samples: one sample or more.
        file: the rank's file, if it is already open.

    Raises:
        OSError: the file system refused.
    """
    lines = [record_of(sample) for sample in samples]
    if file is None:
        append_lines(paths.telemetry_file(samples[0].attempt, samples[0].rank), lines, sync=False)
    else:
        file.append(lines)


def record_of(sample: Sample) -> dict[str, Any]:
    """Return the record of a sample, as a line holds it."""
    return {
        "time": round(sample.time, 3), "elapsed_s": round(sample.elapsed_s, 3), "node": sample.node,
        "step": sample.step, "device": _known_fields(sample.device), "host": _known_fields(sample.host),
    }  # fmt: skip


def _known_fields(part: Device | Host | None) -> dict[str, Any] | None:
    if part is None:
        return None
    values = ((field.name, getattr(part, field.name)) for field in dataclasses.fields(part))
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in values if value is not None}


def thin_out(path: Path) -> int:
    """Halve a file's lines, and return how many stay: the newest, and older ones at equal intervals of time.

    Raises:
        OSError: the file system refused; the file is unchanged.
    """
    lines = [record for _, record in records(path) if record is not None]
    old, new = lines[:-_DENSE], lines[-_DENSE:]
    kept: list[Mapping[str, Any]] = []
    if old:
        first, last = _elapsed(old[0]), _elapsed(old[-1])
        gap = (last - first) / (MAX_LINES // 2 - _DENSE)
        due = first
        for record in old:
            if _elapsed(record) >= due:
                kept.append(record)
                due = _elapsed(record) + gap
    kept = [*kept[: MAX_LINES // 2 - _DENSE], *new]
    write_atomic(path, "".join(f"{to_json(record)}\n" for record in kept), sync=False)
    return len(kept)


def _elapsed(record: Mapping[str, Any]) -> float:
    value = record.get("elapsed_s")
    return float(value) if is_number(value) else 0.0  # type: ignore[arg-type]


def read_telemetry(
    paths: RunPaths, faults: Faults | None = None, *, of_attempt: int | None = None, most_ranks: int | None = None
) -> list[Sample]:
    """Return every sample of a run, or of one attempt, by attempt, by rank, and in the order of writing.

    If there are more ranks than `most_ranks`, at most that many evenly spaced ranks are read.
    """
    return [
        sample
        for attempt, rank, path in _spaced(_files(paths, faults, of_attempt), most_ranks)
        for _, record in itertools.islice(records(path, faults), _MOST_READ)
        if record is not None and (sample := _sample(attempt, rank, record)) is not None
    ]


def newest_of_ranks(paths: RunPaths, *, most_ranks: int, faults: Faults | None = None) -> list[Sample]:
    """Return samples of the newest attempt: the first few and the last lines of each rank's file.

    If there are more ranks than `most_ranks`, at most that many evenly spaced ranks are read.
    """
    files = _files(paths, faults)
    newest = (
        (attempt, rank, record)
        for attempt, rank, path in _spaced([file for file in files if file[0] == files[-1][0]], most_ranks)
        for record in _records_at_ends(path, faults)
    )
    return [sample for item in newest if (sample := _sample(*item)) is not None]


def newest_samples(paths: RunPaths, faults: Faults | None = None, *, of_attempt: int | None = None) -> list[Sample]:
    """Return the last sample of each rank of each attempt, or of one attempt, read from the ends of the files."""
    newest = (
        (attempt, rank, record)
        for attempt, rank, path in _files(paths, faults, of_attempt)
        if (record := _last_record(path, faults)) is not None
    )
    return [sample for item in newest if (sample := _sample(*item)) is not None]


_File = tuple[int, int, str]
"""Attempt, rank, path."""


def _files(paths: RunPaths, faults: Faults | None, of_attempt: int | None = None) -> list[_File]:
    names = list_folder(paths.at("telemetry"), Faults() if faults is None else faults) or []
    matches = [match for name in names if (match := _NAME.fullmatch(name)) and of_attempt in (None, int(match[1]))]
    return sorted((int(match[1]), int(match[2]), paths.at(f"telemetry/{match[0]}")) for match in matches)


def _spaced(files: Sequence[_File], most_ranks: int | None) -> list[_File]:
    ranks = sorted({rank for _, rank, _ in files})
    gap = 1 if most_ranks is None else max(1, -(-len(ranks) // most_ranks))
    kept = set(ranks[::gap])
    return [file for file in files if file[1] in kept]


def newest_energy_j(paths: RunPaths, faults: Faults | None = None) -> float | None:
    """Return `energy_j` of a run; if an attempt's first rank has no GPU and no energy, its other ranks are not read."""
    samples: list[Sample] = []
    tells: dict[int, bool] = {}
    for attempt, rank, path in _files(paths, faults):
        record = _last_record(path, faults) if tells.get(attempt, True) else None
        if record is None or (sample := _sample(attempt, rank, record)) is None:
            continue
        tells.setdefault(attempt, sample.device is not None or energy_j([sample]) is not None)
        samples.append(sample)
    return energy_j(samples)


def _last_record(path: str, faults: Faults | None) -> dict[str, Any] | None:
    for line in reversed(read_ends(path, faults, last=_TAIL)[1].splitlines()):
        with contextlib.suppress(ValueError):
            return parse_record(line)
    return None


def _records_at_ends(path: str, faults: Faults | None) -> list[dict[str, Any]]:
    """Return the records at a file's beginning and end; skip a line that is torn, or cut by the reading limit."""
    parsed = []
    for part in read_ends(path, faults, last=_DENSE * _LINE, first=_TAIL):
        for line in part.splitlines():
            with contextlib.suppress(ValueError):
                parsed.append(parse_record(line))
    return parsed


def _sample(attempt: int, rank: int, record: Mapping[str, Any]) -> Sample | None:
    """Return the sample of a record; None if hpc_trainer does not write such records."""
    step, node = record.get("step"), record.get("node")
    try:
        return Sample(
            attempt=attempt, rank=rank, time=as_time(record.get("time")), elapsed_s=_elapsed(record),
            node=node if isinstance(node, str) else None, step=None if step is None else as_count(step),
            device=_part(Device, record.get("device")), host=_part(Host, record.get("host")),
        )  # fmt: skip
    except ValueError:
        return None


_WORDS = ("uuid", "name")
_MOST = 2**63  # sums of such numbers are finite
_MOST_ITEMS = 64  # of a list


def _part(kind: type[Part], value: object) -> Part | None:
    """Return a device or host from a record, without values that no counter gives, such as text or negative numbers.

    The result is None if `value` is no JSON object.
    """
    if not isinstance(value, dict):
        return None
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        item = value.get(field.name)
        if item is None:
            continue
        if field.name == "throttle":
            values[field.name] = _items(item, str)
        elif field.name == "xid":
            values[field.name] = _items(item, int)
        elif field.name == "is_lost":
            values[field.name] = True if item is True else None
        elif isinstance(item, str) if field.name in _WORDS else is_number(item) and 0 <= item < _MOST:
            values[field.name] = item
    return kind(**values)


def _items(value: object, kind: type) -> tuple[Any, ...] | None:
    return tuple(item for item in value[:_MOST_ITEMS] if type(item) is kind) if isinstance(value, list) else None


def energy_j(samples: Iterable[Sample]) -> float | None:
    """Return the energy of all attempts and ranks: of devices, or else of the nodes' processors; None if unknown.

    Energy counts up within an attempt, so the newest samples are enough.
    """
    of_devices: dict[tuple[int, int, str | None], float] = {}
    of_hosts: dict[tuple[int, int], float] = {}
    for sample in samples:
        place = (sample.attempt, sample.rank)
        if sample.device is not None and sample.device.energy_j is not None:
            key = (*place, sample.device.uuid)
            of_devices[key] = max(of_devices.get(key, 0.0), sample.device.energy_j)
        if sample.host is not None and sample.host.energy_j is not None:
            of_hosts[place] = max(of_hosts.get(place, 0.0), sample.host.energy_j)
    energies = of_devices or of_hosts
    return sum(energies.values()) if energies else None


def mean_of(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values; None if no value is known."""
    numbers = [value for value in values if value is not None]
    return statistics.fmean(numbers) if numbers else None


_WARNINGS_FILE = re.compile(r"attempt-(\d{3,9})\.rank-(\d{1,9})\.warnings\.json")


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
            Trouble.ecc: "has memory errors that were not corrected", Trouble.xid: "has a fault",
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
    matches = [
        match for name in names if (match := _WARNINGS_FILE.fullmatch(name)) and attempt in (None, int(match[1]))
    ]
    return [
        warning
        for match in sorted(matches, key=lambda match: (int(match[1]), int(match[2])))
        for warning in _read_warnings(paths.at(f"telemetry/{match[0]}"), faults)
    ]


def warning_line(paths: RunPaths, attempt: int, faults: Faults | None = None) -> str | None:
    """Return the first warning of an attempt as a line for `status`, with the number of others; None without one."""
    warnings = read_warnings(paths, attempt, faults)
    more = f" (and {len(warnings) - 1} more: hpc-trainer why)" if len(warnings) > 1 else ""
    return f"{warnings[0].text}{more}" if warnings else None


def _read_warnings(path: str, faults: Faults | None) -> Sequence[DeviceWarning]:
    return parsed_file(path, lambda record: _as_warnings(record["warnings"]), faults) or ()


_WARNING: Kinds = {
    "rank": as_count, "trouble": Trouble, "node": as_text, "device": as_text, "detail": as_text, "since": as_time,
    "last": as_time, "seconds": as_time,
}  # fmt: skip
_as_warnings = tuple_of(lambda record: DeviceWarning(**typed(as_table(record), _WARNING)))
