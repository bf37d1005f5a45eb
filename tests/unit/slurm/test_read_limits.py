"""What scontrol, sacctmgr and sinfo print, read as limits; what is missing stays unknown."""

from __future__ import annotations

import dataclasses

import pytest

from hpc_trainer.errors import SlurmError
from hpc_trainer.slurm.limits import (
    Association,
    Limits,
    NodeGroup,
    Partition,
    SubmitCap,
    parse_gpus,
    parse_limits,
    parse_minutes,
    read_limits,
)
from tests.unit.slurm.fake_slurm import FakeSlurm

CONFIG = """\
scontrol: show config
Configuration data as of 2026-11-21T06:32:00
AccountingStorageEnforce = associations,limits,qos
AccountingStorageType   = accounting_storage/slurmdbd
MaxArraySize            = 1001
MaxJobCount             = 10000
SchedulerParameters     = bf_interval=1,max_array_tasks=500
Slurmctld(primary) at head is UP
"""
PARTITIONS = """\
scontrol: show partition
PartitionName=main AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL Default=YES QoS=N/A DefaultTime=01:00:00 \
MaxNodes=UNLIMITED MaxTime=1-00:00:00 MaxCPUsPerNode=UNLIMITED State=UP MaxMemPerNode=UNLIMITED
PartitionName=gpu AllowGroups=ALL AllowAccounts=lab,ml DenyQos=debug Default=NO QoS=part_gpu DefaultTime=NONE \
MaxNodes=8 MaxTime=UNLIMITED MaxCPUsPerNode=64 State=DRAIN MaxMemPerCPU=4000
"""
MANAGER = """\
scontrol: show assoc_mgr users=ann flags=assoc,qos
Association Records
ClusterName=c Account=root UserName= Partition= ID=1 ParentAccount= DefAssoc=No GrpJobs=N(2) GrpSubmitJobs=N(321) \
MaxJobs= MaxSubmitJobs=
ClusterName=c Account=lab UserName= Partition= ID=3 ParentAccount=root(1) DefAssoc=No GrpSubmitJobs=50(31) \
MaxSubmitJobs=
ClusterName=c Account=lab UserName=ann(1000) Partition= ID=4 ParentAccount= DefAssoc=Yes GrpSubmitJobs=N(3) \
MaxSubmitJobs=40(3)
ClusterName=c Account=root UserName=root(0) Partition= ID=2 ParentAccount= DefAssoc=Yes GrpSubmitJobs=N(0) \
MaxSubmitJobs=
QOS Records
QOS=normal(1) UsageRaw=0.000000 GrpSubmitJobs=N(300) MaxWallPJ= Account Limits=No Accounts User Limits=No Users
QOS=limited(2) UsageRaw=0.000000 GrpSubmitJobs=100(20) MaxWallPJ= Account Limits= lab={MaxJobsPA=N(0) \
MaxSubmitJobsPA=N(14)} User Limits= 1000={MaxJobsPU=N(0) MaxSubmitJobsPU=15(14) MaxTRESPU=cpu=N(0)}
scontrol:
"""
ACCOUNTING = """\
sacctmgr: show assoc where user=ann format=account,partition,qos,defaultqos,maxsubmit
lab||limited,normal|limited|40
ml|gpu|normal||
sacctmgr: show qos format=name,maxsubmitpu,maxsubmitpa,grpsubmit,maxwall,flags
normal|||||
limited|15||100|2-00:00:00|DenyOnLimit,PartitionTimeLimit
part_gpu|||200||
sacctmgr:
"""
NODES = """\
main|4|8|8000|gpu:a100:4|(null)
gpu|2|64+|512000|gpu:h100:8(S:0-1),nvme:1|ib,amd
gpu|1|64|512000|(null)|ib
not a node
"""  # fmt: skip


def _limits(controller: str = CONFIG + PARTITIONS + MANAGER, accounting: str = ACCOUNTING) -> Limits:
    return parse_limits(controller, accounting=accounting, nodes=NODES, user="ann")


def test_array_sizes() -> None:
    limits = _limits()
    assert (limits.max_array_size, limits.max_array_tasks, limits.max_elements) == (1001, 500, 500)
    assert parse_limits("MaxArraySize            = 21\n").max_elements == 21
    assert parse_limits("").max_elements is None


def test_exit_codes_that_the_site_requeues_are_read_with_both_ends_of_each_range() -> None:
    told = "RequeueExit             = 75,80-82\nRequeueExitHold         = 90\n"
    assert parse_limits(CONFIG + told).requeue_exit == {75, 80, 81, 82, 90}
    assert parse_limits(CONFIG + "RequeueExit             = (null)\n").requeue_exit == frozenset()


