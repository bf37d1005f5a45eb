"""logs/attempt-000.environment.json: software and hardware of one attempt, written once by rank 0.

Each other node writes a file of its own.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_trainer.errors import RunStateError
from hpc_trainer.record.files import write_json
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.reading import Faults, read_json, tell

FORMAT = 1
_MOST_COMPARED = 50
_MOST_NAMED = 4
_LONGEST = 40  # characters of a value in a line
# Variables whose values change with each job, folder or user, and do not change a result.
_NOT_COMPARED = (
    "SLURM_", "HPC_TRAINER_", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES", "PATH", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_",
    "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "PYTHONUNBUFFERED", "TORCHELASTIC_",
)  # fmt: skip
_SECTIONS = {
    "command": dict, "code": dict, "python": dict, "packages": dict, "origins": dict, "libraries": dict,
    "system": dict, "modules": list, "variables": dict, "cpu": dict, "devices": list, "data": dict,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference between the environments of two attempts; a value is None if the item was missing."""

    kind: str
    """code, data, package, library, device, system, variable or ranks."""
    name: str
    was: str | None
    now: str | None

    def __str__(self) -> str:
        """Return a text such as `torch 2.13.1, was 2.13.0`."""
        return f"{self.name} {self.now or 'not there'}, was {self.was or 'not there'}"


def write_environment(paths: RunPaths, attempt: int, record: Mapping[str, Any], node_rank: int = 0) -> None:
    """Replace the record of one node of an attempt; raise OSError if the file system refused."""
    value = {"format": FORMAT, "attempt": attempt, "time": time.time(), **record}
    write_json(paths.environment(attempt, node_rank), value, sync=False)


def read_environment(paths: RunPaths, attempt: int, faults: Faults | None = None) -> dict[str, Any] | None:
    """Return rank 0's record of an attempt; None if there is none or, with a fault, if it cannot be read."""
    path = paths.environment(attempt)
    record = read_json(path, faults)
    if record is None:
        return None
    if record.get("format") != FORMAT:
        tell(faults, path, f"its format is {str(record.get('format'))[:20]}, and this version reads {FORMAT}")
        return None
    problem = next(_problems(record), None)
    if problem is not None:
        tell(faults, path, problem)
        return None
    return record


def _problems(record: Mapping[str, Any]) -> Iterator[str]:
    for name, kind in _SECTIONS.items():
        if not isinstance(record.get(name), kind):
            yield f"{name} is not {'an object' if kind is dict else 'a list'}"
            return
    code = record["code"]
    if not isinstance(code.get("packages"), dict) or not isinstance(code.get("places") or {}, dict):
        yield "code.packages or code.places is not an object"
    checkouts = code.get("checkouts") or []
    if not isinstance(checkouts, list) or not all(map(_is_checkout, checkouts)):
        yield "code.checkouts is not a list of objects with top and revision"
    if not all(isinstance(item, dict) for item in (*record["origins"].values(), *record["devices"])):
        yield "origins or devices hold something other than objects"


def _is_checkout(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("top", "revision"))


def first_environment(paths: RunPaths, attempts: int) -> tuple[int, dict[str, Any]] | None:
    """Return (attempt, record) of the first attempt that has a record; None if none has.

    Raises:
        RunStateError: a record is damaged, and no attempt before has a readable one.
    """
    for attempt in range(attempts):
        faults = Faults()
        record = read_environment(paths, attempt, faults)
        if record is not None:
            return attempt, record
        if faults:
            raise RunStateError(
                f"the environment record of attempt {attempt} cannot be read: {'; '.join(faults)}. Without it the "
                "differences are unknown. Restore the file, or move it away to compare only the losses."
            )
    return None


def nodes(paths: RunPaths, attempt: int) -> list[dict[str, Any]]:
    """Return the readable records of an attempt's nodes, in the order of nodes."""
    records = (read_json(path, Faults()) for path in paths.logs.glob(f"{paths.environment(attempt).stem}*.json"))
    kept = [
        record for record in records if record is not None and record.get("format") == FORMAT and _is_of_node(record)
    ]
    return sorted(kept, key=lambda record: record.get("node_rank") or 0)


