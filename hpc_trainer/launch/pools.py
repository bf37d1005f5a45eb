"""Packing of a pool: the number of runs that fit on a slot's node, and the resources that a slot requests from Slurm.

A slot is one job of `pool.jobs`; `pool.per_node` is the number of its places. Each place has the GPUs, cores and memory
of one run, so a slot's job asks for a node's share of as many runs as it has places. With `pool.per_gpu=N` each N
places share one GPU, and the slot asks for an N-th of the GPUs.
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
    per_gpu: int
    """Places that share one GPU; 1 if each has its own."""
    shape: Shape
    """Resources of one slot."""
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def asks_for_pool(spec: RunSpec) -> bool:
    """Return True if the run was frozen with `pool.jobs`."""
    return (spec.config.get("pool") or {}).get("jobs") is not None


def pack(specs: Sequence[RunSpec], limits: Limits, num_runs: int | None = None) -> Packing:
    """Return how the pool of these runs, which have one shape, is packed.

    Args:
        specs: the runs; the first one's `pool` counts.
        limits: limits of the cluster, with its nodes if `pool.per_node` is auto or more than 1.
        num_runs: number of runs that the pool will work through; None: that of `specs`. A search has one spec for all.
    """
    num_runs = len(specs) if num_runs is None else num_runs
    spec, shape, per_gpu = specs[0], specs[0].shape, specs[0].per_gpu
    wish = spec.config["pool"]
    jobs, asked = int(wish["jobs"]), wish.get("per_node", 1)
    problems = list(_impossible(specs))
    most = _most_places(spec, limits, jobs)
    fits = most if most is None else most // per_gpu * per_gpu
    notes: list[str] = []
    if asked == AUTO_PLACES:
        # No more places than each slot has runs, but whole GPUs: a place without a run would still be paid for.
        needed = -(-num_runs // (jobs * per_gpu)) * per_gpu
        per_node = max(per_gpu, min(fits if fits is not None else per_gpu, needed))
        if fits is None:
            places = "1 place" if per_node == 1 else f"{per_node} places"
            notes.append(f"pool.per_node=auto: what a node has is not known, so each slot has {places}.")
    else:
        per_node = int(asked)
        if per_node < per_gpu:
            per_node = per_gpu
            notes.append(f"pool.per_gpu={per_gpu}: each slot has {per_gpu} places on one GPU, as pool.per_node is 1.")
    is_own = spec.config["cluster"]["executor"] == Executor.local.value and not shape.gpus_per_node
    if most is not None and fits is not None and most >= 1 and fits < per_node and not is_own:
        # Cores of one's own machine may be shared.
        wrong, nearest = f"pool.per_node={asked}", f"pool.per_node={fits} or auto"
        if not fits:
            wrong, nearest = f"pool.per_gpu={per_gpu}", f"pool.per_gpu={most}, or fewer cores or less memory for a run"
        problems.append(
            f"{wrong}: {_node_of(spec)} has room for {most} such run(s), each with {_needs_of(shape, per_gpu)}. "
            f"Use {nearest}."
        )
    slots = min(jobs, -(-num_runs // per_node))
    if slots < jobs:
        notes.append(f"pool.jobs={jobs}: {slots} slot(s) are enough for {num_runs} run(s), {per_node} a slot.")
    return Packing(
        slots=slots, per_node=per_node, per_gpu=per_gpu, shape=slot_shape(shape, per_node, per_gpu),
        problems=tuple(problems), notes=tuple(notes),
    )  # fmt: skip


def slot_shape(shape: Shape, per_node: int, per_gpu: int = 1) -> Shape:
    """Return the resources of a slot for runs of a shape: one task that starts their ranks.

    Args:
        shape: resources of one run.
        per_node: places of the slot.
        per_gpu: places that share one GPU. Each run still has all of its own cores and memory.
    """
    memory, of_gpu = shape.mem_gb_per_node, shape.mem_gb_per_gpu
    return dataclasses.replace(
        shape,
        tasks_per_node=1, ranks_per_task=1,
        cpus_per_task=per_node * shape.tasks_per_node * shape.cpus_per_task,
        gpus_per_node=per_node * shape.gpus_per_node // per_gpu,
        mem_gb_per_node=None if memory is None else per_node * memory,
        mem_gb_per_gpu=None if of_gpu is None else per_gpu * of_gpu,
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
        return _places_here(spec.shape, jobs, spec.per_gpu)
    partition = limits.partition_of(spec.shape.partition)
    groups = [group for group in limits.nodes if partition is not None and group.partition == partition.name]
    return max((_places_on(group, spec.shape, spec.per_gpu) for group in groups), default=None)


def _places_on(node: NodeGroup, shape: Shape, per_gpu: int) -> int:
    cpus = node.cpus // max(1, shape.tasks_per_node * shape.cpus_per_task)
    counts = [cpus]
    if shape.gpus_per_node:
        gpus = sum(node.gpus.values()) if shape.gpu_type is None else node.gpus.get(shape.gpu_type, 0)
        counts.append(gpus * per_gpu // shape.gpus_per_node)
    memory_mb = mem_mb_per_node(shape)
    if memory_mb and node.memory_mb > 1:  # 1: slurm.conf does not say
        counts.append(node.memory_mb // memory_mb)
    return min(counts)


def _places_here(shape: Shape, jobs: int, per_gpu: int) -> int | None:
    """Return the places of one of `jobs` slots on this machine: by its cores, and by the GPUs that are named."""
    cores = len(os.sched_getaffinity(0)) // (jobs * max(1, shape.tasks_per_node * shape.cpus_per_task))
    if not shape.gpus_per_node:
        return max(1, cores)
    named = named_gpus()
    return len(named) // (jobs * shape.gpus_per_node) * per_gpu if named else None


def _node_of(spec: RunSpec) -> str:
    if spec.config["cluster"]["executor"] == Executor.local.value:
        return "each slot of this machine"
    return f"a node of partition {spec.shape.partition or '(the default)'}"


def _needs_of(shape: Shape, per_gpu: int) -> str:
    gpus = f"1/{per_gpu} GPU" if per_gpu > 1 else f"{shape.gpus_per_node} GPU(s)"
    parts = [gpus] if shape.gpus_per_node else []
    parts.append(f"{shape.tasks_per_node * shape.cpus_per_task} CPU(s)")
    memory_mb = mem_mb_per_node(shape)
    if memory_mb:
        parts.append(f"{memory_mb} MB")
    return ", ".join(parts)
