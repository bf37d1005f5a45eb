"""Limits that the cluster reports: partitions, nodes, associations, QOS, arrays and submits."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from hpc_trainer.errors import SlurmError
from hpc_trainer.slurm.commands import parse_cluster_name, run_slurm, user_name
from hpc_trainer.slurm.jobs import parse_duration


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """One partition (scontrol show partition). None means no limit; times in minutes, memory in MB."""

    name: str
    is_default: bool = False
    max_time_min: int | None = None
    max_nodes: int | None = None
    min_nodes: int = 0
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
    state: str = "UP"
    """UP; DOWN takes jobs without starting them, DRAIN and INACTIVE refuse jobs."""
    allow_groups: tuple[str, ...] | None = None
    """Unix groups whose members may use the partition; None for everybody."""
    is_for_root: bool = False
    """True if only root may submit (RootOnly)."""
    gives_whole_nodes: bool = False
    """True if each job gets all of its nodes' resources (OverSubscribe=EXCLUSIVE)."""
    max_mem_per_cpu_mb: int | None = None
    billing: str | None = None
    """Weights by which the site charges a job (TRESBillingWeights)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Equal nodes of one partition (sinfo -e). `gpus` maps the gres type (`gpu` if it has none) to GPUs a node."""

    partition: str
    num_nodes: int
    cpus: int
    memory_mb: int
    gpus: Mapping[str, int]
    features: frozenset[str]
    # Known only from `read_inventory` (slurm/inventory.py):
    sockets: int = 1
    threads_per_core: int = 1
    """Hardware threads of a core that Slurm counts as CPUs of their own; 1 if a CPU is a whole core."""
    state: str = ""
    """State of the nodes in small letters, as sinfo prints it without its marks: idle, mixed, drained, ..."""
    example: str = ""
    """Name of one of the nodes."""
    architecture: str = ""
    """Machine name of the nodes as `uname -m` prints it."""


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
    max_time_min: int | None = None
    """MaxWall of the association, its account's included; a QOS with a MaxWall replaces it."""


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
    version: str | None = None
    """Release of the controller (SLURM_VERSION)."""
    preempt_type: str | None = None
    """Rule by which jobs preempt others (PreemptType without `preempt/`): none, partition_prio or qos."""
    preempt_mode: str | None = None
    """Mode of preemption of partitions that name none (PreemptMode)."""
    gives_whole_nodes: bool = False
    """True if each job gets whole nodes in every partition (SelectType=select/linear)."""
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


TIMEOUT_S = 30.0


def read_limits(*, with_nodes: bool = True) -> Limits:
    """Ask the cluster for its limits: one scontrol; one sacctmgr if limits are enforced; one sinfo if `with_nodes`.

    Raises:
        SlurmError: scontrol does not answer. A failing sacctmgr or sinfo only adds a note.
    """
    user = user_name()
    controller, accounting, notes = ask_limits(user)
    nodes = ""
    if with_nodes:
        try:
            nodes = run_slurm(["sinfo", "-h", "-a", "-e", "-o", _SINFO_FORMAT], timeout_s=TIMEOUT_S)
        except SlurmError as error:
            notes.append(f"nodes are unknown: {error}")
    return parse_limits(controller, accounting=accounting, nodes=nodes, user=user, notes=tuple(notes))


def ask_limits(user: str) -> tuple[str, str, list[str]]:
    """Return the answers of scontrol and, if limits are enforced, of sacctmgr; and a note if sacctmgr failed.

    Raises:
        SlurmError: scontrol does not answer.
    """
    asked = f"show config\nshow partition\nshow assoc_mgr users={user} flags=assoc,qos\n"
    controller = run_slurm(["scontrol", "-a", "-o"], script=asked, timeout_s=TIMEOUT_S)
    if not _enforced(controller):
        return controller, "", []
    # The controller shows limits of a QOS for each user only while that user has jobs.
    # A database may serve several clusters: only this one's associations count.
    name = parse_cluster_name(controller)
    here = f" cluster={name}" if name else ""
    asked = (
        f"show assoc where user={user}{here} format=account,partition,qos,defaultqos,maxsubmit\n"
        "show qos format=name,maxsubmitpu,maxsubmitpa,grpsubmit,maxwall,flags\n"
    )
    try:
        return controller, run_slurm(["sacctmgr", "-nP"], script=asked, timeout_s=TIMEOUT_S), []
    except SlurmError as error:
        return controller, "", [f"limits of QOS are unknown: {error}"]


_SINFO_FORMAT = "%R|%D|%c|%m|%G|%f"


