"""Cores of a rank where Slurm binds no task: its share of the cores of the node's allocation, near its GPU. No torch.

Sites with TaskPlugin=task/none, and torchrun's one task a node, let all ranks of a node run on all of its cores, where
their threads displace each other. A rank binds itself only if the cores that it may use are exactly those of the
allocation, as SLURM_CPUS_ON_NODE counts them: with more, other jobs may be at work there, and with fewer Slurm has
bound the task.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpc_trainer.runtime.rank_env import RankEnv

_SYS = Path("/sys")


def bind_rank(env: RankEnv, least: int, sys_folder: Path = _SYS) -> frozenset[int] | None:
    """Bind this rank to its share of the cores, and return the share; None if the rank stays as it is.

    Args:
        env: place of the rank.
        least: cores that a rank asked for; a share near the GPU must not be smaller.
        sys_folder: folder in which the kernel describes the machine.
    """
    if env.launcher != "slurm" or env.local_world_size < 2 or not hasattr(os, "sched_setaffinity"):
        return None
    cores = os.sched_getaffinity(0)
    if str(len(cores)) != os.environ.get("SLURM_CPUS_ON_NODE") or len(cores) < env.local_world_size:
        return None
    node_of = {core: node for node, of_node in numa_nodes(sys_folder).items() for core in of_node}
    order = sorted(cores, key=lambda core: (node_of.get(core, 0), _first_sibling(core, sys_folder), core))
    own = shares(order, env.local_world_size, least, node_of, gpu_nodes(env.local_world_size, sys_folder))
    share = frozenset(own[env.local_rank])
    with contextlib.suppress(OSError):
        # Threads that libraries started when they were imported, too; later ones inherit it.
        for thread in os.listdir("/proc/self/task"):  # noqa: PTH208
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), share)
    return share


def shares(
    cores: Sequence[int], ranks: int, least: int, node_of: Mapping[int, int] = {}, gpu_node_of: Sequence[int] = ()
) -> list[list[int]]:
    """Return the cores of each local rank; no core has two ranks.

    Args:
        cores: cores in an order in which neighbours are near each other.
        ranks: number of ranks on the node, at most as many as cores.
        least: cores that a rank asked for.
        node_of: NUMA node of each core.
        gpu_node_of: NUMA node of each local rank's GPU; empty if unknown.
    """
    plain = _divided(cores, ranks)
    if len(gpu_node_of) != ranks:
        return plain
    near: list[list[int]] = [[] for _ in range(ranks)]
    for node in set(gpu_node_of):
        there = [rank for rank, its_node in enumerate(gpu_node_of) if its_node == node]
        own = _divided([core for core in cores if node_of.get(core) == node], len(there))
        for rank, share in zip(there, own, strict=True):
            near[rank] = share
    smallest = min(map(len, plain))
    return near if min(map(len, near)) >= max(1, min(least, smallest)) else plain


def _divided(cores: Sequence[int], parts: int) -> list[list[int]]:
    bounds = [part * len(cores) // parts for part in range(parts + 1)]
    return [list(cores[begin:end]) for begin, end in itertools.pairwise(bounds)]


def numa_nodes(sys_folder: Path = _SYS) -> dict[int, list[int]]:
    """Return the cores of each NUMA node; {} if the kernel does not say."""
    nodes = {}
    with contextlib.suppress(OSError, ValueError):
        for folder in sorted((sys_folder / "devices/system/node").glob("node[0-9]*")):
            nodes[int(folder.name.removeprefix("node"))] = cores_of((folder / "cpulist").read_text())
    return nodes


def cores_of(text: str) -> list[int]:
    """Return the numbers of a list as the kernel writes it, such as 0-3,8."""
    spans = [part.partition("-") for part in text.strip().split(",") if part]
    return [core for first, _, last in spans for core in range(int(first), int(last or first) + 1)]


def _first_sibling(core: int, sys_folder: Path) -> int:
    """Return the first hardware thread of a core, so that threads of one core stay together."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = (sys_folder / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
        return cores_of(text)[0]
    return core


def gpu_nodes(ranks: int, sys_folder: Path = _SYS) -> list[int]:
    """Return the NUMA node of the GPU of each local rank; [] unless this process sees one for each, all known."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda") or not torch.cuda.is_available():
        return []
    nodes = []
    if torch.cuda.device_count() == ranks:
        for index in range(ranks):
            facts = torch.cuda.get_device_properties(index)
            with contextlib.suppress(AttributeError, OSError, ValueError):
                pci = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
                nodes.append(int((sys_folder / "bus/pci/devices" / pci / "numa_node").read_text()))
    return nodes if len(nodes) == ranks and min(nodes, default=-1) >= 0 else []
