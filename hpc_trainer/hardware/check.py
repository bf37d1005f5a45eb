"""`hardware check`: a profile against the cluster at hand, line by line, and what a short job on it measures."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
import socket
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_trainer.config.compose.composer import Composer
from hpc_trainer.config.compose.overrides import default_overrides
from hpc_trainer.config.schema.cluster import HardwareConfig
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.hardware.profiles import Profile, read_cluster, read_profiles, site_of
from hpc_trainer.record.reading import read_json
from hpc_trainer.slurm.inventory import OUT_OF_SERVICE
from hpc_trainer.slurm.limits import Limits
from hpc_trainer.slurm.shape import Shape, find_shape_problems, longest_limit, mem_mb_per_node, shape_of

OK, WRONG, NOTE = "ok", "wrong", "note"
_GENERIC_CLUSTERS = ("slurm", "local")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Comparison of one figure of a profile with the cluster."""

    key: str
    asked: str
    """Value in the profile."""
    cluster: str
    """Value on the cluster."""
    verdict: str
    """ok, wrong, or note for a difference that may be intended."""
    fix: str = ""


def compose_profiles(
    names: Sequence[str], overrides: Sequence[str] = (), config_dirs: Sequence[Path] = ()
) -> list[TrainConfig]:
    """Return the configuration of each profile with its cluster, the user's own defaults and these overrides.

    Raises:
        ConfigError: there is no such profile, or an override is wrong.
    """
    with Composer(config_dirs) as composer:
        given = [[f"hardware={name}", *overrides] for name in names]
        return [composer.compose([*default_overrides(overrides), *overrides]) for overrides in given]


# --- the profile's lines ---


def check_lines(config: TrainConfig, limits: Limits, name: str | None = None) -> list[Line]:
    """Return the lines of a profile: its figure, the cluster's figure, and the fix if they do not fit.

    Args:
        name: the profile as the user types it, if its file may name it otherwise.
    """
    hardware_name, shape = config.hardware.name, shape_of(config)
    problems = _problems_by_key(shape, hardware_name, limits)
    lines = [*_name_line(config, name or hardware_name, limits)]
    for key, asked, cluster in _facts(config.hardware, shape, limits):
        problem = problems.pop(key, None) or (_default_qos(shape, limits) if key == "qos" else None)
        verdict = OK if problem is None else WRONG
        lines.append(Line(key=key, asked=asked, cluster=cluster, verdict=verdict, fix=problem or ""))
        if problem is not None and key == "partition":
            return lines  # nothing else can be compared
    lines += [Line(key=key, asked="", cluster="", verdict=WRONG, fix=problem) for key, problem in problems.items()]
    return [*lines, *_notes(config, shape, limits)]


def _default_qos(shape: Shape, limits: Limits) -> str | None:
    """Return the problem of a default QOS that the partition does not take; None if there is none."""
    partition, qos = limits.partition_of(shape.partition), limits.qos_of(None, shape.account, shape.partition)
    allowed = None if partition is None else partition.allow_qos
    if shape.qos is not None or qos is None or allowed is None or qos in allowed:
        return None
    listed = ", ".join(allowed)
    return f"hardware.qos is not set, and your default QOS {qos} may not use this partition. Set one of: {listed}."


_KEY = re.compile(r"hardware\.(\w+)|cluster\.(account)")


def _problems_by_key(shape: Shape, name: str, limits: Limits) -> dict[str, str]:
    """Return the problems of a shape by the key that is wrong.

    The rules stop at the first node rule that is broken. Each wrong key is therefore set to a harmless value, and the
    rules are checked again.
    """
    problems: dict[str, str] = {}
    while True:
        broken = find_shape_problems(shape, name, limits)
        found = {_key_of(problem): problem.removesuffix(f" (hardware={name})") for problem in broken}
        new = {key: problem for key, problem in found.items() if key not in problems}
        problems |= new
        if not new or "partition" in new:
            return problems
        for key in new:
            shape, limits = _harmless(shape, key, limits)


