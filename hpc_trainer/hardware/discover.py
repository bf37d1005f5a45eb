"""`hardware discover`: a cluster file and hardware files of the cluster at hand, made from Slurm's answers.

No file holds an account: files of a repository are shared, and accounts belong to users.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_trainer.config.schema.cluster import ClusterConfig, HardwareConfig
from hpc_trainer.errors import ConfigError, SlurmError, did_you_mean
from hpc_trainer.hardware.site_files import Proposal
from hpc_trainer.slurm.inventory import OUT_OF_SERVICE, read_inventory
from hpc_trainer.slurm.jobs import OFF
from hpc_trainer.slurm.limits import Limits, NodeGroup, Partition
from hpc_trainer.slurm.shape import Shape, find_shape_problems, longest_limit, resources

# A run that needs longer comes back by itself, and a short job starts earlier in the gaps of the queue.
_LONGEST_MIN = 1440
# One rank of a CPU partition: enough for a data loader and a few threads.
_CPUS_OF_ONE_RANK = 8
_FEWEST_CPUS_A_SOCKET = 4
# From this size on a whole number of GB loses little.
_WHOLE_GB = 16
_UNTYPED = "gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Decisions that only the user can make; None: no answer was given."""

    partitions: tuple[str, ...] = ()
    account: str | None = None
    qos: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """Result of a discovery: files to write, partitions without a file, and facts for the screen."""

    limits: Limits
    cluster: Proposal
    hardware: tuple[Proposal, ...]
    skipped: Mapping[str, str]
    """Partition -> reason why no file was made for it."""
    notes: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[Proposal, ...]:
        """All files, the cluster's first."""
        return (self.cluster, *self.hardware)


def discover(limits: Limits, choice: Choice, *, day: str, machine: str, groups: frozenset[str]) -> Discovery:
    """Return the files that describe a cluster.

    Args:
        limits: the answers of Slurm (`read_inventory`).
        choice: the user's decisions.
        day: today, YYYY-MM-DD.
        machine: machine name of this login node, as `uname -m` prints it.
        groups: names of the Unix groups of the user.

    Raises:
        ConfigError: the choice names what the cluster lacks, or no partition is left.
    """
    check_choice(limits, choice)
    hardware, described, skipped = list[Proposal](), list[Partition](), dict[str, str]()
    for partition in limits.partitions.values():
        if choice.partitions and partition.name not in choice.partitions:
            continue
        access = access_to(partition, limits, choice, groups)
        proposals = [] if access.refusal else list(_proposals(_Place(limits=limits, access=access, day=day)))
        if not proposals:
            skipped[partition.name] = access.refusal or "no shape of its nodes fits the limits of the partition"
        else:
            described.append(partition)
        hardware += proposals
    if not hardware:
        listed = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
        raise ConfigError(f"no partition can be described. {listed}")
    return Discovery(
        limits=limits,
        cluster=_cluster_file(limits, described, choice, day),
        hardware=tuple(hardware),
        skipped=skipped,
        notes=(*limits.notes, *_notes(limits, machine)),
    )


def smallest_here() -> tuple[dict[str, Any], str] | None:
    """Return the keys of the smallest run on the commonest nodes of this cluster, GPUs first, and where they are from.

    Nodes of the default partition come first. None if Slurm's answers allow no profile for this user.
    """
    try:
        limits = read_inventory()
        discovery = discover(
            limits, Choice(), day=time.strftime("%Y-%m-%d"), machine=platform.machine(), groups=user_groups()
        )  # fmt: skip
    except (SlurmError, ConfigError):
        return None
    default = limits.partition_of(None)

    def rank(proposal: Proposal) -> tuple[bool, bool, int, int]:
        values = proposal.values
        partition, gpus = values["partition"], values.get("gpus_per_node", 0)
        kind = values.get("gpu_type", _UNTYPED)
        nodes = [group for group in limits.nodes if group.partition == partition and (not gpus or kind in group.gpus)]
        ranks = values["num_nodes"] * (gpus or values["tasks_per_node"])
        is_default = default is not None and partition == default.name
        return gpus == 0, not is_default, -sum(group.num_nodes for group in nodes), ranks

    values = dict(min(discovery.hardware, key=rank).values)
    return values, f"partition {values['partition']} of cluster {limits.cluster}"


