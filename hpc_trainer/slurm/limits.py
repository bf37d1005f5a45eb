"""Limits of the cluster: partitions, nodes, associations, QOS, array and submit limits. read_limits.py reads them.

None means unknown (a site may hide or lack a source); an unknown limit imposes no rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """One partition (scontrol show partition). None means no limit; times in minutes, memory in MB."""

    name: str
    is_default: bool = False
    max_time_min: int | None = None
    max_nodes: int | None = None
    max_mem_per_node_mb: int | None = None
    max_cpus_per_node: int | None = None
    total_nodes: int | None = None
    allow_accounts: tuple[str, ...] | None = None
    deny_accounts: tuple[str, ...] = ()
    allow_qos: tuple[str, ...] | None = None
    deny_qos: tuple[str, ...] = ()
    qos: str | None = None
    preempt_mode: str | None = None
    """Slurm's mode of preempting the partition's jobs: OFF, CANCEL, REQUEUE, ...; None: the cluster's PreemptMode."""
    grace_s: int = 0
    """Seconds between the warning and the end of a preempted job (GraceTime)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Equal nodes of one partition (sinfo -e). `gpus` maps the gres type (`gpu` if it has none) to GPUs a node."""

    partition: str
    num_nodes: int
    cpus: int
    memory_mb: int
    gpus: Mapping[str, int]
    features: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitCap:
    """Limit on jobs in the queue at once, and the jobs there now; each array element counts as one."""

    name: str
    limit: int
    used: int

    @property
    def room(self) -> int:
        """Return the number of jobs that may still be submitted, ≥ 0."""
        return max(0, self.limit - self.used)


@dataclass(frozen=True, slots=True, kw_only=True)
class Association:
    """Partition and QOS that this user may use through one account (sacctmgr show assoc)."""

    account: str
    partition: str = ""
    qos: tuple[str, ...] = ()
    default_qos: str = ""
    is_default: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """All limits that the cluster reported. Empty mappings and None: the cluster did not report them."""

    cluster: str | None = None
    """Name of the cluster (ClusterName)."""
    max_array_size: int | None = None
    max_array_tasks: int | None = None
    job_cap: SubmitCap | None = None
    enforced: frozenset[str] = frozenset()
    partitions: Mapping[str, Partition] = field(default_factory=dict)
    nodes: tuple[NodeGroup, ...] = ()
    associations: tuple[Association, ...] = ()
    account_caps: Mapping[tuple[str, str], tuple[SubmitCap, ...]] = field(default_factory=dict)
    """Caps by (account, partition); the partition is "" for an association with all partitions."""
    parents: Mapping[str, str] = field(default_factory=dict)
    """Account -> the account above it."""
    qos_caps: Mapping[str, tuple[SubmitCap, ...]] = field(default_factory=dict)
    qos_max_time_min: Mapping[str, int | None] = field(default_factory=dict)
    qos_flags: Mapping[str, frozenset[str]] = field(default_factory=dict)
    kill_wait_s: int | None = None
    """Seconds between SIGTERM and SIGKILL (KillWait)."""
    requeue_exit: frozenset[int] = frozenset()
    """Exit codes after which the site requeues or holds a job by itself (RequeueExit, RequeueExitHold)."""
    notes: tuple[str, ...] = ()

    @property
    def max_elements(self) -> int | None:
        """Return the number of elements that one array may have; None if unknown.

        MaxArraySize bounds the highest index, which counts from 0.
        """
        sizes = [size for size in (self.max_array_size, self.max_array_tasks) if size is not None]
        return min(sizes) if sizes else None

    def partition_of(self, name: str | None) -> Partition | None:
        """Return the partition of this name, or the default partition if `name` is None."""
        if name is not None:
            return self.partitions.get(name)
        return next((partition for partition in self.partitions.values() if partition.is_default), None)

    def account_of(self, account: str | None) -> str | None:
        """Return the account that a job is charged to: the named account, else the user's default."""
        return account or next(
            (association.account for association in self.associations if association.is_default), None
        )

    def association_of(self, account: str | None, partition: str | None) -> Association | None:
        """Return the association that applies to a job: that of its partition, else the account's general one."""
        charged, asked = self.account_of(account), self.partition_of(partition)
        own = {
            association.partition: association for association in self.associations if association.account == charged
        }
        return own.get(asked.name if asked is not None else "") or own.get("")

    def qos_of(self, qos: str | None, account: str | None, partition: str | None) -> str | None:
        """Return the QOS of a job: the named one, its association's default, or its only QOS; None if unknown."""
        if qos is not None:
            return qos
        own = self.association_of(account, partition)
        if own is None:
            return None
        return own.default_qos or (own.qos[0] if len(own.qos) == 1 else None)

    def accounts_above(self, account: str) -> list[str]:
        """Return the account and the accounts above it, up to the root."""
        accounts = [account]
        while (above := self.parents.get(accounts[-1])) and above not in accounts:
            accounts.append(above)
        return accounts

    def submit_caps(self, partition: str | None, account: str | None, qos: str | None) -> list[SubmitCap]:
        """Return every cap that a job of this partition, account and QOS (None: the defaults) counts against."""
        caps = [self.job_cap] if self.job_cap is not None else []
        asked = self.partition_of(partition)
        charged = self.account_of(account) or ""
        own = self.account_caps.get((charged, asked.name if asked is not None else ""))
        caps += own if own is not None else self.account_caps.get((charged, ""), ())
        # If nothing else sets a job's QOS, Slurm uses `normal` (sacctmgr(1)).
        names = {self.qos_of(qos, account, partition) or "normal", asked.qos if asked is not None else None}
        return caps + [cap for name in sorted(filter(None, names)) for cap in self.qos_caps.get(name, ())]
