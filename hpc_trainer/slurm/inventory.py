"""Inventory of a cluster: its limits with more about each kind of node than a plan needs, in four calls of Slurm.

A plan reads `Limits` leniently: an unreadable value breaks no rule. Here the answers become a profile, so an answer
that is cut off is an error.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator

from hpc_trainer.errors import UnclearError
from hpc_trainer.slurm.commands import parse_cluster_name, parse_nodes, run_slurm, user_name
from hpc_trainer.slurm.limits import TIMEOUT_S, Limits, NodeGroup, ask_limits, parse_gpus, parse_limits

_SINFO_FORMAT = "%R|%D|%c|%m|%G|%f|%z|%T|%N"
_NUM_COLUMNS = 9
# Kinds of nodes whose details are asked, in one call; no site that was looked at has more.
_MOST_EXAMPLES = 64
# States of nodes that start no job today (sinfo(1), NODE STATE CODES); maintenance and power saving end by themselves.
OUT_OF_SERVICE = frozenset(
    {"drained", "draining", "drain", "down", "fail", "failing", "error", "inval", "unknown", "no_respond", "perfctrs"}
)
_NOT_THERE_YET = "future"


def read_inventory() -> Limits:
    """Ask the cluster for its limits and for details of its nodes: two scontrol, one sinfo, and one sacctmgr at most.

    Raises:
        SlurmError: scontrol or sinfo does not answer.
        UnclearError: an answer is cut off.
    """
    user = user_name()
    controller, accounting, notes = ask_limits(user)
    sinfo = run_slurm(["sinfo", "-h", "-a", "-e", "-o", _SINFO_FORMAT], timeout_s=TIMEOUT_S)
    check_whole(controller, accounting, sinfo)
    groups = list(parse_groups(sinfo))
    examples = list(dict.fromkeys(group.example for group in groups))[:_MOST_EXAMPLES]
    asked = "".join(f"show node {name}\n" for name in examples)
    shown = run_slurm(["scontrol", "-a", "-o"], script=asked, timeout_s=TIMEOUT_S) if examples else ""
    limits = parse_limits(controller, accounting=accounting, user=user)
    for name, partition in limits.partitions.items():
        num_shown = sum(group.num_nodes for group in groups if group.partition == name)
        if 0 < num_shown < (partition.total_nodes or 0):  # the site hides nodes (PrivateData), or sinfo was cut off
            notes.append(f"sinfo shows {num_shown} of the {partition.total_nodes} nodes of partition {name}")
    there = [group for group in groups if group.state != _NOT_THERE_YET]
    return dataclasses.replace(limits, nodes=tuple(with_details(there, shown)), notes=tuple(notes))


def check_whole(controller: str, accounting: str, sinfo: str) -> None:
    """Raise an error if an answer ends in the middle.

    Raises:
        UnclearError: the answer of scontrol, sacctmgr or sinfo is cut off.
    """
    problems = [*_cut_off(controller, "scontrol", 3), *_cut_off(accounting, "sacctmgr", 2)]
    if parse_cluster_name(controller) is None:
        problems.append("scontrol show config names no ClusterName")
    records = [line for line in controller.splitlines(keepends=True) if line.startswith("PartitionName=")]
    if not records:
        problems.append("scontrol show partition lists no partition")
    problems += [
        f"scontrol ends within `{line.split()[0]}`"
        for line in records
        if " State=" not in line or not line.endswith("\n")
    ]
    problems += [
        f"sinfo ends within `{line.strip()[:60]}`"
        for line in sinfo.splitlines(keepends=True)
        if line.count("|") != _NUM_COLUMNS - 1 or not line.endswith("\n")
    ]
    if problems:
        raise UnclearError(f"an answer of Slurm is cut off: {problems[0]}. Run the same command again.")


def _cut_off(text: str, command: str, num_requests: int) -> Iterator[str]:
    """Yield a problem if a command that prompts for each request did not also prompt for another one at the end."""
    prompt = f"{command}:"
    num_prompts = len(re.findall(rf"^{prompt}", text, re.MULTILINE))
    is_begun = text and prompt.startswith(text)
    if is_begun or (num_prompts and (num_prompts <= num_requests or not text.rstrip().endswith(prompt))):
        yield f"{command} ends within `{text.rstrip().splitlines()[-1][:60]}`"


def parse_groups(sinfo: str) -> Iterator[NodeGroup]:
    """Yield the groups of equal nodes in sinfo's answer."""
    for line in sinfo.splitlines():
        partition, count, cpus, memory, gres, features, layout, state, names = line.split("|")
        numbers = [int(match[0]) if (match := re.match(r"\d+", text)) else 0 for text in (count, cpus, memory)]
        state = re.split(r"[^a-z_]", state.lower())[0]  # marks such as `idle~` follow the word
        sockets, cores, threads = [int(number) for number in (*re.findall(r"\d+", layout), 1, 1, 1)][:3]
        counts_threads = threads > 1 and numbers[1] == sockets * cores * threads
        yield NodeGroup(
            partition=partition,
            num_nodes=numbers[0],
            cpus=numbers[1],
            memory_mb=numbers[2],
            gpus=parse_gpus(gres),
            features=frozenset(filter(None, features.replace("(null)", "").split(","))),
            sockets=sockets,
            threads_per_core=threads if counts_threads else 1,
            state=state,
            example=first_host(names),
        )


def first_host(names: str) -> str:
    """Return the first name of a host list: `gpu[007-009,12],n1` gives `gpu007`."""
    first = re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", names)
    return first.split(",")[0]


def with_details(groups: Iterable[NodeGroup], shown: str) -> Iterator[NodeGroup]:
    """Yield each group with the facts that `scontrol show node` reports about its example.

    CPUs and memory that the site reserves (CPUEfctv, MemSpecLimit) are not counted.
    """
    nodes = {node.name: node for node in parse_nodes(shown)}
    for group in groups:
        node = nodes.get(group.example)
        if node is None:
            yield group
            continue
        kept_mb = node.kept_memory_mb if node.kept_memory_mb < group.memory_mb else 0
        yield dataclasses.replace(
            group,
            cpus=node.usable_cpus or group.cpus,
            memory_mb=group.memory_mb - kept_mb,
            architecture=node.architecture or "",
        )