def _key_of(problem: str) -> str:
    match = _KEY.match(problem)
    if match is None:  # `hardware: 4 rank(s) × 8 CPUs`
        return "cpus"
    key = match[1] or match[2]
    return "memory" if key.startswith("mem_gb") else key


def _harmless(shape: Shape, key: str, limits: Limits) -> tuple[Shape, Limits]:
    harmless: dict[str, dict[str, Any]] = {
        "account": {"account": None}, "qos": {"qos": None}, "constraint": {"constraint": None},
        "gpu_type": {"gpu_type": None}, "gpus_per_node": {"gpus_per_node": 1, "tasks_per_node": 1},
        "cpus": {"cpus_per_task": 1, "tasks_per_node": 1}, "num_nodes": {"num_nodes": 1},
        "memory": {"mem_gb_per_node": None, "mem_gb_per_gpu": None, "mem_gb_per_cpu": None},
        "time_limit_min": {"time_limit_min": 1},
    }  # fmt: skip
    if key == "account":  # else the default account would be looked at
        limits = dataclasses.replace(limits, associations=())
    return dataclasses.replace(shape, **harmless.get(key, {})), limits


def _name_line(config: TrainConfig, name: str, limits: Limits) -> Iterator[Line]:
    if name != config.hardware.name:
        yield Line(
            key="name", asked=config.hardware.name, cluster="", verdict=NOTE,
            fix=f"The file of {name} has `name: {config.hardware.name}`, the name in plans and of measured figures. "
            f"Write name: {name}.",
        )  # fmt: skip
    asked = config.cluster.site.slurm_cluster or config.cluster.name
    if asked in _GENERIC_CLUSTERS or limits.cluster is None:
        return
    is_same = asked.lower() == limits.cluster.lower()
    yield Line(
        key="cluster", asked=asked, cluster=limits.cluster, verdict=OK if is_same else NOTE,
        fix="" if is_same else f"The profile is for {asked}, and Slurm here is {limits.cluster}.",
    )  # fmt: skip


def _facts(hardware: HardwareConfig, shape: Shape, limits: Limits) -> Iterator[tuple[str, str, str]]:
    """Yield (key, value in the profile, value on the cluster)."""
    partition = limits.partition_of((shape.partition or "").split(",")[0] or None)
    listed = ", ".join(limits.partitions)
    if partition is None:
        yield "partition", shape.partition or "the default", f"there are {listed or 'none that are known'}"
        return
    total = "unknown" if partition.total_nodes is None else partition.total_nodes
    yield "partition", shape.partition or f"the default ({partition.name})", f"{partition.state}, {total} nodes"
    account = limits.account_of(shape.account)
    accounts = list(dict.fromkeys(association.account for association in limits.associations))
    if accounts:
        yield "account", shape.account or f"the default ({account or 'none'})", f"yours: {', '.join(accounts)}"
    qos = limits.qos_of(shape.qos, shape.account, shape.partition)
    if shape.qos or qos:
        allowed = "all" if partition.allow_qos is None else ", ".join(partition.allow_qos)
        yield "qos", shape.qos or f"the default ({qos})", f"the partition takes {allowed}"
    nodes = [group for group in limits.nodes if group.partition == partition.name]
    if shape.constraint:
        features = sorted({feature for group in nodes for feature in group.features})
        yield "constraint", shape.constraint, f"features: {', '.join(features) or 'none'}"
    kinds: dict[str, set[int]] = {}
    for group in nodes:
        for kind, count in group.gpus.items():
            kinds.setdefault(kind, set()).add(count)
    has = ", ".join(f"{'/'.join(map(str, sorted(counts)))} {kind}" for kind, counts in sorted(kinds.items()))
    if shape.gpus_per_node:
        yield "gpu_type", shape.gpu_type or "any", ", ".join(sorted(kinds)) or "no GPUs"
        yield "gpus_per_node", str(shape.gpus_per_node), f"{has or 'none'} a node"
    if nodes:
        per_node = shape.tasks_per_node * shape.cpus_per_task
        most = max(group.cpus for group in nodes)
        bound = min(most, partition.max_cpus_per_node or most)
        yield "cpus", f"{shape.tasks_per_node} × {shape.cpus_per_task} = {per_node} a node", f"{bound} a node"
        memory, largest = mem_mb_per_node(shape), max(group.memory_mb for group in nodes)
        largest = min(largest, partition.max_mem_per_node_mb or largest)
        asked = "the default" if memory is None else f"{memory / 1024:.4g} GB a node"
        yield "memory", asked, "unknown" if largest <= 1 else f"{largest / 1024:.4g} GB a node"
        yield "num_nodes", str(shape.num_nodes), f"{sum(group.num_nodes for group in nodes)} in the partition"
    limit = longest_limit(shape, limits)
    limit_text = "no limit" if limit is None else f"{limit[0]} min, the {limit[1]}"
    yield "time_limit_min", f"{hardware.time_limit_min} min", limit_text