def test_partitions() -> None:
    limits = _limits()
    main, gpu = limits.partitions.values()
    assert (main.is_default, main.max_time_min, main.max_nodes, main.qos, main.allow_accounts) == (
        True, 1440, None, None, None,
    )  # fmt: skip
    assert (gpu.is_default, gpu.max_time_min, gpu.max_nodes, gpu.qos) == (
        False,
        None,
        8,
        "part_gpu",
    )
    assert (gpu.allow_accounts, gpu.deny_qos) == (("lab", "ml"), ("debug",))
    assert limits.partition_of(None) is main
    assert limits.partition_of("gpu") is gpu
    assert limits.partition_of("nope") is None


def test_every_value_of_a_partition_is_read() -> None:
    told = (
        "PartitionName=a AllowGroups=staff,lab AllowAccounts=lab,ml DenyAccounts=guests AllowQos=fast DenyQos=debug "
        "Default=YES QoS=part_a MaxNodes=8 MinNodes=2 MaxTime=02:00:00 MaxCPUsPerNode=64 MaxMemPerNode=900 "
        "MaxMemPerCPU=400 TotalNodes=12 PreemptMode=REQUEUE GraceTime=30 State=DRAIN RootOnly=YES "
        "OverSubscribe=EXCLUSIVE TRESBillingWeights=CPU=1.0,gres/gpu=8\n"
    )
    assert parse_limits(told).partitions == {
        "a": Partition(
            name="a", allow_groups=("staff", "lab"), allow_accounts=("lab", "ml"), deny_accounts=("guests",),
            allow_qos=("fast",), deny_qos=("debug",), is_default=True, qos="part_a", max_nodes=8, min_nodes=2,
            max_time_min=120, max_cpus_per_node=64, max_mem_per_node_mb=900, max_mem_per_cpu_mb=400, total_nodes=12,
            preempt_mode="REQUEUE", grace_s=30, state="DRAIN", is_for_root=True, gives_whole_nodes=True,
            billing="CPU=1.0,gres/gpu=8",
        )
    }  # fmt: skip


@pytest.mark.parametrize(
    "told",
    [
        "PartitionName=a\n",
        "PartitionName=a AllowGroups=ALL AllowAccounts=ALL DenyAccounts=(null) AllowQos=NONE DenyQos= Default=NO "
        "QoS=N/A MaxNodes=UNLIMITED MinNodes=0 MaxTime=UNLIMITED MaxCPUsPerNode=UNLIMITED MaxMemPerNode=UNLIMITED "
        "GraceTime=0 State=UP RootOnly=NO OverSubscribe=NO\n",
        "PartitionName=a QoS= OverSubscribe=FORCE:4\n",
    ],
)
def test_a_partition_without_limits_has_the_defaults(told: str) -> None:
    assert parse_limits(told).partitions == {"a": Partition(name="a")}


def test_every_value_of_the_configuration_is_read() -> None:
    told = (
        "ClusterName             = north\nKillWait                = 45 sec\nMaxArraySize            = 1001\n"
        "PreemptMode             = REQUEUE\nPreemptType             = preempt/qos\n"
        "SelectType              = select/linear\nSLURM_VERSION           = 24.11.3\n"
        "MaxJobCount             = 10000\nSchedulerParameters     = max_array_tasks=500,defer\n"
    )
    assert parse_limits(told, notes=("a note",)) == Limits(
        cluster="north", kill_wait_s=45, max_array_size=1001, max_array_tasks=500, preempt_mode="REQUEUE",
        preempt_type="qos", gives_whole_nodes=True, version="24.11.3",
        job_cap=SubmitCap(name="MaxJobCount", limit=10_000, used=0), notes=("a note",),
    )  # fmt: skip
    assert parse_limits("MaxJobCount             = UNLIMITED\nSelectType              = select/cons_tres\n") == Limits()


def test_accounts_that_a_partition_denies() -> None:
    assert [each.deny_accounts for each in _limits().partitions.values()] == [(), ()]
    told = "PartitionName=open AllowAccounts=ALL DenyAccounts=guests,students State=UP\n"
    (denying,) = parse_limits(told).partitions.values()
    assert (denying.allow_accounts, denying.deny_accounts) == (None, ("guests", "students"))


def test_nodes() -> None:
    main, gpu, cpu_only = _limits().nodes
    assert (main.num_nodes, main.cpus, main.memory_mb, main.gpus, main.features) == (
        4,
        8,
        8000,
        {"a100": 4},
        frozenset(),
    )
    assert (gpu.num_nodes, gpu.cpus, gpu.gpus, gpu.features) == (2, 64, {"h100": 8}, {"ib", "amd"})
    assert cpu_only.gpus == {}
    varied = parse_limits("", nodes="main|3+|n/a|1|(null)|(null)\nmain|3|8|16000+|(null)|a,b\n").nodes
    assert varied == (
        NodeGroup(partition="main", num_nodes=3, cpus=8, memory_mb=16_000, gpus={}, features=frozenset({"a", "b"})),
    ), "no number of cores: left out"