def _is_of_node(record: Mapping[str, Any]) -> bool:
    devices = record.get("devices")
    are_devices = isinstance(devices, list) and all(isinstance(device, dict) for device in devices)
    return are_devices and isinstance(record.get("node_rank") or 0, int)


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Return the differences of two records that may change results or speed, the most decisive first."""
    before, after = (dict(_facts(record)) for record in (was, now))
    keys = [*before, *(key for key in after if key not in before)]
    order = {kind: number for number, kind in enumerate(_ORDER)}
    differing = [Difference(*key, before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)]
    return sorted(differing, key=lambda difference: order[difference.kind])


def attempt_lines(records: Sequence[tuple[int, Mapping[str, Any]]]) -> list[str]:
    """Return a line for each attempt whose environment differs from that of the attempt before it.

    Args:
        records: (attempt, its record), in order.
    """
    lines = []
    for (earlier, was), (attempt, now) in itertools.pairwise(records):
        changed = differences(was, now)
        if changed:
            more = f", and {len(changed) - _MOST_NAMED} more" if len(changed) > _MOST_NAMED else ""
            named = "; ".join(
                f"{_short(difference.name)} {_short(difference.now)} ({_short(difference.was)})"
                for difference in changed[:_MOST_NAMED]
            )
            lines.append(f"attempt {attempt} ran with {named}{more}; in parentheses attempt {earlier}'s")
    return lines


def changes_of(paths: RunPaths, attempts: int) -> list[str]:
    """Return `attempt_lines` of a run's newest attempts; a missing or damaged record is skipped."""
    if attempts < 2:  # the case of most of 10,000 runs: nothing to compare
        return []
    newest = range(max(0, attempts - _MOST_COMPARED), attempts)
    records = ((attempt, read_environment(paths, attempt, Faults())) for attempt in newest)
    return attempt_lines([(attempt, record) for attempt, record in records if record is not None])


_ORDER = ("code", "data", "ranks", "library", "package", "device", "system", "variable")


def _facts(record: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], str]]:
    own = record["code"].get("packages") or {}
    for name, digest in own.items():
        yield ("code", f"code of {name}"), _text(digest)
    for name, value in record["data"].items():
        yield ("data", name), _text(value)
    if record.get("world_size") is not None:
        yield ("ranks", "ranks"), _text(record["world_size"])
    yield ("library", "Python"), _text(record["python"].get("version"))
    for name, value in record["libraries"].items():
        yield ("library", name), _text(value)
    if record.get("driver") is not None:
        yield ("library", "driver"), _text(record["driver"])
    for name, version in record["packages"].items():
        if name.replace("-", "_") in own:  # the digest of its code says more than its version
            continue
        origin = record["origins"].get(name) or {}
        yield ("package", name), f"{version}{' of ' + str(origin['commit_id'])[:12] if 'commit_id' in origin else ''}"
    counts = Counter(str(device.get("name")) for device in record["devices"] if isinstance(device, dict))
    if counts:
        yield ("device", "GPUs"), ", ".join(f"{count} x {name}" for name, count in sorted(counts.items()))
    yield ("device", "processor"), _text(record["cpu"].get("model"))
    for name in ("kernel", "libc", "container", "machine"):
        if record["system"].get(name) is not None:
            yield ("system", name), _text(record["system"][name])
    if record["modules"]:
        yield ("system", "modules"), " ".join(map(str, record["modules"]))
    yield from _of_environment(record.get("environment") or {})
    for name, value in record["variables"].items():
        if not name.startswith(_NOT_COMPARED):
            yield ("variable", name), _text(value)


def _of_environment(facts: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield the digests of `cluster.environment`, except that of the packages, which are compared one by one."""
    image = facts.get("image_file")
    if isinstance(image, dict):
        yield ("system", "image"), f"{facts.get('image')} {image.get('bytes')} {image.get('changed')}"
    elif facts.get("image") is not None:
        yield ("system", "image"), _text(facts["image"])
    lock = facts.get("lock_file")
    if isinstance(lock, dict):
        yield ("system", "uv.lock"), _text(lock.get("sha256"))
    if facts.get("conda_sha256") is not None:
        yield ("system", "conda environment"), _text(facts["conda_sha256"])
    stage = facts.get("stage")
    if isinstance(stage, dict):
        digest = stage.get("sha256")
        changed = f"{stage.get('path')} {stage.get('facts')}"  # of an archive that `pack` did not make
        yield ("system", "packed environment"), changed if digest is None else f"sha256 {digest}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(value)


def _short(value: str | None) -> str:
    if value is None:
        return "not there"
    return value if len(value) <= _LONGEST else f"{value[: _LONGEST - 3]}..."