def _notes(config: TrainConfig, shape: Shape, limits: Limits) -> Iterator[Line]:
    """Yield notes on problems that no rule reports: a closed partition, nodes out of service, GPUs of any type."""
    partition = limits.partition_of((shape.partition or "").split(",")[0] or None)
    if partition is None:
        return
    if partition.state != "UP":
        yield Line(
            key="state", asked="", cluster=partition.state, verdict=WRONG,
            fix=f"Jobs of partition {partition.name} do not start now. Set hardware.partition to another one.",
        )  # fmt: skip
    own = {association.account.lower() for association in limits.associations}
    if shape.account is not None and own and shape.account.lower() not in own and "associations" not in limits.enforced:
        yield Line(
            key="account", asked=shape.account, cluster=", ".join(sorted(own)), verdict=NOTE,
            fix="This account is not yours. Slurm does not enforce accounts here, so the job would run.",
        )  # fmt: skip
    nodes = [group for group in limits.nodes if group.partition == partition.name]
    kinds = {kind for group in nodes for kind in group.gpus}
    if shape.gpus_per_node and shape.gpu_type is None and len(kinds) > 1:
        yield Line(
            key="gpu_type", asked="any", cluster=", ".join(sorted(kinds)), verdict=NOTE,
            fix=f"A run may get any of them. Set hardware.gpu_type={min(kinds)}.",
        )  # fmt: skip
    machines = sorted({group.architecture for group in nodes if group.architecture})
    asked_arch = config.cluster.site.arch
    if asked_arch is not None and machines and asked_arch not in machines:
        yield Line(
            key="arch", asked=asked_arch, cluster=", ".join(machines), verdict=WRONG,
            fix=f"Set cluster.site.arch={machines[0]}, and look whether cluster.python is one for it.",
        )  # fmt: skip
    total = sum(group.num_nodes for group in nodes)
    up = sum(group.num_nodes for group in nodes if group.state not in OUT_OF_SERVICE)
    if nodes and up < shape.num_nodes:
        yield Line(
            key="service", asked=f"{shape.num_nodes} nodes", cluster=f"{up} of {total} are in service", verdict=NOTE,
            fix="The job waits until drained nodes come back. `sinfo -R` tells the reasons.",
        )  # fmt: skip


# --- shipped profiles of the cluster at hand ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipped:
    """Profile of `conf/` for this cluster: its lines that are not ok, and figures that differ from Slurm's."""

    name: str
    lines: tuple[Line, ...]
    differences: tuple[str, ...]
    found_by: str = "name"
    """`name` if the site has this ClusterName; `nodes` if no source confirms the site's, and all else fits."""

    @property
    def is_fit(self) -> bool:
        """True if no line is wrong."""
        return all(line.verdict != WRONG for line in self.lines)