def check_choice(limits: Limits, choice: Choice) -> None:
    """Raise an error if a decision names what the cluster or the user does not have.

    Raises:
        ConfigError: the message names the nearest legal choice.
    """
    for name in choice.partitions:
        if name not in limits.partitions:
            there = _there_are(name, limits.partitions)
            raise ConfigError(f"--partition {name}: the cluster has no such partition. {there}")
    accounts = list(dict.fromkeys(association.account for association in limits.associations))
    account = choice.account
    if account is not None and accounts and account.lower() not in (name.lower() for name in accounts):
        raise ConfigError(f"--account {account}: you have no such account. {_there_are(account, accounts)}")
    names = qos_choices(limits, account)
    if choice.qos is not None and names and choice.qos not in names:
        raise ConfigError(f"--qos {choice.qos}: it is not among your QOS. {_there_are(choice.qos, names)}")


def qos_choices(limits: Limits, account: str | None) -> list[str]:
    """Return the QOS that the user may use through an account, or through any account if it is None."""
    return list(
        dict.fromkeys(
            name
            for association in limits.associations
            if account is None or association.account.lower() == account.lower()
            for name in association.qos
        )
    )


def _there_are(wrong: str, known: Iterable[str]) -> str:
    names = sorted(known)
    return f"{did_you_mean(wrong, names)}There are: {', '.join(names) or 'none'}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How this user can submit to a partition; None: Slurm's default will do."""

    partition: Partition
    account: str | None = None
    qos: str | None = None
    all_qos: tuple[str, ...] = ()
    """All QOS that fit, if the job must name one."""
    refusal: str | None = None
    """Reason why the user can submit nothing there today."""


def access_to(partition: Partition, limits: Limits, choice: Choice, groups: frozenset[str]) -> Access:
    """Return the account and QOS to submit to a partition with, or the reason why nothing can be submitted."""
    refusal = _closed(partition, limits, groups)
    accounts = _accounts_allowed(partition, limits, choice)
    if refusal is None and accounts == []:
        refusal = "none of your accounts may use it" if choice.account is None else "this account may not use it"
    account = accounts[0] if accounts else choice.account
    allowed_qos = _qos_allowed(partition, limits, choice, account)
    if refusal is None and allowed_qos == []:
        listed = ", ".join(partition.allow_qos or ())
        refusal = f"it takes only the QOS {listed}" if listed else "it refuses your QOS"
    return Access(
        partition=partition,
        account=account if choice.account or account != limits.account_of(None) else None,
        qos=allowed_qos[0] if allowed_qos else None,
        all_qos=tuple(allowed_qos or ()),
        refusal=refusal,
    )


def _closed(partition: Partition, limits: Limits, groups: frozenset[str]) -> str | None:
    """Return the reason why a partition takes no job of the user under any account; None if it takes them."""
    if partition.state != "UP":
        return f"its state is {partition.state}"
    if partition.is_for_root:
        return "only root may use it"
    if partition.total_nodes == 0:
        return "it has no nodes"
    if partition.max_nodes == 0:
        return "its MaxNodes is 0"
    if not _nodes_of(partition, limits):
        return "sinfo shows none of its nodes"
    allowed = partition.allow_groups
    if allowed is not None and not groups & set(allowed):
        return f"only members of the Unix groups {', '.join(allowed)} may use it"
    return None


def _nodes_of(partition: Partition, limits: Limits) -> list[NodeGroup]:
    return [group for group in limits.nodes if group.partition == partition.name]


def _accounts_allowed(partition: Partition, limits: Limits, choice: Choice) -> list[str] | None:
    """Return the user's accounts that may use a partition, the default first; None if no account is known."""
    default = limits.account_of(None)
    own = [*([default] if default else []), *(association.account for association in limits.associations)]
    asked = [choice.account] if choice.account is not None else list(dict.fromkeys(own))
    allowed, denied = partition.allow_accounts, partition.deny_accounts
    fit = [
        account
        for account in asked
        if (allowed is None or set(allowed) & {account, *limits.accounts_above(account.lower())})
        and account not in denied
    ]
    return fit if asked else None


def _qos_allowed(partition: Partition, limits: Limits, choice: Choice, account: str | None) -> list[str] | None:
    """Return the QOS from which a job must name one; None if the default will do."""
    allowed, denied = partition.allow_qos, partition.deny_qos

    def fits(name: str) -> bool:
        return (allowed is None or name in allowed) and name not in denied

    if choice.qos is not None:
        return [choice.qos] if fits(choice.qos) else []
    default = limits.qos_of(None, account, partition.name)
    if (allowed is None and not denied) or (default is not None and fits(default)):
        return None
    own = qos_choices(limits, account)
    if own:
        return [name for name in allowed or own if name in own and fits(name)]  # the site's own order
    return list(allowed) if allowed is not None and len(allowed) == 1 else None  # unknown: Slurm decides


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Partition for a shape, with the user's access to it."""

    limits: Limits
    access: Access
    day: str

    @property
    def partition(self) -> Partition:
        return self.access.partition

    @property
    def gives_whole_nodes(self) -> bool:
        return self.partition.gives_whole_nodes or self.limits.gives_whole_nodes


