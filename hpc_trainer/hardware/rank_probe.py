"""Program of `hardware check --run`: each rank measures its place and its links, and writes one JSON file.

It is started as a script on the compute nodes, once a rank, and imports nothing of hpc_trainer: the Python of the nodes
needs torch alone. Times are seconds, sizes bytes, rates bytes a second.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import re
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

_LATENCY_BYTES, _LATENCY_REPEATS = 8, 50
_BULK_BYTES = {"cuda": 256 << 20, "cpu": 16 << 20}
_BULK_REPEATS = {"cuda": 20, "cpu": 4}
_CONNECT_S, _GROUP_S = 3.0, 120.0
_WRITE_PIECE, _WRITE_S = 8 << 20, 10.0


def main() -> None:
    """Measure, and write `rank-N.json` after each part: what was measured stays if a later part fails or hangs."""
    options = _options()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    record: dict[str, Any] = {"rank": rank, "world_size": world_size, "local_rank": local_rank}
    path = options.folder / f"rank-{rank}.json"

    def keep(**more: Any) -> None:
        record.update(more)
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(record))
        partial.replace(path)

    keep(**place())
    keep(clock_s=clock_against_server(options.folder / f".clock-{rank}"))
    is_first_of_node = local_rank == 0
    if is_first_of_node and options.internet:
        keep(internet=can_connect(options.internet))
    began = time.monotonic()
    torch = importlib.import_module("torch")  # the login node uses other functions of this file
    keep(torch=torch.__version__, import_s=time.monotonic() - began)
    if options.device == "cuda":
        keep(**gpu(torch, local_rank))
    if world_size > 1:
        _links(torch, options, record, keep)
    if is_first_of_node:
        keep(write_bps=write_speed(options.folder / f".write-{rank}", options.write_mb << 20))
    keep(is_whole=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--internet", default="", metavar="HOST:PORT")
    parser.add_argument("--write-mb", type=int, default=512)
    return parser.parse_args()


def place() -> dict[str, Any]:
    """Return where this rank is: host, machine, the CPUs that it may use, and their NUMA nodes."""
    cpus = sorted(os.sched_getaffinity(0))
    return {
        "host": socket.gethostname(),
        "node": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "cpus": cpus,
        "numa": sorted({number for number, own in _numa_nodes().items() if own & set(cpus)}),
        "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }


def _numa_nodes() -> dict[int, set[int]]:
    """Return the CPUs of each NUMA node; empty if the kernel reports none."""
    nodes = {}
    for folder in Path("/sys/devices/system/node").glob("node[0-9]*"):
        ranges = re.findall(r"(\d+)(?:-(\d+))?", (folder / "cpulist").read_text())
        cpus = {cpu for first, last in ranges for cpu in range(int(first), int(last or first) + 1)}
        nodes[int(folder.name.removeprefix("node"))] = cpus
    return nodes


def gpu(torch: Any, local_rank: int) -> dict[str, Any]:
    """Return facts about this rank's GPU; without one, `gpu_problem` has the reason."""
    count = torch.cuda.device_count()
    if not count:
        return {"gpu_problem": f"torch {torch.__version__} sees no GPU", "num_gpus": 0}
    index = local_rank % count
    torch.cuda.set_device(index)
    facts = torch.cuda.get_device_properties(index)
    parts = (int(getattr(facts, f"pci_{name}_id", 0)) for name in ("domain", "bus", "device"))
    bus = "{:04x}:{:02x}:{:02x}.0".format(*parts)
    try:
        numa: int | None = int(Path(f"/sys/bus/pci/devices/{bus}/numa_node").read_text())
    except (OSError, ValueError):
        numa = None
    return {
        "gpu": facts.name, "gpu_uuid": str(getattr(facts, "uuid", "")) or None, "gpu_bus": bus, "num_gpus": count,
        "gpu_bytes": facts.total_memory, "gpu_numa": numa if numa is not None and numa >= 0 else None,
    }  # fmt: skip