def find_shipped(limits: Limits, discovered: Sequence[Mapping[str, Any]]) -> list[Shipped]:
    """Return the shipped profiles of the cluster that answers here.

    A site is known by its ClusterName. If no site has this name, a site whose name no source confirms is known by its
    partitions, features and login nodes, if its profiles fit.

    Args:
        limits: the answers of Slurm.
        discovered: keys of the discovered hardware files, for the comparison.
    """
    by_cluster: dict[str, list[Profile]] = {}
    for profile in read_profiles():
        if profile.cluster is not None:
            by_cluster.setdefault(profile.cluster, []).append(profile)
    sites = {cluster: site_of(read_cluster(cluster)) for cluster in by_cluster}
    here = (limits.cluster or "").lower()
    ours = [cluster for cluster, site in sites.items() if here and (site["slurm_cluster"] or "").lower() == here]
    if ours:
        named = [profile for cluster in ours for profile in by_cluster[cluster]]
        return [*_compared(named, limits, discovered, "name")]
    found = []
    for cluster, site in sites.items():
        is_confirmed = site["slurm_cluster"] and "slurm_cluster" not in site["unverified"]
        if not is_confirmed and _looks_like(site, by_cluster[cluster], limits):
            compared = [*_compared(by_cluster[cluster], limits, discovered, "nodes")]
            found += compared if all(profile.is_fit for profile in compared) else []
    return found


def _compared(
    profiles: Sequence[Profile], limits: Limits, discovered: Sequence[Mapping[str, Any]], found_by: str
) -> Iterator[Shipped]:
    names = [profile.name for profile in profiles]
    for name, config in zip(names, compose_profiles(names), strict=True):
        yield Shipped(
            name=name,
            lines=tuple(line for line in check_lines(config, limits) if line.verdict != OK),
            differences=tuple(_differences(config.hardware, limits, discovered)),
            found_by=found_by,
        )


def _looks_like(site: Mapping[str, Any], profiles: Sequence[Profile], limits: Limits) -> bool:
    """Return True if all partitions and features of a site's files are here, and there are two or it is its login node.

    One name alone proves little: many clusters have a partition `gpu`.
    """
    partitions = {limit["partition"] for limit in site["time_limits"] if limit.get("partition")}
    partitions |= {name for profile in profiles for name in (profile["partition"] or "").split(",") if name}
    features = {word for profile in profiles for word in re.findall(r"[\w.:-]+", profile["constraint"] or "")}
    present = {feature for group in limits.nodes for feature in group.features}
    is_login_node = site["login_hosts"] is not None and fnmatch.fnmatch(socket.gethostname(), site["login_hosts"])
    has_all = partitions <= limits.partitions.keys() and features <= present
    return has_all and (len(partitions | features) > 1 or is_login_node)