def _proposals(place: _Place) -> Iterator[Proposal]:
    """Yield a file for each useful shape of a partition that Slurm would accept."""
    nodes = _nodes_of(place.partition, place.limits)
    kinds = sorted({kind for group in nodes for kind in group.gpus})
    plain = [group for group in nodes if not group.gpus]
    stems = _stems(place.partition.name, [*kinds, *(["cpu"] if plain else [])])
    for kind in kinds:
        having = [group for group in nodes if kind in group.gpus]
        if _is_slice(kind):  # NCCL does not join slices of one GPU
            counts = []
        else:
            counts = sorted({group.gpus[kind] for group in having} - {1})
            # A node with slices counts many GPUs, and each would get few CPUs.
            having = [group for group in having if not any(map(_is_slice, group.gpus))] or having
        sizes = [] if place.gives_whole_nodes and counts else [(1, having)]
        sizes += [(count, [group for group in nodes if group.gpus.get(kind) == count]) for count in counts]
        for num_gpus, groups in sizes:
            yield from _accepted(stems[kind], _gpu_shape(place.partition, kind, num_gpus, groups), groups, place)
    for values in _cpu_shapes(place.partition, plain, whole_only=place.gives_whole_nodes) if plain else ():
        yield from _accepted(stems["cpu"], values, plain, place)


def _is_slice(kind: str) -> bool:
    """Return True for a part of a GPU (MIG) by its gres type."""
    return re.search(r"\d+g\.\d+gb|(?:^|[_.])mig", kind, re.IGNORECASE) is not None


def _stems(partition: str, kinds: Sequence[str]) -> dict[str, str]:
    """Return the beginning of the files' names for each kind of unit: the partition, then the parts that it lacks.

    `nvidia_h100_80gb_hbm3` in the partition `h100` gives `h100`, in the partition `gpu` it gives `gpu_h100`.
    """
    short = {kind: re.sub(r"^(nvidia|tesla|amd)_", "", kind.lower()) for kind in kinds}
    first = {kind: name.split("_")[0] for kind, name in short.items()}
    names = first if len(set(first.values())) == len(kinds) else short
    if len(kinds) == 1 and names[kinds[0]] in partition.lower():
        return {kinds[0]: _file_name(partition)}
    return {kind: _file_name(f"{partition}_{name}") for kind, name in names.items()}


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", text)


