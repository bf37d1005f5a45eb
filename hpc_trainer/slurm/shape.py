"""Resources that a validated configuration requests from Slurm, and the cluster's rules for them.

`sbatch --test-only` accepts a time above the partition's MaxTime (tried on 22.05). It says only that a job is
impossible, not what would be possible. The rules here are therefore checked first, before anything is written, and
they name the nearest legal value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_trainer.config.schema.cluster import ClusterConfig, HardwareConfig, Launcher
from hpc_trainer.errors import did_you_mean
from hpc_trainer.slurm.commands import megabytes

if TYPE_CHECKING:
    from hpc_trainer.config.schema.train import TrainConfig
    from hpc_trainer.slurm.limits import Limits, NodeGroup, Partition


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Resources of one run; runs of equal shape become one job array."""

    num_nodes: int
    tasks_per_node: int
    gpus_per_node: int
    cpus_per_task: int
    mem_gb_per_node: float | None
    mem_gb_per_gpu: float | None
    mem_gb_per_cpu: float | None
    gpu_type: str | None
    partition: str | None
    qos: str | None
    constraint: str | None
    exclude: str | None
    account: str | None
    time_limit_min: int
    signal_lead_s: int
    # The defaults are the meaning of specs that are older than these fields.
    gpu_request: str = "gpus_per_node"
    ranks_per_task: int = 1
    whole_node: bool = False

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each node."""
        return self.tasks_per_node * self.ranks_per_task

    @property
    def world_size(self) -> int:
        """Ranks of one run."""
        return self.num_nodes * self.ranks_per_node

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of one attempt that runs to its time limit."""
        return self.num_nodes * self.gpus_per_node * self.time_limit_min / 60


def shape_of(config: TrainConfig) -> Shape:
    """Return the shape of a validated configuration."""
    from hpc_trainer.config.program import is_one_a_node  # loads all sections, which `status` does not need

    return resources(config.hardware, config.cluster, is_one_a_node(config))


def resources(hardware: HardwareConfig, cluster: ClusterConfig, is_one_a_node: bool) -> Shape:
    """Return the shape from the sections that determine it.

    Args:
        hardware: the hardware profile.
        cluster: the cluster's settings.
        is_one_a_node: True if one task on each node starts all of the node's ranks.
    """
    lead_s = signal_lead_s(hardware.time_limit_min, cluster.signal_lead_s)
    by_torchrun = hardware.launcher is Launcher.torchrun and not is_one_a_node
    is_one = by_torchrun or is_one_a_node
    return Shape(
        num_nodes=hardware.num_nodes,
        tasks_per_node=1 if is_one else hardware.ranks_per_node,
        ranks_per_task=hardware.ranks_per_node if by_torchrun else 1,
        gpus_per_node=hardware.gpus_per_node,
        cpus_per_task=hardware.cpus_per_rank * (hardware.ranks_per_node if is_one else 1),
        mem_gb_per_node=hardware.mem_gb_per_node,
        mem_gb_per_gpu=hardware.mem_gb_per_gpu,
        mem_gb_per_cpu=hardware.mem_gb_per_cpu,
        gpu_type=hardware.gpu_type,
        partition=hardware.partition,
        qos=hardware.qos,
        constraint=hardware.constraint,
        exclude=hardware.exclude,
        account=cluster.account,
        time_limit_min=hardware.time_limit_min,
        signal_lead_s=lead_s,
        gpu_request=hardware.gpu_request.value,
        whole_node=hardware.whole_node,
    )


