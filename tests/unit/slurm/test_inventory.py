"""Inventory of a cluster: the groups of sinfo, the facts of scontrol about a node, and answers that are cut off."""

from __future__ import annotations

import pytest

from hpc_trainer.errors import UnclearError
from hpc_trainer.slurm import inventory
from hpc_trainer.slurm.inventory import check_whole, first_host, parse_groups, read_inventory, with_details
from hpc_trainer.slurm.limits import NodeGroup
from tests.unit.slurm.fake_slurm import FakeSlurm

PARTITIONS = "PartitionName=main TotalNodes=3 State=UP\nPartitionName=test TotalNodes=1 State=UP\n"
WHOLE = f"ClusterName = lab\n{PARTITIONS}"
PROMPTED = f"scontrol: show config\nClusterName = lab\nscontrol: show partition\n{PARTITIONS}scontrol: show assoc_mgr\n"
GPU = "main|2|64|512000|gpu:a100:4(S:0-1)|big,ib|2:16:2|idle~|gpu[007-009,12],n1\n"
CPU = "main|1|8+|16000+|(null)|(null)|2:4:1|MIXED|n3\n"


def _group(**changes: object) -> NodeGroup:
    values: dict[str, object] = {
        "partition": "main", "num_nodes": 2, "cpus": 64, "memory_mb": 512000, "gpus": {"a100": 4},
        "features": frozenset({"big", "ib"}), "sockets": 2, "threads_per_core": 2, "state": "idle", "example": "gpu007",
    }  # fmt: skip
    return NodeGroup(**(values | changes))  # type: ignore[arg-type]


CPU_GROUP = _group(
    num_nodes=1, cpus=8, memory_mb=16000, gpus={}, features=frozenset(), threads_per_core=1, state="mixed", example="n3"
)


def test_groups_of_nodes_are_read_letter_by_letter() -> None:
    assert list(parse_groups(GPU + CPU)) == [_group(), CPU_GROUP]


@pytest.mark.parametrize(
    ("line", "group"),
    [
        # A CPU is a core, though the hardware has two threads of each.
        ("main|2|32|512000|gpu:a100:4|big,ib|2:16:2|idle|gpu007", _group(cpus=32, threads_per_core=1)),
        ("main|2|63|512000|gpu:a100:4|big,ib|2:16:2|idle|gpu007", _group(cpus=63, threads_per_core=1)),
        ("main|2|64|512000|gpu:a100:4|big,ib|4:16:1|idle|gpu007", _group(sockets=4, threads_per_core=1)),
        ("main|2|64|512000|gpu:a100:4|big,ib|n/a|idle|gpu007", _group(sockets=1, threads_per_core=1)),
        ("main|2|64|512000|gpu:a100:4|big,ib|2|idle|gpu007", _group(sockets=2, threads_per_core=1)),
        ("main|n/a|64|512000|gpu:a100:4|big,ib|2:16:2|no_respond*|gpu007", _group(num_nodes=0, state="no_respond")),
    ],
)
def test_what_a_layout_says(line: str, group: NodeGroup) -> None:
    assert list(parse_groups(line)) == [group]


@pytest.mark.parametrize(
    ("names", "first"),
    [("gpu[007-009,12],n1", "gpu007"), ("n1", "n1"), ("n[3,5]", "n3"), ("n2,n3", "n2"), ("a[1-2]b[01-02],c", "a1b01")],
)
def test_the_first_host_of_a_list(names: str, first: str) -> None:
    assert first_host(names) == first


@pytest.mark.parametrize(
    ("facts", "changes"),
    [
        ("", {}),
        (" Arch=aarch64", {"architecture": "aarch64"}),
        (" CPUEfctv=60 MemSpecLimit=12000", {"cpus": 60, "memory_mb": 500000}),
        (" CPUEfctv=0 MemSpecLimit=512000", {}),  # all of the memory is no reserve
        (" MemSpecLimit=511999", {"memory_mb": 1}),
    ],
)
def test_what_a_site_reserves_is_not_counted(facts: str, changes: dict[str, object]) -> None:
    shown = f"NodeName=gpu007 NodeHostName=gpu007{facts}\n"
    found = list(with_details([CPU_GROUP, _group(), CPU_GROUP], shown))
    assert found == [CPU_GROUP, _group(**changes), CPU_GROUP], "of the others nothing is known"


