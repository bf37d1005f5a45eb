"""What the cluster allows: partitions, nodes, associations, QOS, array and submit limits. Reading them: read_limits.py.

None is unknown (a site may hide or lack a source), and no rule is made up from it.
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
    """How its jobs are preempted: OFF, CANCEL, REQUEUE, ...; None where the cluster's PreemptMode counts."""
    grace_s: int = 0
    """Seconds between the warning and the end of a preempted job (GraceTime)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Equal nodes of one partition (sinfo -e). `gpus`: gres type (`gpu` if it has none) -> GPUs a node."""

    partition: str
    num_nodes: int
    cpus: int
    memory_mb: int
    gpus: Mapping[str, int]
    features: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitCap:
    """How many jobs (array elements count one each) may be in the queue at once, and how many are."""

    name: str
    limit: int
    used: int

    @property
    def room(self) -> int:
        """Jobs that may still be submitted, ≥ 0."""
        return max(0, self.limit - self.used)


@dataclass(frozen=True, slots=True, kw_only=True)
class Association:
    """What one account lets this user do (sacctmgr show assoc)."""

    account: str
    partition: str = ""
    qos: tuple[str, ...] = ()
    default_qos: str = ""
    is_default: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Everything the cluster said. Empty mappings and None: it did not say."""

    cluster: str | None = None
    """What the cluster calls itself (ClusterName)."""
    max_array_size: int | None = None
    max_array_tasks: int | None = None
    job_cap: SubmitCap | None = None
    enforced: frozenset[str] = frozenset()
    partitions: Mapping[str, Partition] = field(default_factory=dict)
    nodes: tuple[NodeGroup, ...] = ()
    associations: tuple[Association, ...] = ()
    account_caps: Mapping[tuple[str, str], tuple[SubmitCap, ...]] = field(default_factory=dict)
    """By (account, partition); the partition is "" for an association with all of them."""
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
        """Elements that one array may have: MaxArraySize bounds the highest index, which counts from 0."""
        known = [each for each in (self.max_array_size, self.max_array_tasks) if each is not None]
        return min(known) if known else None

    def partition_of(self, name: str | None) -> Partition | None:
        """The partition of this name, or the default one."""
        if name is not None:
            return self.partitions.get(name)
        return next((each for each in self.partitions.values() if each.is_default), None)

    def account_of(self, account: str | None) -> str | None:
        """The account that a job is charged to: the named one, else the user's default."""
        return account or next((each.account for each in self.associations if each.is_default), None)

    def association_of(self, account: str | None, partition: str | None) -> Association | None:
        """The association that a job is charged to: that of its partition, else the account's general one."""
        charged, asked = self.account_of(account), self.partition_of(partition)
        own = {each.partition: each for each in self.associations if each.account == charged}
        return own.get(asked.name if asked is not None else "") or own.get("")

    def qos_of(self, qos: str | None, account: str | None, partition: str | None) -> str | None:
        """The QOS that a job gets: the named one, its association's default, or its only one; None: not known."""
        if qos is not None:
            return qos
        own = self.association_of(account, partition)
        if own is None:
            return None
        return own.default_qos or (own.qos[0] if len(own.qos) == 1 else None)

    def accounts_above(self, account: str) -> list[str]:
        """The account and those above it, up to the root."""
        found = [account]
        while (above := self.parents.get(found[-1])) and above not in found:
            found.append(above)
        return found

    def submit_caps(self, partition: str | None, account: str | None, qos: str | None) -> list[SubmitCap]:
        """Every cap that a job of this partition, account and QOS (None: the defaults) counts against."""
        caps = [self.job_cap] if self.job_cap is not None else []
        asked = self.partition_of(partition)
        charged = self.account_of(account) or ""
        own = self.account_caps.get((charged, asked.name if asked is not None else ""))
        caps += own if own is not None else self.account_caps.get((charged, ""), ())
        # Where nobody says which one a job gets, `normal` is Slurm's last resort (sacctmgr(1)).
        names = {self.qos_of(qos, account, partition) or "normal", asked.qos if asked is not None else None}
        return caps + [cap for name in sorted(filter(None, names)) for cap in self.qos_caps.get(name, ())]