def signal_lead_s(time_limit_min: int, asked_s: int | None = None) -> int:
    """Return how many seconds before the time limit Slurm should send its warning signal.

    Args:
        time_limit_min: time limit of the job in minutes.
        asked_s: `cluster.signal_lead_s`; None for the default.
    """
    # Slurm may send the signal up to 60 s early (sbatch --signal), and KillWait follows: 120 s is enough for a save
    # that takes seconds. A short job keeps three quarters of its time.
    return asked_s or max(1, min(LONGEST_LEAD_S, time_limit_min * 60 // 4))


LONGEST_LEAD_S = 120
"""Seconds between warning and time limit if `cluster.signal_lead_s` is not set and the limit is at least 8 min."""


# --- what the cluster allows ---


def find_shape_problems(shape: Shape, hardware: str, limits: Limits) -> list[str]:
    """Return one line for each rule of the cluster that `shape` breaks; unknown limits break no rule.

    Args:
        hardware: name of the hardware profile, for the messages.
    """
    names = (shape.partition or "").split(",") if shape.partition else [None]
    by_name = [_problems_in(shape, name, limits) for name in names]
    # Slurm takes any of several partitions (`a,b`) that fits, but refuses the job if one of the names does not exist.
    missing = [problems for name, problems in zip(names, by_name, strict=True) if limits.partition_of(name) is None]
    worst = missing[0] if missing else min(by_name, key=len)
    return [f"{problem} (hardware={hardware})" for problem in worst]


def _problems_in(shape: Shape, name: str | None, limits: Limits) -> list[str]:
    partition = limits.partition_of(name)
    if limits.partitions and partition is None:
        return [_no_partition(name, limits)]
    problems = [*_account(shape, partition, limits), *_qos(shape, partition, limits), *_time(shape, partition, limits)]
    if partition is not None:
        problems += _partition_sizes(shape, partition)
        nodes = [group for group in limits.nodes if group.partition == partition.name]
        # Powered-down nodes may be hidden (PrivateData=cloud): then the visible nodes are no bound.
        shown, total = sum(group.num_nodes for group in nodes), partition.total_nodes
        if nodes and not problems and (total is None or shown >= total):
            problems += _nodes(shape, partition, nodes)
    return problems


def mem_mb_per_node(shape: Shape) -> int | None:
    """Return the memory in MB that the shape requests on each node; None if the site's default applies."""
    if shape.mem_gb_per_node is not None:
        return megabytes(shape.mem_gb_per_node)
    if shape.mem_gb_per_gpu is not None:
        return megabytes(shape.mem_gb_per_gpu) * shape.gpus_per_node
    if shape.mem_gb_per_cpu is not None:
        return megabytes(shape.mem_gb_per_cpu) * _cpus_per_node(shape)
    return None


def _cpus_per_node(shape: Shape) -> int:
    return shape.tasks_per_node * shape.cpus_per_task


def _nearest(wrong: str, names: Sequence[str]) -> str:
    return f"{did_you_mean(wrong, names)}There are: {', '.join(sorted(names)) or 'none'}."


def _no_partition(name: str | None, limits: Limits) -> str:
    names = list(limits.partitions)
    if name is None:
        return (
            f"hardware.partition is not set and the cluster has no default partition. Set one of: {', '.join(names)}."
        )
    return f"hardware.partition={name}: the cluster has no such partition. {_nearest(name, names)}"


def _account(shape: Shape, partition: Partition | None, limits: Limits) -> Iterator[str]:
    own_accounts = [association.account for association in limits.associations]
    own_names = {account_name.lower() for account_name in own_accounts}  # slurmdbd keeps account names in lower case
    is_enforced = own_accounts and "associations" in limits.enforced
    if shape.account is not None and is_enforced and shape.account.lower() not in own_names:
        yield f"cluster.account={shape.account}: you have no such account. {_nearest(shape.account, own_accounts)}"
        return
    account = limits.account_of(shape.account)
    if partition is None or account is None:
        return
    allowed, denied = partition.allow_accounts, partition.deny_accounts

    def may_use(name: str) -> bool:
        above = limits.accounts_above(name.lower())  # an account that is allowed allows those below it
        return (allowed is None or not {name, *above}.isdisjoint(allowed)) and name not in denied

    if not may_use(account):
        own = [account_name for account_name in own_accounts if may_use(account_name)]
        fix = f"Use cluster.account={own[0]}." if own else "Use another partition."
        yield f"cluster.account={account} may not use partition {partition.name}. {fix}"


def _qos(shape: Shape, partition: Partition | None, limits: Limits) -> Iterator[str]:
    if shape.qos is None:
        return
    account = limits.account_of(shape.account)
    own = [name for association in limits.associations if association.account == account for name in association.qos]
    names = own or list(limits.qos_caps)
    named = shape.qos.split(",")  # Slurm 24.11 and later take several
    wrong = [qos for qos in named if qos not in names]
    if "qos" in limits.enforced and names and wrong:
        yield f"hardware.qos={shape.qos}: {wrong[0]} is not among your QOS. {_nearest(wrong[0], names)}"
    elif partition is not None:
        allowed = partition.allow_qos
        if (allowed is not None and not set(named) & set(allowed)) or set(named) <= set(partition.deny_qos):
            listed = ", ".join(allowed or ()) or "another one"
            yield f"hardware.qos={shape.qos} may not use partition {partition.name}. Use {listed}."


def _time(shape: Shape, partition: Partition | None, limits: Limits) -> Iterator[str]:
    bound = _longest_in(shape, partition, limits)
    if bound is not None and shape.time_limit_min > bound[0]:
        limit, name = bound
        longer = [
            candidate.name
            for candidate in limits.partitions.values()
            if (most := _longest_in(shape, candidate, limits)) is None or most[0] >= shape.time_limit_min
        ]
        other = f" Or a partition that allows more: {', '.join(longer)}." if longer and "partition" in name else ""
        yield (
            f"hardware.time_limit_min={shape.time_limit_min} must be at most {limit}, the {name}. "
            f"Use hardware.time_limit_min={limit}: a longer run is requeued and continues.{other}"
        )


def longest_limit(shape: Shape, limits: Limits) -> tuple[int, str] | None:
    """Return the longest time limit that the cluster allows for this shape, in minutes, and the name of that limit.

    Returns:
        None if there is no limit, or the cluster did not report one.
    """
    names = (shape.partition or "").split(",") if shape.partition else [None]
    bounds = [_longest_in(shape, limits.partition_of(name), limits) for name in names]
    limited = [bound for bound in bounds if bound is not None]
    return max(limited) if len(limited) == len(bounds) else None  # Slurm takes any of the partitions that fits


def _longest_in(shape: Shape, partition: Partition | None, limits: Limits) -> tuple[int, str] | None:
    bounds = []
    qos = limits.qos_of(shape.qos, shape.account, shape.partition)
    flags = limits.qos_flags.get(qos or "", ())
    lifts = "PartitionTimeLimit" in flags  # this QOS may exceed the partition's limit
    if partition is not None and partition.max_time_min is not None and not lifts:
        bounds.append((partition.max_time_min, f"MaxTime of partition {partition.name}"))
    names = [(qos, f"MaxWall of QOS {qos}")]
    if partition is not None and partition.qos is not None:
        names.append((partition.qos, f"MaxWall of QOS {partition.qos}, which partition {partition.name} has"))
    if "OverPartQOS" not in flags:
        names.reverse()
    of_qos = [(limit, text) for name, text in names if (limit := limits.qos_max_time_min.get(name or "")) is not None]
    # Of two QOS with a limit the first decides; without such a QOS the association does (acct_policy.c).
    bounds += of_qos[:1]
    own = limits.association_of(shape.account, shape.partition if partition is None else partition.name)
    has_qos_limit = of_qos or limits.qos_max_time_min.get(qos or "normal") is not None  # `normal` if nothing sets it
    if not has_qos_limit and own is not None and own.max_time_min is not None:
        bounds.append((own.max_time_min, f"MaxWall of account {own.account}"))
    return min(bounds, default=None)


def _partition_sizes(shape: Shape, partition: Partition) -> Iterator[str]:
    if partition.max_nodes is not None and shape.num_nodes > partition.max_nodes:
        yield (
            f"hardware.num_nodes={shape.num_nodes} must be at most {partition.max_nodes}, the MaxNodes of partition "
            f"{partition.name}. Use hardware.num_nodes={partition.max_nodes}."
        )
    memory = mem_mb_per_node(shape)
    if partition.max_mem_per_node_mb is not None and memory is not None and memory > partition.max_mem_per_node_mb:
        yield _too_much_memory(shape, memory, partition.max_mem_per_node_mb, f"MaxMemPerNode of {partition.name}")
    if partition.max_cpus_per_node is not None and _cpus_per_node(shape) > partition.max_cpus_per_node:
        yield _too_many_cpus(shape, partition.max_cpus_per_node, f"MaxCPUsPerNode of partition {partition.name}")


def _too_much_memory(shape: Shape, memory_mb: int, limit_mb: int, name: str) -> str:
    if shape.mem_gb_per_gpu is not None:
        key, share = "mem_gb_per_gpu", limit_mb / 1024 / shape.gpus_per_node
    elif shape.mem_gb_per_cpu is not None:
        key, share = "mem_gb_per_cpu", limit_mb / 1024 / _cpus_per_node(shape)
    else:
        key, share = "mem_gb_per_node", limit_mb / 1024
    share = int(share * 100) / 100  # rounded down, because a larger value would be refused again
    asked = getattr(shape, key)
    return (
        f"hardware.{key}={asked:g} asks {memory_mb} MB of a node; it must be at most {limit_mb} MB, the {name}. "
        f"Use hardware.{key}={share:g}."
    )


def _too_many_cpus(shape: Shape, limit: int, name: str) -> str:
    cpus_per_rank = max(1, limit // shape.ranks_per_node)
    key = "cpus_per_gpu" if shape.gpus_per_node else "cpus_per_task"
    cpus = shape.cpus_per_task // shape.ranks_per_task
    return (
        f"hardware: {shape.ranks_per_node} rank(s) × {cpus} CPUs = {_cpus_per_node(shape)} CPUs a node; "
        f"it must be at most {limit}, the {name}. Use hardware.{key}={cpus_per_rank}."
    )


def _nodes(shape: Shape, partition: Partition, nodes: Sequence[NodeGroup]) -> Iterator[str]:
    """Yield the first rule that no node fulfils; each rule looks only at nodes that fulfil the rules before it."""
    where = f"in partition {partition.name}"
    left = list(nodes)
    if shape.constraint is not None:
        problem, left = _by_features(shape.constraint, left, where)
        if problem:
            yield problem
            return
    if shape.gpus_per_node and shape.gpu_request != "none":
        kinds = sorted({kind for node in left for kind in node.gpus})
        kind = shape.gpu_type
        with_kind = [node for node in left if _gpus(node, kind)]
        if not with_kind:
            listed = ", ".join(gpu_kind for gpu_kind in kinds if gpu_kind != "gpu") or (
                "GPUs without a type" if kinds else "none"
            )
            asked = f"hardware.gpu_type={kind}" if kind else f"hardware.gpus_per_node={shape.gpus_per_node}"
            hint = _nearest(kind, kinds) if kind and kinds else f"GPUs there: {listed}."
            yield f"{asked}: no node {where} has such GPUs. {hint}"
            return
        most = max(_gpus(node, kind) for node in with_kind)
        if shape.gpus_per_node > most:
            fit = f"hardware.num_nodes={-(-shape.gpus_per_node * shape.num_nodes // most)}"
            yield (
                f"hardware.gpus_per_node={shape.gpus_per_node} must be at most {most}, the number of a node {where}. "
                f"Use hardware.gpus_per_node={most} (and {fit} for as many GPUs in all)."
            )
            return
        left = [node for node in with_kind if _gpus(node, kind) >= shape.gpus_per_node]
    most_cpus = max(node.cpus for node in left)
    if _cpus_per_node(shape) > most_cpus:
        yield _too_many_cpus(shape, most_cpus, f"CPUs of a node {where}")
        return
    left = [node for node in left if node.cpus >= _cpus_per_node(shape)]
    memory, most_memory = mem_mb_per_node(shape), max(node.memory_mb for node in left)
    if most_memory <= 1:  # slurm.conf has no RealMemory, so the limit is unknown
        memory = None
    if memory is not None and memory > most_memory:
        yield _too_much_memory(shape, memory, most_memory, f"memory of a node {where}")
        return
    count = sum(node.num_nodes for node in left if memory is None or node.memory_mb >= memory)
    if shape.num_nodes > count:
        yield (
            f"hardware.num_nodes={shape.num_nodes} must be at most {count}: only that many nodes {where} have what it "
            f"requests. Use hardware.num_nodes={count}."
        )


def _gpus(node: NodeGroup, kind: str | None) -> int:
    return sum(node.gpus.values()) if kind is None else node.gpus.get(kind, 0)


def _by_features(constraint: str, nodes: list[NodeGroup], where: str) -> tuple[str | None, list[NodeGroup]]:
    """Return a problem, and the nodes that fulfil a constraint `a&b|c`; counts and brackets are left to Slurm."""
    if re.search(r"[\[\]()*]", constraint):
        return None, nodes
    features = sorted({feature for node in nodes for feature in node.features})
    for word in re.split(r"[&|]", constraint):
        if word not in features:
            return (
                f"hardware.constraint={constraint}: no node {where} has the feature {word}. {_nearest(word, features)}",
                [],
            )
    left = [
        node
        for node in nodes
        if any(all(word in node.features for word in part.split("&")) for part in constraint.split("|"))
    ]
    return (None, left) if left else (f"hardware.constraint={constraint}: no node {where} has all of them at once.", [])