def clock_against_server(path: Path) -> float | None:
    """Return by how much this node's clock is ahead of the stamp that the file system gives a new file.

    None if it stamps files by the client's clock (Lustre), or nothing can be written.
    """
    if filesystem_of(path.parent) == "lustre":
        return None
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            before = time.time()
            os.write(descriptor, b"\n")
            os.fsync(descriptor)
            after = time.time()
            return (before + after) / 2 - os.fstat(descriptor).st_mtime
        finally:
            os.close(descriptor)
            path.unlink()
    except OSError:
        return None


def filesystem_of(folder: Path) -> str:
    """Return the type of the file system that holds a folder, as /proc/mounts names it; empty if unknown."""
    best, kind = "", ""
    try:
        lines = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return ""
    whole = f"{folder.resolve()}/"
    for line in lines:
        _, mount, name, *_ = line.split(" ")
        if whole.startswith(f"{mount.rstrip('/')}/") and len(mount) >= len(best):
            best, kind = mount, name
    return kind


def can_connect(address: str) -> bool:
    """Return True if a TCP connection to HOST:PORT is made within three seconds."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except (OSError, ValueError):
        return False
    return True


def write_speed(path: Path, most: int) -> float | None:
    """Return the bytes a second of writing and syncing up to `most` bytes in ten seconds; None after an error."""
    piece, written = os.urandom(_WRITE_PIECE), 0
    try:
        began = time.monotonic()
        with path.open("wb", buffering=0) as file:
            while written < most and time.monotonic() - began < _WRITE_S:
                written += file.write(piece)
            os.fsync(file.fileno())
        return written / (time.monotonic() - began)
    except OSError:
        return None
    finally:
        path.unlink(missing_ok=True)


def _links(torch: Any, options: argparse.Namespace, found: dict[str, Any], keep: Any) -> None:
    """Measure all-reduce within the node, between one rank of each node, and among all ranks."""
    dist = importlib.import_module("torch.distributed")
    backend = "nccl" if options.device == "cuda" else "gloo"
    began = time.monotonic()
    dist.init_process_group(backend, timeout=timedelta(seconds=_GROUP_S))
    keep(backend=backend, rendezvous_s=time.monotonic() - began)
    nodes: list[Any] = [None] * found["world_size"]
    dist.all_gather_object(nodes, found["node"])
    names = list(dict.fromkeys(nodes))
    members = {name: [rank for rank, node in enumerate(nodes) if node == name] for name in names}
    scopes = {"node": list(members.values()), "across": [[ranks[0] for ranks in members.values()]]}
    for scope, sets in scopes.items():
        # Every rank takes part in making every group.
        groups = [dist.new_group(ranks) if len(ranks) > 1 else None for ranks in sets]
        mine = next(
            (group for group, ranks in zip(groups, sets, strict=True) if group and found["rank"] in ranks), None
        )
        if mine is not None:
            keep(**{f"reduce_{scope}": _all_reduce(torch, dist, mine, options.device)})
        dist.barrier()
    if len(names) > 1:
        keep(reduce_all=_all_reduce(torch, dist, None, options.device))
    dist.destroy_process_group()


def _all_reduce(torch: Any, dist: Any, group: Any, device: str) -> dict[str, float]:
    """Return latency and bus bandwidth: 2 (n - 1) / n × bytes / time, as nccl-tests counts."""
    size = dist.get_world_size(group)

    def seconds(num_bytes: int, repeats: int) -> float:
        data = torch.zeros(num_bytes // 4, device=device)
        for _ in range(2):
            dist.all_reduce(data, group=group)
        _settle(torch, device)
        began = time.perf_counter()
        for _ in range(repeats):
            dist.all_reduce(data, group=group)
        _settle(torch, device)
        return (time.perf_counter() - began) / repeats

    bulk = _BULK_BYTES[device]
    return {
        "ranks": size,
        "latency_s": seconds(_LATENCY_BYTES, _LATENCY_REPEATS),
        "bus_bps": 2 * (size - 1) / size * bulk / seconds(bulk, _BULK_REPEATS[device]),
    }


def _settle(torch: Any, device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