@pytest.mark.parametrize(
    ("controller", "accounting", "sinfo", "problem"),
    [
        (WHOLE, "", GPU + CPU, None),
        (f"{PROMPTED}scontrol: \n", "", GPU, None),
        (PROMPTED, "", GPU, "scontrol ends within `scontrol: show assoc_mgr`"),
        ("", "", "", "scontrol show config names no ClusterName"),
        ("scont", "", "", "scontrol ends within `scont`"),
        ("scontrol: ClusterName = lab\n", "", "", "scontrol ends within `scontrol: ClusterName = lab`"),
        ("scontrol: a\nscontrol: b\nscontrol: ", "", "", "scontrol ends within `scontrol:`"),
        ("scontrol: a\nscontrol: b\nscontrol: c\nscontrol: d", "", "", "scontrol ends within `scontrol: d`"),
        ("ClusterName = lab\n", "", GPU, "scontrol show partition lists no partition"),
        ("ClusterName = lab\nPartitionName=main TotalNodes=3\n", "", GPU, "scontrol ends within `PartitionName=main`"),
        ("ClusterName = lab\nPartitionName=main State=U", "", GPU, "scontrol ends within `PartitionName=main`"),
        (WHOLE, "sacctmgr: a\nsacctmgr: ", GPU, "sacctmgr ends within `sacctmgr:`"),
        (WHOLE, "sacctmgr: a\nsacctmgr: b\nsacctmgr: ", GPU, None),
        (WHOLE, "sacctmgr: a\nsacctmgr: b\nsacctmgr: c", GPU, "sacctmgr ends within `sacctmgr: c`"),
        (WHOLE, "", GPU + CPU[:-1], f"sinfo ends within `{CPU[:-1]}`"),
        (WHOLE, "", GPU + CPU[:20], f"sinfo ends within `{CPU[:20]}`"),
        (WHOLE, "", "a|b\n" + GPU, "sinfo ends within `a|b`"),
        (WHOLE, "", "x" * 70, f"sinfo ends within `{'x' * 60}`"),
    ],
)
def test_an_answer_that_ends_in_the_middle(controller: str, accounting: str, sinfo: str, problem: str | None) -> None:
    if problem is None:
        check_whole(controller, accounting, sinfo)
        return
    with pytest.raises(UnclearError) as error:
        check_whole(controller, accounting, sinfo)
    assert str(error.value) == f"an answer of Slurm is cut off: {problem}. Run the same command again."


def test_an_inventory_says_which_nodes_it_does_not_see(fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("scontrol", WHOLE)
    fake_slurm.answer("sinfo", GPU + GPU.replace("main", "test").replace("idle~", "future").replace("|2|64", "|1|64"))
    found = read_inventory()
    assert found.nodes == (_group(),)
    assert [note for note in found.notes if note.startswith("sinfo")] == [
        "sinfo shows 2 of the 3 nodes of partition main"
    ]


def test_a_cluster_without_visible_nodes_is_asked_about_none(fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("scontrol", WHOLE)
    fake_slurm.answer("sinfo", "")
    found = read_inventory()
    assert found.nodes == ()
    assert not any(note.startswith("sinfo") for note in found.notes)
    assert len(fake_slurm.calls("scontrol")) == 1


def test_each_kind_of_node_is_asked_once_and_no_more_than_the_most(
    fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "_MOST_EXAMPLES", 2)
    asked: list[str] = []
    real = inventory.run_slurm

    def run_slurm(words: list[str], **more: object) -> str:
        asked.append(str(more.get("script", "")))
        return real(words, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(inventory, "run_slurm", run_slurm)
    fake_slurm.answer("scontrol", WHOLE)
    fake_slurm.answer("sinfo", "".join(GPU.replace("gpu[007-009,12]", name) for name in ("a", "a", "b", "c")))
    read_inventory()
    assert asked[-1] == "show node a\nshow node b\n"
