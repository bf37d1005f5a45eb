"""Shapes against a cluster: every limit is named with its value and the nearest legal choice."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hpc_trainer.slurm.limits import Association, Limits, NodeGroup, Partition
from hpc_trainer.slurm.shape import Shape, find_shape_problems, longest_limit, mem_mb_per_node, signal_lead_s

SHAPE = Shape(
    num_nodes=1, tasks_per_node=4, gpus_per_node=4, cpus_per_task=8, mem_gb_per_node=None, mem_gb_per_gpu=None,
    mem_gb_per_cpu=None, gpu_type=None, partition=None, qos=None, constraint=None, exclude=None, account=None,
    time_limit_min=60, signal_lead_s=120,
)  # fmt: skip
GPU = Partition(name="gpu", is_default=True, max_time_min=1440, max_nodes=3, allow_accounts=("lab", "other"))
LONG = Partition(name="long", max_time_min=None, max_mem_per_node_mb=100_000, max_cpus_per_node=40, deny_qos=("fast",))
NODES = (
    NodeGroup(partition="gpu", num_nodes=2, cpus=64, memory_mb=512_000, gpus={"a100": 4}, features=frozenset({"ib"})),
    NodeGroup(partition="gpu", num_nodes=5, cpus=32, memory_mb=256_000, gpus={"v100": 8}, features=frozenset({"eth"})),
    NodeGroup(partition="long", num_nodes=9, cpus=48, memory_mb=190_000, gpus={}, features=frozenset()),
)
LIMITS = Limits(
    partitions={"gpu": GPU, "long": LONG},
    nodes=NODES,
    enforced=frozenset({"associations", "limits", "qos"}),
    associations=(
        Association(account="lab", qos=("normal", "fast"), is_default=True),
        Association(account="poor", qos=("normal",)),
    ),
    qos_max_time_min={"normal": None, "fast": 30},
)


def _problems(limits: Limits = LIMITS, **changes: Any) -> list[str]:
    return find_shape_problems(dataclasses.replace(SHAPE, **changes), "mine", limits)


def test_what_fits_has_no_problem() -> None:
    assert _problems() == []
    assert _problems(gpu_type="v100", gpus_per_node=8, tasks_per_node=8, cpus_per_task=4, num_nodes=3) == []
    assert _problems(partition="long", gpus_per_node=0, tasks_per_node=1, time_limit_min=99_999) == []
    assert _problems(constraint="ib|eth") == []
    assert _problems(constraint="[ib*2&eth*1]") == [], "left to Slurm"


def test_another_partition_is_named_only_against_the_limit_of_a_partition() -> None:
    (of_qos,) = _problems(qos="fast")
    assert "must be at most 30, the" in of_qos
    assert "Or a partition" not in of_qos
    (of_partition,) = _problems(time_limit_min=2000)
    assert of_partition.count("Or a partition that allows more: long.") == 1


def test_the_account_of_a_fix_may_use_the_partition() -> None:
    """A partition that denies an account has no list of those that it allows."""
    for partition in (
        dataclasses.replace(GPU, allow_accounts=None, deny_accounts=("lab",)),
        dataclasses.replace(GPU, allow_accounts=("poor",)),
    ):
        limits = dataclasses.replace(LIMITS, partitions={"gpu": partition})
        assert _problems(limits) == [
            "cluster.account=lab may not use partition gpu. Use cluster.account=poor. (hardware=mine)"
        ]
    alone = dataclasses.replace(limits, associations=LIMITS.associations[:1])
    assert _problems(alone) == ["cluster.account=lab may not use partition gpu. Use another partition. (hardware=mine)"]


def test_nothing_known_is_no_problem() -> None:
    assert _problems(Limits(), partition="x", account="y", qos="z", time_limit_min=10**6, num_nodes=99) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"partition": "gqu"}, ["hardware.partition=gqu", "Did you mean gpu?"]),
        ({"account": "labb"}, ["cluster.account=labb", "no such account", "Did you mean lab?"]),
        ({"account": "poor"}, ["cluster.account=poor may not use partition gpu", "cluster.account=lab"]),
        ({"qos": "fats"}, ["hardware.qos=fats", "fats is not among your QOS", "Did you mean fast?"]),
        (
            {"qos": "fast", "time_limit_min": 20, "partition": "long", "gpus_per_node": 0},
            ["hardware.qos=fast may not use partition long"],
        ),
        ({"qos": "fast"}, ["time_limit_min=60 must be at most 30, the MaxWall of QOS fast"]),
        ({"time_limit_min": 1441}, ["at most 1440, the MaxTime of partition gpu", "allows more: long"]),
        ({"num_nodes": 4}, ["hardware.num_nodes=4 must be at most 3, the MaxNodes of partition gpu"]),
        ({"num_nodes": 3, "gpu_type": "a100"}, ["hardware.num_nodes=3 must be at most 2: only that many nodes"]),
        ({"gpu_type": "h100"}, ["hardware.gpu_type=h100: no node in partition gpu", "There are: a100, v100"]),
        ({"partition": "long"}, ["hardware.gpus_per_node=4: no node in partition long", "none"]),
        ({"gpus_per_node": 9, "tasks_per_node": 9}, ["gpus_per_node=9 must be at most 8", "hardware.num_nodes=2"]),
        ({"cpus_per_task": 17}, ["4 rank(s) × 17 CPUs = 68", "at most 64", "hardware.cpus_per_gpu=16"]),
        (
            {"partition": "long", "gpus_per_node": 0, "tasks_per_node": 1, "cpus_per_task": 41},
            ["at most 40, the MaxCPUsPerNode of partition long", "hardware.cpus_per_task=40"],
        ),
        ({"mem_gb_per_node": 501.0}, ["mem_gb_per_node=501 asks 513024 MB", "at most 512000", "mem_gb_per_node=500"]),
        ({"mem_gb_per_gpu": 200.0}, ["mem_gb_per_gpu=200 asks 819200 MB", "hardware.mem_gb_per_gpu=125"]),
        ({"mem_gb_per_cpu": 20.0}, ["mem_gb_per_cpu=20", "hardware.mem_gb_per_cpu=15.62"]),
        (
            {"partition": "long", "gpus_per_node": 0, "mem_gb_per_node": 98.0},
            ["at most 100000 MB, the MaxMemPerNode of long", "hardware.mem_gb_per_node=97.65"],
        ),
        ({"constraint": "infiniband"}, ["no node in partition gpu has the feature infiniband", "eth, ib"]),
        ({"constraint": "ib&eth"}, ["constraint=ib&eth: no node in partition gpu has all of them"]),
    ],
)
def test_each_limit_is_named_with_the_nearest_legal_value(changes: dict[str, Any], words: list[str]) -> None:
    (problem,) = _problems(**changes)
    for word in (*words, "(hardware=mine)"):
        assert word in problem, problem


@pytest.mark.parametrize(
    "changes",
    [
        {"time_limit_min": 1440},
        {"num_nodes": 3, "gpu_type": "v100"},
        {"num_nodes": 2, "gpu_type": "a100"},
        {"qos": "fast", "time_limit_min": 30},
        {"cpus_per_task": 16},
        {"partition": "long", "gpus_per_node": 0, "tasks_per_node": 1, "cpus_per_task": 40},
        {"partition": "long", "gpus_per_node": 0, "mem_gb_per_node": 100_000 / 1024},
        {"partition": "long", "gpus_per_node": 0, "num_nodes": 9},
        {"mem_gb_per_node": 500.0},
        {"mem_gb_per_gpu": 125.0},
        {"gpus_per_node": 8, "tasks_per_node": 8, "cpus_per_task": 4},
    ],
)
def test_a_request_of_exactly_the_limit_has_no_problem(changes: dict[str, Any]) -> None:
    assert _problems(**changes) == []


def test_a_node_must_have_all_that_is_asked_for_at_once() -> None:
    """Each rule looks only at nodes that fulfil the rules before it."""
    assert _problems(cpus_per_task=16, num_nodes=3) == [
        "hardware.num_nodes=3 must be at most 2: only that many nodes in partition gpu have what it requests. "
        "Use hardware.num_nodes=2. (hardware=mine)"
    ]
    assert _problems(mem_gb_per_node=300.0, num_nodes=3) == _problems(cpus_per_task=16, num_nodes=3)
    (cpus,) = _problems(constraint="eth", cpus_per_task=9)
    assert "4 rank(s) × 9 CPUs = 36 CPUs a node; it must be at most 32, the CPUs of a node in partition gpu" in cpus
    (memory,) = _problems(gpu_type="v100", mem_gb_per_node=251.0)
    assert "asks 257024 MB of a node; it must be at most 256000 MB" in memory
    (cores,) = _problems(partition="long", gpus_per_node=0, tasks_per_node=8, cpus_per_task=6)
    assert "8 rank(s) × 6 CPUs = 48 CPUs a node; it must be at most 40" in cores
    assert "Use hardware.cpus_per_task=5." in cores


def test_ranks_of_one_task_share_its_cores() -> None:
    (problem,) = _problems(tasks_per_node=1, ranks_per_task=4, cpus_per_task=68)
    assert "4 rank(s) × 17 CPUs = 68 CPUs a node; it must be at most 64" in problem
    assert "Use hardware.cpus_per_gpu=16." in problem
    (more_ranks,) = _problems(tasks_per_node=65, cpus_per_task=1)
    assert "Use hardware.cpus_per_gpu=1." in more_ranks, "never 0"


def test_gpus_that_are_not_asked_from_slurm_are_not_looked_for() -> None:
    assert _problems(partition="long", gpu_request="none") == []
    untyped = dataclasses.replace(
        LIMITS, nodes=(dataclasses.replace(NODES[0], gpus={"gpu": 4}), dataclasses.replace(NODES[2], partition="gpu"))
    )
    assert _problems(untyped) == []
    (problem,) = _problems(untyped, gpu_type="h100")
    assert problem == "hardware.gpu_type=h100: no node in partition gpu has such GPUs. There are: gpu. (hardware=mine)"
    without = dataclasses.replace(LIMITS, nodes=(dataclasses.replace(NODES[2], partition="gpu"),))
    assert _problems(without, gpu_type="h100") == [
        "hardware.gpu_type=h100: no node in partition gpu has such GPUs. GPUs there: none. (hardware=mine)"
    ]


def test_nodes_are_a_bound_where_all_of_them_show() -> None:
    for total, bound in ((7, True), (8, False), (6, True), (None, True)):
        partitions = {"gpu": dataclasses.replace(GPU, max_nodes=None, total_nodes=total)}
        problems = _problems(dataclasses.replace(LIMITS, partitions=partitions), num_nodes=8)
        assert bool(problems) is bound, total


def test_an_account_is_judged_only_where_slurm_enforces_associations() -> None:
    free = dataclasses.replace(LIMITS, enforced=frozenset())
    assert _problems(free, account="labb", partition="long", gpus_per_node=0) == []
    assert _problems(free, qos="unknown") == []
    assert "has no such" in _problems(free, partition="nope")[0]


def test_what_is_proposed_is_accepted() -> None:
    for changes in ({"mem_gb_per_node": 500.0}, {"mem_gb_per_gpu": 125.0}, {"mem_gb_per_cpu": 15.62}):
        assert _problems(**changes) == []
    assert _problems(partition="long", gpus_per_node=0, mem_gb_per_node=97.65) == []


def test_several_limits_at_once_are_all_named() -> None:
    assert len(_problems(time_limit_min=2000, num_nodes=4, account="poor")) == 3


def test_no_default_partition_is_said() -> None:
    limits = dataclasses.replace(LIMITS, partitions={"long": LONG})
    (problem,) = _problems(limits)
    assert "no default partition. Set one of: long" in problem


def test_of_several_partitions_one_that_can_is_enough() -> None:
    assert _problems(partition="gpu,long", gpus_per_node=0, time_limit_min=2000) == []
    (problem,) = _problems(partition="gpu,lonk", time_limit_min=2000)
    assert "hardware.partition=lonk" in problem


def test_what_a_site_may_accept_is_not_refused() -> None:
    """Refusing what Slurm would take is worse than asking Slurm."""
    assert _problems(qos="normal,fast", time_limit_min=20) == [], "several QOS, Slurm 24.11 and later"
    assert _problems(account="LAB") == [], "slurmdbd keeps account names in lower case"
    below = dataclasses.replace(LIMITS, parents={"poor": "lab"})
    assert _problems(below, account="poor") == [], "an account that is allowed allows those below it"
    lifted = dataclasses.replace(LIMITS, qos_flags={"normal": frozenset({"PartitionTimeLimit"})})
    assert _problems(lifted, qos="normal", time_limit_min=2000) == []
    cloud = dataclasses.replace(LIMITS, partitions={"gpu": dataclasses.replace(GPU, total_nodes=99, max_nodes=None)})
    assert _problems(cloud, num_nodes=50) == [], "powered-down nodes do not show"
    silent = dataclasses.replace(LIMITS, nodes=tuple(dataclasses.replace(node, memory_mb=1) for node in NODES))
    assert _problems(silent, mem_gb_per_node=64.0) == [], "slurm.conf without RealMemory"


def test_a_partition_may_allow_some_qos_only() -> None:
    strict = dataclasses.replace(LIMITS, partitions={"gpu": dataclasses.replace(GPU, allow_qos=("normal",))})
    (problem,) = _problems(strict, qos="fast", time_limit_min=20)
    assert problem.startswith("hardware.qos=fast may not use partition gpu. Use normal.")
    assert _problems(strict, qos="normal") == _problems(strict, qos="normal,fast", time_limit_min=20) == []


def test_accounts_above_go_up_to_the_root() -> None:
    limits = dataclasses.replace(LIMITS, parents={"team": "lab", "lab": "faculty", "faculty": "root"})
    assert limits.accounts_above("team") == ["team", "lab", "faculty", "root"]


def test_a_guessed_qos_refuses_nothing() -> None:
    two = Association(account="lab", qos=("normal", "fast"), is_default=True)
    guess = dataclasses.replace(LIMITS, associations=(two,), qos_max_time_min={"normal": 5, "fast": 5})
    assert _problems(guess) == []
    one = dataclasses.replace(guess, associations=(dataclasses.replace(two, default_qos="fast"),))
    assert "MaxWall of QOS fast" in _problems(one)[0]


def test_the_longest_time_limit_is_that_of_the_partition_or_the_qos() -> None:
    def longest(**changes: Any) -> tuple[int, str] | None:
        return longest_limit(dataclasses.replace(SHAPE, **changes), LIMITS)

    assert longest() == (1440, "MaxTime of partition gpu")
    assert longest(qos="fast") == (30, "MaxWall of QOS fast")
    assert longest(partition="long") is longest(partition="gpu,long") is None, "Slurm takes the one that can"
    assert longest_limit(SHAPE, Limits()) is None
    shorter = dataclasses.replace(LIMITS, partitions={"gpu": GPU, "short": Partition(name="short", max_time_min=10)})
    several = dataclasses.replace(SHAPE, partition="gpu,short")
    assert longest_limit(several, shorter) == (1440, "MaxTime of partition gpu"), "Slurm takes the one that can"


@pytest.mark.parametrize(
    ("minutes", "seconds"), [(1, 15), (4, 60), (7, 105), (8, 120), (9, 120), (60, 120), (10**6, 120)]
)
def test_slurm_warns_after_three_quarters_of_a_short_job_and_two_minutes_before_the_end_of_a_long_one(
    minutes: int, seconds: int
) -> None:
    assert signal_lead_s(minutes) == seconds
    assert signal_lead_s(minutes, 300) == 300


@pytest.mark.parametrize(
    ("memory", "megabytes"),
    [
        ({}, None), ({"mem_gb_per_node": 1.5}, 1536), ({"mem_gb_per_gpu": 10.0}, 40_960),
        ({"mem_gb_per_cpu": 0.5}, 16_384),
    ],
)  # fmt: skip
def test_memory_of_a_node(memory: dict[str, float], megabytes: int | None) -> None:
    assert mem_mb_per_node(dataclasses.replace(SHAPE, **memory)) == megabytes  # type: ignore[arg-type]


def test_ranks_and_gpu_hours_of_a_shape() -> None:
    shape = dataclasses.replace(SHAPE, num_nodes=3, tasks_per_node=2, ranks_per_task=4, time_limit_min=90)
    assert (shape.ranks_per_node, shape.world_size, shape.gpu_hours) == (8, 24, 18.0)


def test_the_limit_of_a_partitions_qos_counts_before_the_jobs_own() -> None:
    """Slurm 22.05 keeps a job that exceeds these limits pending for ever (QOSMaxWallDurationPerJobLimit)."""
    gpu = dataclasses.replace(GPU, qos="of_gpu")
    limits = dataclasses.replace(
        LIMITS,
        partitions={"gpu": gpu, "long": dataclasses.replace(LONG, qos="of_gpu"), "other": Partition(name="other")},
        qos_max_time_min={"normal": None, "fast": 30, "over": 90, "of_gpu": 50},
        qos_flags={name: frozenset({"OverPartQOS"}) for name in ("over", "unlimited")},
    )

    def longest(qos: str | None) -> tuple[int, str] | None:
        return longest_limit(dataclasses.replace(SHAPE, qos=qos), limits)

    of_partition = (50, "MaxWall of QOS of_gpu, which partition gpu has")
    assert longest(None) == longest("fast") == longest("unlimited") == of_partition
    assert longest("over") == (90, "MaxWall of QOS over")
    (problem,) = _problems(limits)
    assert "time_limit_min=60 must be at most 50, the MaxWall of QOS of_gpu, which partition gpu has." in problem
    assert problem.endswith("Or a partition that allows more: other. (hardware=mine)")
    own = dataclasses.replace(LIMITS.associations[0], max_time_min=20)
    capped = dataclasses.replace(limits, associations=(own,))
    assert longest_limit(SHAPE, capped) == of_partition, "a limit of a QOS replaces the association's"
    none_of_qos = dataclasses.replace(capped, qos_max_time_min={})
    assert longest_limit(SHAPE, none_of_qos) == (20, "MaxWall of account lab")
    guess = dataclasses.replace(none_of_qos, qos_max_time_min={"normal": 90})
    assert longest_limit(SHAPE, guess) == (1440, "MaxTime of partition gpu"), "Slurm takes the QOS normal"
    without = dataclasses.replace(limits, qos_max_time_min={"fast": 30})
    assert longest_limit(dataclasses.replace(SHAPE, qos="fast"), without) == (30, "MaxWall of QOS fast")