def parse_limits(
    controller: str, *, accounting: str = "", nodes: str = "", user: str = "", notes: tuple[str, ...] = ()
) -> Limits:
    """Parse the output of scontrol, sacctmgr and sinfo; an unreadable value is unknown, never an error."""
    config = dict(re.findall(r"^(\w+)\s+= (.*)$", controller, re.MULTILINE))
    scheduler = re.search(r"max_array_tasks=(\d+)", config.get("SchedulerParameters", ""))
    records = [dict(_FIELD.findall(line)) for line in controller.splitlines() if "=" in line]
    associations = [record for record in records if "UserName" in record and "GrpSubmitJobs" in record]
    root = next((record for record in associations if record["Account"] == "root" and not record["UserName"]), {})
    max_jobs = _number(config.get("MaxJobCount"))
    enforced = _enforced(controller)
    has_caps = "limits" in enforced
    parents = dict(_parents(associations))
    # sacctmgr echoes each request before its answer.
    first, _, second = accounting.partition("show qos")
    own, of_qos = list(_rows(first, _ASSOC_WIDTH)), {row[0]: row for row in _rows(second, _QOS_WIDTH)}
    return Limits(
        cluster=parse_cluster_name(controller),
        max_array_size=_number(config.get("MaxArraySize")),
        max_array_tasks=int(scheduler[1]) if scheduler else None,
        # The controller keeps ended jobs for MinJobAge; its count of submitted jobs is the best that a user can see.
        job_cap=SubmitCap(name="MaxJobCount", limit=max_jobs, used=_cap(root.get("GrpSubmitJobs"))[1])
        if max_jobs
        else None,
        enforced=enforced,
        partitions={record["PartitionName"]: _partition(record) for record in records if "PartitionName" in record},
        nodes=tuple(_node_groups(nodes)),
        associations=tuple(_associations(own, associations, user, has_caps=has_caps)),
        account_caps=dict(_account_caps(associations, parents, user)) if has_caps else {},
        qos_caps=dict(_qos_caps(records, of_qos)) if has_caps else {},
        parents=parents,
        qos_max_time_min={name: parse_minutes(row[4]) for name, row in of_qos.items()} if has_caps else {},
        qos_flags={name: frozenset(row[5].split(",")) for name, row in of_qos.items()},
        kill_wait_s=_number(config.get("KillWait", "").split(" ")[0]),
        requeue_exit=frozenset(
            code for key in ("RequeueExit", "RequeueExitHold") for code in _numbers(config.get(key, ""))
        ),
        version=config.get("SLURM_VERSION"),
        preempt_type=config["PreemptType"].removeprefix("preempt/") if "PreemptType" in config else None,
        preempt_mode=config.get("PreemptMode"),
        gives_whole_nodes=config.get("SelectType") == "select/linear",
        notes=notes,
    )


_FIELD = re.compile(r"([\w/:]+)=(\S*)")


def _enforced(controller: str) -> frozenset[str]:
    match = re.search(r"^AccountingStorageEnforce\s*= (\S+)$", controller, re.MULTILINE)
    options = set(match[1].lower().split(",")) if match else set()
    return frozenset(options - {"none"})


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _numbers(text: str) -> Iterator[int]:
    """Yield the numbers of a list of ranges: `75,80-82` gives 75, 80, 81, 82."""
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        yield from range(int(first), int(last or first) + 1)


def _cap(text: str | None) -> tuple[int | None, int]:
    """Return the limit and its use: `15(14)` gives (15, 14); `N(3)` gives (None, 3), no limit."""
    match = re.match(r"(N|\d+)\((\d+)\)", text or "")
    return (_number(match[1]), int(match[2])) if match else (None, 0)