def test_what_a_job_counts_against() -> None:
    limits = _limits()
    everywhere = SubmitCap(name="MaxJobCount", limit=10000, used=321)
    own = SubmitCap(name="MaxSubmitJobs of ann in account lab", limit=40, used=3)
    account = SubmitCap(name="GrpSubmitJobs of account lab", limit=50, used=31)
    per_user = SubmitCap(name="MaxSubmitJobsPerUser of QOS limited", limit=15, used=14)
    whole = SubmitCap(name="GrpSubmitJobs of QOS limited", limit=100, used=20)
    assert limits.submit_caps(None, None, None) == [everywhere, own, account, per_user, whole], "all by default"
    assert limits.submit_caps("gpu", "lab", "normal") == [
        everywhere, own, account, SubmitCap(name="GrpSubmitJobs of QOS part_gpu", limit=200, used=0),
    ]  # fmt: skip
    assert limits.submit_caps(None, "ml", None) == [everywhere], "another account, whose QOS is normal"
    assert per_user.room == 1
    assert SubmitCap(name="x", limit=3, used=5).room == 0


def test_a_limit_of_a_qos_shows_before_it_is_used() -> None:
    """The controller lists users of a QOS only while they have jobs (22.05): then sacctmgr alone knows the limit."""
    unused = MANAGER.replace("User Limits= 1000={MaxJobsPU=N(0) MaxSubmitJobsPU=15(14)", "User Limits=No Users {")
    cap = _limits(CONFIG + unused).qos_caps["limited"][0]
    assert cap == SubmitCap(name="MaxSubmitJobsPerUser of QOS limited", limit=15, used=0)
    (cap,) = [each for each in _limits(accounting="").qos_caps["limited"] if "PerUser" in each.name]
    assert (cap.limit, cap.used) == (15, 14), "and the controller alone, where sacctmgr is missing"


def test_accounts_and_qos() -> None:
    limits = _limits()
    assert [(each.account, each.is_default) for each in limits.associations] == [("lab", True), ("ml", False)]
    assert limits.qos_of(None, None, None) == "limited", "the default of the association"
    assert limits.qos_of(None, "ml", "gpu") == "normal", "the only one of the association with this partition"
    assert limits.qos_of(None, "ml", None) is None, "nobody says"
    assert limits.qos_flags["limited"] == {"DenyOnLimit", "PartitionTimeLimit"}
    assert limits.accounts_above("lab") == ["lab", "root"]
    assert limits.qos_max_time_min == {"normal": None, "limited": 2880, "part_gpu": None}
    assert [each.account for each in _limits(accounting="").associations] == ["lab"], "the controller's word"


def test_the_association_of_a_job_is_that_of_its_partition_before_the_general_one() -> None:
    general = Association(account="lab", qos=("slow", "fast"), default_qos="slow", is_default=True)
    of_gpu = Association(account="lab", partition="gpu", qos=("fast",))
    limits = dataclasses.replace(_limits(), associations=(of_gpu, general))
    assert limits.association_of(None, "gpu") == of_gpu
    assert limits.association_of("lab", "main") == limits.association_of(None, None) == general
    assert limits.association_of("ml", "gpu") is None
    assert [limits.qos_of(None, None, name) for name in ("gpu", "main")] == ["fast", "slow"]
    assert limits.qos_of("other", None, "gpu") == "other", "the named one"
    undecided = dataclasses.replace(limits, associations=(dataclasses.replace(general, default_qos=""),))
    assert undecided.qos_of(None, None, None) is None, "Slurm chooses one of two"


def test_accounts_that_are_each_others_parents_are_named_once() -> None:
    assert Limits(parents={"a": "b", "b": "a"}).accounts_above("a") == ["a", "b"]


def test_caps_of_all_accounts_above_count_up_to_the_root() -> None:
    above = MANAGER.replace(
        "Account=root UserName= Partition= ID=1 ParentAccount= DefAssoc=No GrpJobs=N(2) GrpSubmitJobs=N(321)",
        "Account=root UserName= Partition= ID=1 ParentAccount= DefAssoc=No GrpJobs=N(2) GrpSubmitJobs=900(321)",
    )
    assert _limits(CONFIG + above).account_caps["lab", ""] == (
        SubmitCap(name="MaxSubmitJobs of ann in account lab", limit=40, used=3),
        SubmitCap(name="GrpSubmitJobs of account lab", limit=50, used=31),
        SubmitCap(name="GrpSubmitJobs of account root", limit=900, used=321),
    )


