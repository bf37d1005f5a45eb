"""Packing of a pool: the number of runs that fit on a slot's node, and the resources that a slot requests from Slurm.

A slot is one job of `pool.jobs`; `pool.per_node` is the number of its places. Each place has the GPUs, cores and memory
of one run, so a slot's job asks for a node's share of as many runs as it has places.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpc_trainer.config.schema.cluster import AUTO_PLACES, Executor
from hpc_trainer.record.spec import RunSpec
from hpc_trainer.runtime.rank_env import named_gpus
from hpc_trainer.slurm.limits import Limits, NodeGroup
from hpc_trainer.slurm.shape import Shape, mem_mb_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Slots of a pool, places and resources of a slot, and why the requested packing is impossible (`problems`)."""

    slots: int
    per_node: int
    shape: Shape
    """Resources of one slot."""
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def asks_for_pool(spec: RunSpec) -> bool:
    """Return True if the run was frozen with `pool.jobs`."""
    return (spec.config.get("pool") or {}).get("jobs") is not None


def pack(specs: Sequence[RunSpec], limits: Limits) -> Packing:
    """Return how the pool of these runs, which have one shape, is packed.

    Args:
        specs: the runs; the first one's `pool` counts.
        limits: limits of the cluster, with its nodes if `pool.per_node` is auto or more than 1.
    """
    spec, shape = specs[0], specs[0].shape
    wish = spec.config["pool"]
    jobs, asked = int(wish["jobs"]), wish.get("per_node", 1)
    problems = list(_impossible(specs))
    fits = _most_places(spec, limits, jobs)
    notes: list[str] = []
    if asked == AUTO_PLACES:
        # No more places than each slot has runs: a place without a run would still be paid for.
        per_node = max(1, min(fits if fits is not None else 1, -(-len(specs) // jobs)))
        if fits is None:
            notes.append("pool.per_node=auto: what a node has is not known, so each slot has 1 place.")
    else:
        per_node = int(asked)
        is_own = spec.config["cluster"]["executor"] == Executor.local.value and not shape.gpus_per_node
        if fits is not None and 1 <= fits < per_node and not is_own:  # cores of one's own machine may be shared
            problems.append(
                f"pool.per_node={per_node}: {_node_of(spec)} has room for {fits} such run(s), each with "
                f"{_needs_of(shape)}. Use pool.per_node={fits} or auto."
            )
    slots = min(jobs, -(-len(specs) // per_node))
    if slots < jobs:
        notes.append(f"pool.jobs={jobs}: {slots} slot(s) are enough for {len(specs)} run(s), {per_node} a slot.")
    return Packing(
        slots=slots, per_node=per_node, shape=slot_shape(shape, per_node), problems=tuple(problems), notes=tuple(notes)
    )


def slot_shape(shape: Shape, per_node: int) -> Shape:
    """Return the resources of a slot with `per_node` places for runs of a shape: one task that starts their ranks."""
    memory = shape.mem_gb_per_node
    return dataclasses.replace(
        shape,
        tasks_per_node=1, ranks_per_task=1,
        cpus_per_task=per_node * shape.tasks_per_node * shape.cpus_per_task,
        gpus_per_node=per_node * shape.gpus_per_node,
        mem_gb_per_node=None if memory is None else per_node * memory,
    )  # fmt: skip


def _impossible(specs: Iterable[RunSpec]) -> Iterable[str]:
    """Yield the problem with the first run that no pool can run, and the nearest legal choice."""
    for spec in specs:
        if spec.shape.num_nodes > 1:
            ranks = spec.shape.world_size
            yield (
                f"pool.jobs: hardware.num_nodes={spec.shape.num_nodes}, and the runs of a pool are on one node each. "
                f"Use hardware.num_nodes=1 ({spec.shape.ranks_per_node} instead of {ranks} ranks), or leave out "
                "pool.jobs."
            )
            return
        if spec.others:
            yield (
                f"pool.jobs: hardware={spec.hardware_names} lets the first job that starts execute a run, but in a "
                f"pool slots take runs. Use hardware={spec.hardware}, or leave out pool.jobs."
            )
            return


def _most_places(spec: RunSpec, limits: Limits, jobs: int) -> int | None:
    """Return how many such runs fit beside each other on a node; None if it is not known, 0 if not even one."""
    if spec.config["cluster"]["executor"] == Executor.local.value:
        return _places_here(spec.shape, jobs)
    partition = limits.partition_of(spec.shape.partition)
    groups = [group for group in limits.nodes if partition is not None and group.partition == partition.name]
    return max((_places_on(group, spec.shape) for group in groups), default=None)


def _places_on(node: NodeGroup, shape: Shape) -> int:
    cpus = node.cpus // max(1, shape.tasks_per_node * shape.cpus_per_task)
    counts = [cpus]
    if shape.gpus_per_node:
        gpus = sum(node.gpus.values()) if shape.gpu_type is None else node.gpus.get(shape.gpu_type, 0)
        counts.append(gpus // shape.gpus_per_node)
    memory_mb = mem_mb_per_node(shape)
    if memory_mb and node.memory_mb > 1:  # 1: slurm.conf does not say
        counts.append(node.memory_mb // memory_mb)
    return min(counts)


def _places_here(shape: Shape, jobs: int) -> int | None:
    """Return the places of one of `jobs` slots on this machine: by its cores, and by the GPUs that are named."""
    cores = len(os.sched_getaffinity(0)) // (jobs * max(1, shape.tasks_per_node * shape.cpus_per_task))
    if not shape.gpus_per_node:
        return max(1, cores)
    named = named_gpus()
    return len(named) // (jobs * shape.gpus_per_node) if named else None


def _node_of(spec: RunSpec) -> str:
    if spec.config["cluster"]["executor"] == Executor.local.value:
        return "each slot of this machine"
    return f"a node of partition {spec.shape.partition or '(the default)'}"


def _needs_of(shape: Shape) -> str:
    parts = [f"{shape.gpus_per_node} GPU(s)"] if shape.gpus_per_node else []
    parts.append(f"{shape.tasks_per_node * shape.cpus_per_task} CPU(s)")
    memory_mb = mem_mb_per_node(shape)
    if memory_mb:
        parts.append(f"{memory_mb} MB")
    return ", ".join(parts)