def parse_minutes(text: str) -> int | None:
    """Convert a Slurm duration to whole minutes; None for no limit."""
    seconds = parse_duration(text)
    return None if seconds is None else int(seconds // 60)


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text in (None, "", "ALL", "(null)", "NONE") else tuple(str(text).split(","))


def _partition(record: Mapping[str, str]) -> Partition:
    qos = record.get("QoS")
    return Partition(
        name=record["PartitionName"],
        is_default=record.get("Default") == "YES",
        max_time_min=parse_minutes(record.get("MaxTime", "")),
        max_nodes=_number(record.get("MaxNodes")),
        min_nodes=_number(record.get("MinNodes")) or 0,
        max_mem_per_node_mb=_number(record.get("MaxMemPerNode")),
        max_cpus_per_node=_number(record.get("MaxCPUsPerNode")),
        total_nodes=_number(record.get("TotalNodes")),
        allow_accounts=_names(record.get("AllowAccounts")),
        deny_accounts=_names(record.get("DenyAccounts")) or (),
        allow_qos=_names(record.get("AllowQos")),
        deny_qos=_names(record.get("DenyQos")) or (),
        qos=None if qos in (None, "N/A", "") else qos,
        preempt_mode=record.get("PreemptMode"),
        grace_s=_number(record.get("GraceTime")) or 0,
        state=record.get("State", "UP"),
        allow_groups=_names(record.get("AllowGroups")),
        is_for_root=record.get("RootOnly") == "YES",
        gives_whole_nodes=record.get("OverSubscribe", "").startswith("EXCLUSIVE"),
        max_mem_per_cpu_mb=_number(record.get("MaxMemPerCPU")),
        billing=record.get("TRESBillingWeights"),
    )


def _node_groups(text: str) -> Iterator[NodeGroup]:
    for line in text.splitlines():
        parts = line.split("|")
        if len(parts) != 6:
            continue
        name, count, cpus, memory, gres, features = parts
        sizes = [re.match(r"\d+", text) for text in (count, cpus, memory)]  # `8+` where nodes differ
        if all(sizes):
            yield NodeGroup(
                partition=name,
                num_nodes=int(sizes[0][0]),  # type: ignore[index]
                cpus=int(sizes[1][0]),  # type: ignore[index]
                memory_mb=int(sizes[2][0]),  # type: ignore[index]
                gpus=parse_gpus(gres),
                features=frozenset(filter(None, features.replace("(null)", "").split(","))),
            )


def parse_gpus(gres: str) -> dict[str, int]:
    """Return GPUs by type: `gpu:a100:4(S:0-1),nvme:1` gives {"a100": 4}; GPUs without a type give {"gpu": n}."""
    gpus: Counter[str] = Counter()
    for word in re.sub(r"\([^)]*\)", "", gres).split(","):
        name, *kind, count = word.split(":") if ":" in word else (word, "")
        if name == "gpu" and count.isdecimal():
            gpus[":".join(kind) or "gpu"] += int(count)
    return dict(gpus)


def _rows(accounting: str, width: int) -> Iterator[list[str]]:
    for line in accounting.splitlines():
        parts = line.split("|")
        if len(parts) == width and not line.startswith("sacctmgr:"):
            yield parts


_ASSOC_WIDTH, _QOS_WIDTH = 5, 6


def _associations(
    rows: list[list[str]], controller: list[dict[str, str]], user: str, *, has_caps: bool
) -> Iterator[Association]:
    own = [record for record in controller if _is_user(record, user)]
    default = {record["Account"] for record in own if record.get("DefAssoc") == "Yes"}
    times = {
        (record["Account"], record.get("Partition", "")): _number(record.get("MaxWallPJ"))
        for record in (own if has_caps else ())
    }
    for account, partition, qos, default_qos, _max_submit in rows:
        yield Association(
            account=account, partition=partition, qos=_names(qos) or (), default_qos=default_qos,
            is_default=account in default, max_time_min=times.get((account, partition)),
        )  # fmt: skip
    if not rows:
        for record in own:
            account = record["Account"]
            yield Association(
                account=account, is_default=account in default,
                max_time_min=times.get((account, record.get("Partition", ""))),
            )  # fmt: skip


def _is_user(record: Mapping[str, str], user: str) -> bool:
    return bool(user) and record["UserName"].split("(")[0] == user


def _parents(records: list[dict[str, str]]) -> Iterator[tuple[str, str]]:
    for record in records:
        above = record.get("ParentAccount", "").split("(")[0]
        if not record["UserName"] and above and above != record["Account"]:
            yield record["Account"], above


def _account_caps(
    records: list[dict[str, str]], parents: Mapping[str, str], user: str
) -> Iterator[tuple[tuple[str, str], tuple[SubmitCap, ...]]]:
    """Yield each account of the user with its caps: the user's own, the account's, and those of accounts above."""
    accounts = {record["Account"]: record for record in records if not record["UserName"]}
    for record in records:
        if not _is_user(record, user):
            continue
        account, caps = record["Account"], list[SubmitCap]()
        limit, used = _cap(record.get("MaxSubmitJobs"))
        if limit is not None:
            caps.append(SubmitCap(name=f"MaxSubmitJobs of {user} in account {account}", limit=limit, used=used))
        above: str | None = account
        while above in accounts:
            limit, used = _cap(accounts[above].get("GrpSubmitJobs"))
            if limit is not None:
                caps.append(SubmitCap(name=f"GrpSubmitJobs of account {above}", limit=limit, used=used))
            above = parents.get(above)
        yield (account, record.get("Partition", "")), tuple(caps)


def _qos_caps(
    records: list[dict[str, str]], limits: Mapping[str, list[str]]
) -> Iterator[tuple[str, tuple[SubmitCap, ...]]]:
    """Yield each QOS with its caps: limits from sacctmgr, their use from the controller."""
    in_use = {entry["QOS"].split("(")[0]: entry for entry in records if "QOS" in entry and "GrpSubmitJobs" in entry}
    for name in in_use.keys() | limits.keys():
        record = in_use.get(name, {})
        row = limits.get(name, [""] * _QOS_WIDTH)
        caps = []
        for label, column, key in (
            (f"MaxSubmitJobsPerUser of QOS {name}", row[1], "MaxSubmitJobsPU"),
            (f"MaxSubmitJobsPerAccount of QOS {name}", row[2], "MaxSubmitJobsPA"),
            (f"GrpSubmitJobs of QOS {name}", row[3], "GrpSubmitJobs"),
        ):
            limit, used = _cap(record.get(key))
            limit = limit if limit is not None else _number(column)
            if limit is not None:
                caps.append(SubmitCap(name=label, limit=limit, used=used))
        yield name, tuple(caps)