def test_caps_of_an_association_with_a_partition_hold_there_alone() -> None:
    debug = (
        "ClusterName=c Account=lab UserName=ann(1000) Partition=gpu ID=5 ParentAccount= DefAssoc=No "
        "GrpSubmitJobs=N(3) MaxSubmitJobs=2(0)\n"
    )
    limits = _limits(CONFIG + PARTITIONS + MANAGER.replace("QOS Records", debug + "QOS Records"))
    assert [cap.limit for cap in limits.account_caps["lab", "gpu"]] == [2, 50]
    assert [cap.limit for cap in limits.account_caps["lab", ""]] == [40, 50]
    assert 2 not in [cap.limit for cap in limits.submit_caps("main", "lab", None)]
    assert 2 in [cap.limit for cap in limits.submit_caps("gpu", "lab", None)]


def test_the_time_that_an_association_allows() -> None:
    """scontrol shows the account's limit at the user's association, too."""
    manager = MANAGER.replace("MaxSubmitJobs=40(3)\n", "MaxSubmitJobs=40(3) MaxWallPJ=90\n")
    for accounting in (ACCOUNTING, ""):
        limits = parse_limits(CONFIG + manager, accounting=accounting, user="ann")
        assert {own.account: own.max_time_min for own in limits.associations if own.account == "lab"} == {"lab": 90}
    unenforced = parse_limits(manager, accounting=ACCOUNTING, user="ann")
    assert {own.max_time_min for own in unenforced.associations} == {None}


def test_what_is_recorded_and_not_enforced_binds_nobody() -> None:
    limits = _limits(CONFIG.replace("associations,limits,qos", "none") + PARTITIONS + MANAGER)
    assert (limits.enforced, limits.account_caps, limits.qos_caps) == (frozenset(), {}, {})
    assert [cap.name for cap in limits.submit_caps(None, None, None)] == ["MaxJobCount"]


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("UNLIMITED", None), ("NONE", None), ("", None), ("infinite", None), ("90", 90), ("10:00", 10),
        ("01:30:00", 90), ("1-00:00:00", 1440), ("2-12", 3600), ("1-01:30", 1530), ("00:00:30", 0),
    ],
)  # fmt: skip
def test_times(text: str, minutes: int | None) -> None:
    assert parse_minutes(text) == minutes


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("gpu:3090:4", {"3090": 4}), ("gpu:2080ti:8", {"2080ti": 8}), ("gpu:1g.10gb:7", {"1g.10gb": 7}),
        ("gpu:a100:2(S:0),gpu:a100:2(S:1)", {"a100": 4}), ("gpu", {}),
        ("(null)", {}), ("gpu:4", {"gpu": 4}), ("gpu:a100:4", {"a100": 4}),
        ("gpu:a100:2(S:0),gpu:v100:1", {"a100": 2, "v100": 1}),
        ("nvme:1,gpu:gh200_96:4(S:0-3)", {"gh200_96": 4}), ("shard:8", {}),
    ],
)  # fmt: skip
def test_gres(gres: str, gpus: dict[str, int]) -> None:
    assert parse_gpus(gres) == gpus


def test_three_reads_and_no_more(fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("scontrol", CONFIG + PARTITIONS + MANAGER)
    fake_slurm.answer("sacctmgr", ACCOUNTING)
    fake_slurm.answer("sinfo", NODES)
    limits = read_limits()
    assert [call.split()[0] for call in fake_slurm.calls()] == ["scontrol", "sacctmgr", "sinfo"]
    assert len(limits.nodes) == 3
    fake_slurm.forget_calls()
    assert read_limits(with_nodes=False).nodes == ()
    assert [call.split()[0] for call in fake_slurm.calls()] == ["scontrol", "sacctmgr"]


def test_a_site_without_accounting_is_asked_less(fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("scontrol", CONFIG.replace("associations,limits,qos", "none") + PARTITIONS)
    fake_slurm.answer("sinfo", NODES)
    limits = read_limits()
    assert [call.split()[0] for call in fake_slurm.calls()] == ["scontrol", "sinfo"]
    assert limits.max_array_size == 1001


def test_a_command_that_fails_leaves_its_part_unknown(fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("scontrol", CONFIG + PARTITIONS + "error: assoc_mgr: Access denied\n", code=1)
    fake_slurm.answer("sacctmgr", error="sacctmgr: error: Unable to connect\n", code=1)
    fake_slurm.answer("sinfo", error="slurm_load_partitions: Unable to contact\n", code=1)
    limits = read_limits()
    assert limits.partitions.keys() == {"main", "gpu"}
    assert (limits.qos_caps, limits.nodes) == ({}, ())
    assert [note.partition(": ")[0] for note in limits.notes] == ["limits of QOS are unknown", "nodes are unknown"]


def test_no_controller_is_an_error(fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("scontrol", error="slurm_load_ctl_conf error: Unable to contact slurm controller\n", code=1)
    with pytest.raises(SlurmError, match="Unable to contact"):
        read_limits()