def _differences(hardware: HardwareConfig, limits: Limits, discovered: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield figures of a profile that differ from those of the discovered file with the same partition and GPUs."""
    partition = limits.partition_of(hardware.partition)
    for values in discovered:
        other = HardwareConfig(**values)
        same = (hardware.gpus_per_node, hardware.ranks_per_node) == (other.gpus_per_node, other.ranks_per_node)
        if not same or partition is None or other.partition != partition.name:
            continue
        if hardware.cpus_per_rank != other.cpus_per_rank:
            yield f"{hardware.cpus_per_rank} CPUs a rank, Slurm has {other.cpus_per_rank}"
        if hardware.gpus_per_node and (hardware.gpu_type or other.gpu_type) != other.gpu_type:
            yield f"gpu_type {hardware.gpu_type}, Slurm has {other.gpu_type or 'GPUs without a type'}"
        if hardware.mem_gb_per_gpu is not None and hardware.mem_gb_per_gpu != other.mem_gb_per_gpu:
            yield f"{hardware.mem_gb_per_gpu:g} GB a GPU, Slurm has {other.mem_gb_per_gpu or 0:g}"
        if hardware.time_limit_min != other.time_limit_min:
            yield f"{hardware.time_limit_min} min, the discovered file has {other.time_limit_min}"
        return


# --- the job ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurement by the ranks of a job; `ranks` has the record of each rank that wrote one, in order."""

    ranks: tuple[Mapping[str, Any], ...]
    world_size: int
    login_clock_s: float | None
    filesystem: str

    @property
    def nodes(self) -> list[str]:
        """Names of the nodes, in the order of their first ranks."""
        return list(dict.fromkeys(rank["node"] for rank in self.ranks))

    def clock_offset_s(self, node: str) -> float | None:
        """Return by how much a node's clock is ahead of the login node's; None if unknown."""
        stamps = [rank["clock_s"] for rank in self.ranks if rank["node"] == node and rank.get("clock_s") is not None]
        if not stamps or self.login_clock_s is None:
            return None
        return float(statistics.median(stamps)) - self.login_clock_s

    def to_json(self) -> dict[str, Any]:
        """Return the document that is printed and kept."""
        reduce = {
            scope: {
                "ranks": max(own["ranks"] for own in reductions),
                "latency_s": max(own["latency_s"] for own in reductions),
                "bus_bytes_per_s": min(own["bus_bps"] for own in reductions),
            }
            for scope in ("node", "across", "all")
            if (reductions := [rank[f"reduce_{scope}"] for rank in self.ranks if f"reduce_{scope}" in rank])
        }
        writes = [rank["write_bps"] for rank in self.ranks if rank.get("write_bps") is not None]
        internet = [rank["internet"] for rank in self.ranks if "internet" in rank]
        return {
            "world_size": self.world_size,
            "ranks": [
                {
                    "rank": rank["rank"], "node": rank["node"], "gpu": rank.get("gpu"),
                    "gpu_uuid": rank.get("gpu_uuid"), "gpu_numa": rank.get("gpu_numa"), "cpus": rank["cpus"],
                    "numa": rank["numa"], "machine": rank["machine"], "torch": rank.get("torch"),
                    "import_s": rank.get("import_s"), "is_whole": bool(rank.get("is_whole")),
                }
                for rank in self.ranks
            ],
            "all_reduce": reduce,
            "rendezvous_s": max((rank["rendezvous_s"] for rank in self.ranks if "rendezvous_s" in rank), default=None),
            "filesystem": self.filesystem,
            "write_bytes_per_s": {"slowest_node": min(writes), "sum": sum(writes)} if writes else None,
            "clock_offset_s": {node: self.clock_offset_s(node) for node in self.nodes},
            "has_internet": all(internet) if internet else None,
        }  # fmt: skip


def read_ranks(folder: Path, world_size: int) -> tuple[dict[str, Any], ...]:
    """Return the records that ranks wrote below a run's folder, in the order of ranks."""
    records = (read_json(folder / f"rank-{rank}.json") for rank in range(world_size))
    return tuple(record for record in records if record is not None)


_CLOCK_S = 2.0


def measured_lines(measured: Measured, shape: Shape, *, is_gpu: bool) -> Iterator[Line]:
    """Yield a line for each measured figure, with the fix if the figure is bad."""
    whole = sum(bool(rank.get("is_whole")) for rank in measured.ranks)
    yield Line(
        key="ranks", asked=f"{measured.world_size}", cluster=f"{whole} ended", fix="" if whole == measured.world_size
        else "Read why with the logs of the job, named below.",
        verdict=OK if whole == measured.world_size else WRONG,
    )  # fmt: skip
    by_node = {node: [rank for rank in measured.ranks if rank["node"] == node] for node in measured.nodes}
    if is_gpu:
        yield _gpu_line(by_node)
        yield from _numa_line(measured.ranks)
    yield _cpu_line(by_node, shape)
    offsets = [offset for node in by_node if (offset := measured.clock_offset_s(node)) is not None]
    if offsets:
        worst = max(offsets, key=abs)
        yield Line(
            key="clocks", asked=f"within {_CLOCK_S:g} s of the login node", cluster=f"{worst:+.3f} s at most",
            verdict=OK if abs(worst) <= _CLOCK_S else WRONG,
            fix="" if abs(worst) <= _CLOCK_S else "Tell the site: a node's clock is wrong (chronyc tracking).",
        )  # fmt: skip
    tried = [rank["internet"] for rank in measured.ranks if "internet" in rank]
    if tried:
        yield Line(
            key="internet", asked="", cluster="yes" if all(tried) else "no", verdict=OK if all(tried) else NOTE,
            fix="" if all(tried) else "Fetch models and data on the login node; set HF_HUB_OFFLINE=1 in cluster.env.",
        )  # fmt: skip


def _gpu_line(by_node: Mapping[str, Sequence[Mapping[str, Any]]]) -> Line:
    problems = []
    for node, ranks in by_node.items():
        uuids = [rank["gpu_uuid"] for rank in ranks if rank.get("gpu_uuid")]
        missing = [rank for rank in ranks if rank.get("gpu_problem")]
        if missing:
            problem = f"rank {missing[0]['rank']} on {node}: {missing[0]['gpu_problem']}"
            problems.append(f"{problem}. Install torch for this GPU and driver.")
        elif len(set(uuids)) < len(uuids):
            problems.append(f"two ranks on {node} have one GPU. See cluster.srun_args (--gpu-bind, --gpus-per-task).")
    names = sorted({rank["gpu"] for ranks in by_node.values() for rank in ranks if rank.get("gpu")})
    return Line(
        key="GPUs", asked="one each", cluster=", ".join(names) or "none", verdict=WRONG if problems else OK,
        fix=problems[0] if problems else "",
    )  # fmt: skip


def _numa_line(ranks: Sequence[Mapping[str, Any]]) -> Iterator[Line]:
    far = [rank for rank in ranks if rank.get("gpu_numa") is not None and rank["gpu_numa"] not in rank["numa"]]
    if far:
        yield Line(
            key="NUMA", asked="CPUs beside the GPU", cluster=f"{len(far)} ranks have theirs elsewhere", verdict=NOTE,
            fix=f"Rank {far[0]['rank']} has CPUs of NUMA {far[0]['numa']}, its GPU is at {far[0]['gpu_numa']}. "
            "cluster.srun_args may bind: --gpu-bind=closest, --cpu-bind=map_ldom:...",
        )  # fmt: skip


def _cpu_line(by_node: Mapping[str, Sequence[Mapping[str, Any]]], shape: Shape) -> Line:
    counts = [len(rank["cpus"]) for ranks in by_node.values() for rank in ranks]
    few = min(counts, default=0)
    shared = any(
        set(one["cpus"]) & set(other["cpus"])
        for ranks in by_node.values()
        for index, one in enumerate(ranks)
        for other in ranks[:index]
    )
    counts_text = f"{few} to {max(counts, default=0)}" + (", shared between ranks" if shared else "")
    line = Line(key="CPUs", asked=f"{shape.cpus_per_task} each, bound", cluster=counts_text, verdict=OK)
    if few < shape.cpus_per_task and not shared:
        fix = "Ranks have fewer CPUs than the profile asks. Look at cluster.srun_args (--cpu-bind, --cpus-per-task)."
        return dataclasses.replace(line, verdict=WRONG, fix=fix)
    if shared:
        fix = "Slurm does not bind ranks to CPUs of their own here. Try cluster.srun_args=[--cpu-bind=cores]."
        return dataclasses.replace(line, verdict=NOTE, fix=fix)
    return line