def _gpu_shape(partition: Partition, kind: str, num_gpus: int, groups: Sequence[NodeGroup]) -> dict[str, Any]:
    """Return the keys of a shape whose GPUs have equal shares of a node, so that jobs can use all its GPUs at once."""
    cpus = min(_cpus(group, partition) // sum(group.gpus.values()) for group in groups)
    threads = max(group.threads_per_core for group in groups)
    cpus = max(1, cpus - (cpus % threads if cpus > threads else 0))  # Slurm allocates whole cores
    memory = _share_gb(partition, groups, cpus, lambda group: sum(group.gpus.values()))
    return {
        "num_nodes": max(1, partition.min_nodes),
        "gpus_per_node": num_gpus,
        "cpus_per_gpu": cpus,
        **({} if memory is None else {"mem_gb_per_gpu": memory}),
        **({} if kind == _UNTYPED else {"gpu_type": kind}),
    }


def _cpu_shapes(partition: Partition, groups: Sequence[NodeGroup], *, whole_only: bool) -> Iterator[dict[str, Any]]:
    """Yield the keys of one rank with some CPUs, and of a whole node with a rank for each socket."""
    usable = min(_cpus(group, partition) for group in groups)
    threads = max(group.threads_per_core for group in groups)
    num_nodes = max(1, partition.min_nodes)
    few = min(_CPUS_OF_ONE_RANK, usable)
    few = max(1, few - few % threads)
    is_shared = not whole_only and few < usable
    if is_shared:
        memory = _share_gb(partition, groups, few, lambda group: max(1, _cpus(group, partition) // few))
        yield {
            "num_nodes": num_nodes, "tasks_per_node": 1, "cpus_per_task": few,
            **({} if memory is None else {"mem_gb_per_node": memory}),
        }  # fmt: skip
    sockets = min(group.sockets for group in groups)
    if usable // sockets < _FEWEST_CPUS_A_SOCKET:
        sockets = 1
    if sockets > 1 or not is_shared:
        memory = _share_gb(partition, groups, usable, lambda _: 1)
        yield {
            "num_nodes": num_nodes, "tasks_per_node": sockets, "cpus_per_task": usable // sockets,
            **({} if memory is None else {"mem_gb_per_node": memory}),
        }  # fmt: skip


def _cpus(group: NodeGroup, partition: Partition) -> int:
    return min(group.cpus, partition.max_cpus_per_node or group.cpus)


def _share_gb(
    partition: Partition, groups: Sequence[NodeGroup], cpus: int, parts: Callable[[NodeGroup], int]
) -> float | None:
    """Return the memory in GB of one of `parts(group)` equal parts of each node, rounded down; None if unknown."""
    if any(group.memory_mb <= 1 for group in groups):  # slurm.conf has no RealMemory
        return None
    most_mb = partition.max_mem_per_node_mb
    share_mb = min(min(group.memory_mb, most_mb or group.memory_mb) // parts(group) for group in groups)
    if partition.max_mem_per_cpu_mb is not None:
        share_mb = min(share_mb, partition.max_mem_per_cpu_mb * cpus)
    gigabytes = share_mb / 1024
    return int(gigabytes) if gigabytes >= _WHOLE_GB else int(gigabytes * 100) / 100


def _accepted(stem: str, values: dict[str, Any], groups: Sequence[NodeGroup], place: _Place) -> Iterator[Proposal]:
    """Yield the file of a shape with its time limit; nothing if the cluster would refuse the shape."""
    access, limits = place.access, place.limits
    values |= {
        "partition": place.partition.name, **({} if access.qos is None else {"qos": access.qos}), "time_limit_min": 1,
    }  # fmt: skip
    shape = _shape(values, access.account)
    limit = longest_limit(shape, limits)
    values["time_limit_min"] = min(_LONGEST_MIN, limit[0]) if limit is not None else _LONGEST_MIN
    has_memory = all(values.get(key) != 0 for key in ("mem_gb_per_gpu", "mem_gb_per_node"))
    if not has_memory or find_shape_problems(_shape(values, access.account), stem, limits):
        return
    cluster = _file_name(str(limits.cluster))
    name = f"{cluster}/{stem}_x{shape.world_size}"
    source = f"discovered from Slurm {limits.cluster} on {place.day}"
    yield Proposal(
        group="hardware",
        name=name,
        cluster=cluster,
        values={"name": name, **values, "source": source, "checked": place.day},
        comments=tuple(_facts(shape, groups, place, limit)),
    )


def _shape(values: Mapping[str, Any], account: str | None) -> Shape:
    return resources(HardwareConfig(**values), ClusterConfig(account=account), is_one_a_node=False)


def _facts(shape: Shape, groups: Sequence[NodeGroup], place: _Place, limit: tuple[int, str] | None) -> Iterator[str]:
    """Yield the comments of a hardware file."""
    partition = place.partition
    if shape.gpus_per_node:
        unit = f"{_counted(shape.gpus_per_node, 'GPU')}{f' of type {shape.gpu_type}' if shape.gpu_type else ''}"
    else:
        unit = f"{_counted(shape.tasks_per_node, 'rank')} on CPUs"
    yield f"{_counted(shape.num_nodes, 'node')} with {unit}, in partition {partition.name}."
    yield f"The partition has {_many(groups)}."
    if any(group.threads_per_core > 1 for group in groups):
        threads = max(group.threads_per_core for group in groups)
        yield f"A CPU of Slurm is a hardware thread here: {threads} share a core."
    if place.gives_whole_nodes:
        yield "Every job gets whole nodes."
    if limit is None:
        yield "The partition has no time limit."
    elif limit[0] > _LONGEST_MIN:
        yield f"Up to time_limit_min: {limit[0]} is allowed (the {limit[1]})."
    if mode := preemption_of(partition, place.limits):
        yield f"Jobs here may be preempted: {mode} after {partition.grace_s} s."
    if partition.billing:
        yield f"Charged by {partition.billing}."
    if len(place.access.all_qos) > 1:
        yield f"The partition also takes qos: {', '.join(place.access.all_qos[1:])}."
    if not any(group.gpus for group in place.limits.nodes):
        yield "Slurm counts no GPUs in this cluster. If its nodes have some, add `device: cuda`."
    in_all = set.intersection(*(set(group.features) for group in groups))
    in_some = set().union(*(group.features for group in groups)) - in_all
    if in_all:
        yield f"Features of all these nodes (hardware.constraint): {', '.join(sorted(in_all))}."
    if in_some:
        yield f"Features of some: {', '.join(sorted(in_some))}."


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _many(groups: Sequence[NodeGroup]) -> str:
    """Return the nodes as words: `4 nodes with a100:4, 64 CPUs, 503 GB`, the most frequent kind first."""
    kinds: dict[str, int] = {}
    for group in groups:
        gpus = "".join(f"{kind}:{count}, " for kind, count in group.gpus.items())
        memory = "unknown memory" if group.memory_mb <= 1 else f"{group.memory_mb / 1024:.4g} GB"
        description = f"{gpus}{group.cpus} CPUs, {memory}"
        kinds[description] = kinds.get(description, 0) + group.num_nodes
    most = sorted(kinds.items(), key=lambda item: -item[1])
    listed = "; ".join(f"{_counted(count, 'node')} with {description}" for description, count in most[:3])
    return listed + (f"; {len(most) - 3} more kinds" if len(most) > 3 else "")


def preemption_of(partition: Partition, limits: Limits) -> str | None:
    """Return how jobs of a partition are preempted (CANCEL, REQUEUE, ...); None if they are not, or by QOS alone."""
    mode = partition.preempt_mode or limits.preempt_mode
    if limits.preempt_type != "partition_prio" or mode in (None, OFF):
        return None
    return mode


def _cluster_file(limits: Limits, described: Sequence[Partition], choice: Choice, day: str) -> Proposal:
    machines = architectures(limits)
    whole = {limits.gives_whole_nodes or partition.gives_whole_nodes for partition in described}
    time_limits = [
        {"partition": partition.name, "max_time_min": partition.max_time_min}
        for partition in described
        if partition.max_time_min is not None
    ]
    preempted = [
        f"{partition.name} ({mode} after {partition.grace_s} s)"
        for partition in described
        if (mode := preemption_of(partition, limits))
    ]
    if limits.preempt_type == "qos":
        preemption = f"by QOS, PreemptMode={limits.preempt_mode}"
    else:
        preemption = f"in partitions {', '.join(preempted)}" if preempted else "none"
    return Proposal(
        group="cluster",
        name=_file_name(str(limits.cluster)),
        values={
            "name": limits.cluster,
            "executor": "slurm",
            "site": {
                "slurm_cluster": limits.cluster,
                **({"arch": machines[0]} if len(machines) == 1 else {}),
                **({"whole_nodes": whole.pop()} if len(whole) == 1 else {}),
                **({"time_limits": time_limits} if time_limits else {}),
                "preemption": preemption,
                "source": f"discovered from Slurm {limits.cluster} on {day}",
                "checked": day,
            },
        },
        comments=tuple(_cluster_facts(limits, choice)),
    )


def _cluster_facts(limits: Limits, choice: Choice) -> Iterator[str]:
    yield f"Cluster {limits.cluster}, Slurm {limits.version or 'of an unknown release'}."
    if limits.associations:
        yield "Keep the account out of repositories. Put it into ~/.config/hpc_trainer/config.yaml:"
        yield "    cluster.account: YOUR_ACCOUNT"
    if limits.max_elements is not None:
        yield f"An array may have {limits.max_elements} elements."
    caps = limits.submit_caps(None, choice.account, choice.qos)
    if caps:  # the names of the limits hold accounts and users
        yield f"At most {min(cap.limit for cap in caps)} jobs may be submitted at once."
    if limits.kill_wait_s is not None:
        yield f"Between SIGTERM and SIGKILL are {limits.kill_wait_s} s (KillWait)."


def architectures(limits: Limits) -> list[str]:
    """Return the machine names of the cluster's nodes, sorted."""
    return sorted({group.architecture for group in limits.nodes if group.architecture})


def _notes(limits: Limits, machine: str) -> Iterator[str]:
    others = [name for name in architectures(limits) if name != machine]
    if others:
        yield (
            f"nodes are {', '.join(others)} and this login node is {machine}: the Python that submits does not run "
            "there. Set cluster.python to a Python of theirs."
        )
    for partition in limits.partitions.values():
        groups = _nodes_of(partition, limits)
        out = sum(group.num_nodes for group in groups if group.state in OUT_OF_SERVICE)
        if out and out == sum(group.num_nodes for group in groups):
            yield f"all {out} nodes of partition {partition.name} are drained or down now"


def user_groups() -> frozenset[str]:
    """Return the names of this user's Unix groups."""
    import grp

    numbers = {os.getgid(), *os.getgroups()}
    return frozenset(group.gr_name for group in grp.getgrall() if group.gr_gid in numbers)
