"""Slurm's words for a job that waits, in a person's words."""

from __future__ import annotations

import re

import pytest

from hpc_trainer.slurm.terms import end_of, explain_reason, says_held, says_shell_was_killed


@pytest.mark.parametrize(
    ("word", "says", "helps"),
    [
        ("Priority", "jobs of higher priority are before it", ""),
        ("Resources", "too few nodes, cores, GPUs or memory are free", ""),
        ("None", "Slurm has not looked at it yet", ""),
        ("BeginTime", "held for two minutes", ""),
        ("Dependency", "begins when the job that it follows has ended", ""),
        ("DependencyNeverSatisfied", "it never starts", "hpc-trainer retry {run}"),
        ("JobArrayTaskLimit", "cluster.array_parallelism", "starts when one of them ends"),
        ("JobHeldUser", "held by you", "scontrol release {job}"),
        ("JobHeldAdmin", "an administrator holds it", "ask the administrators"),
        ("launch failed requeued held", "a node could not start it", "scontrol release {job}"),
        ("launch_failed_requeued_held", "a node could not start it", "scontrol release {job}"),
        ("ReqNodeNotAvail, UnavailableNodes:n[1-2]", "down, drained or reserved", "sinfo -R"),
        ("Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
         "down, drained or reserved", "sinfo -R"),
        ("PartitionConfig", "its partition, as it is set up, cannot run it", "hardware.partition"),
        ("PartitionTimeLimit", "longer than its partition's", "hardware.time_limit_min"),
        ("BadConstraints", "no node has what it asks for", "hardware.constraint"),
        ("QOSMaxJobsPerUserLimit", "its QOS allows you no more jobs at a time", ""),
        ("QOSMaxSubmitJobPerUserLimit", "its QOS allows you no more jobs at a time", ""),
        ("QOSMaxGRESPerUser", "its QOS allows you no more GPUs at a time", ""),
        ("QOSMaxGRESPerJob", "more GPUs than its QOS lets a job have", "less of that"),
        ("QOSMinGRES", "less GPUs than its QOS lets a job have", "more of that"),
        ("AssocGrpGRES", "your account allows all its jobs together no more GPUs at a time", ""),
        ("AssocGrpCpuLimit", "your account allows all its jobs together no more cores", ""),
        ("AssocMaxJobsLimit", "your account allows you no more jobs at a time", ""),
        ("AssocMaxWallDurationPerJobLimit", "more time than your account lets a job have", "less of that"),
        ("AssocGrpGRESMinutes", "(GPUs times minutes) that your account allows all its jobs together is used up",
         "cluster.account"),
        ("AssocGrpCPURunMinutesLimit", "(cores times minutes left)", ""),
        ("MaxMemoryPerAccount", "the site allows an account no more memory", ""),
        ("QOSUsageThreshold", "used too much", "hardware.qos"),
        ("ReservationInvalid", "does not exist, or may not be used", "another partition, or without a reservation"),
        ("DeadLine", "no longer end before its --deadline", "cluster.sbatch.deadline"),
        ("Constraints", "too few nodes with the features", "sinfo -o"),
        ("BurstBufferStageIn", "burst buffer", ""),
        ("QOSGrpBillingMinutes", "(billing units times minutes) that its QOS allows", "cluster.account"),
        ("SystemFailure", "Slurm, a file system or the network failed", "ask the site"),
        ("AWordOfTomorrow", "a reason that hpc-trainer does not know", "man squeue"),
    ],
)  # fmt: skip
def test_a_reason_is_told_in_words(word: str, says: str, helps: str) -> None:
    reason = explain_reason(word)
    advice = "; ".join(reason.advice)
    assert says in reason.says
    assert helps in advice
    assert bool(helps) == bool(advice), advice
    assert set(re.findall(r"\{(\w+)\}", advice)) <= {"run", "job"}


# squeue(1), JOB REASON CODES, and job_state_reason.c of 22.05 to 25.11 (of the limits some).
WORDS = [
    "AccountingPolicy", "AccountNotAllowed", "AssocGrpBB", "AssocGrpBilling",
    "AssocGrpCPUMinutesLimit", "AssocGrpCpuLimit", "AssocGrpJobsLimit",
    "AssocGrpSubmitJobsLimit", "AssocGrpWallLimit", "AssociationJobLimit",
    "AssociationResourceLimit", "AssociationTimeLimit", "AssocMaxBBPerNode",
    "AssocMaxSubmitJobLimit", "AssocMaxWallDurationPerJobLimit", "BadConstraints",
    "BeginTime", "BurstBufferOperation", "BurstBufferResources", "BurstBufferStageIn",
    "Cleaning", "Constraints", "DeadLine", "Dependency", "DependencyNeverSatisfied", "FedJobLock",
    "FrontEndDown", "InactiveLimit", "InvalidAccount", "InvalidQOS", "JobArrayTaskLimit",
    "JobHeldAdmin", "JobHeldUser", "JobHoldMaxRequeue", "JobLaunchFailure", "Licenses",
    "MaxBillingPerAccount", "MaxCpuRunMinsPerUser", "MaxMemPerLimit", "MaxPoweredUpNodes",
    "MaxSubmitJobsPerAccount", "MpiPortsBusy", "NodeDown", "None", "NvidiaImexChannels",
    "PartitionConfig", "PartitionDown", "PartitionInactive", "PartitionNodeLimit",
    "PartitionTimeLimit", "PowerNotAvail", "PowerReserved", "Priority", "Prolog", "QOSGrpCpuLimit",
    "QOSJobLimit", "QOSMaxJobsPerUserLimit", "QOSMinCpuNotSatisfied", "QOSNotAllowed",
    "QOSResourceLimit", "QOSTimeLimit", "QOSUsageThreshold", "ReqNodeNotAvail", "Reservation",
    "ReservationDeleted", "ReservationInvalid", "Resources", "SchedDefer", "SystemFailure",
    "WaitingForScheduling",
]  # fmt: skip


@pytest.mark.parametrize("word", WORDS)
def test_every_word_of_the_manual_is_known(word: str) -> None:
    says = explain_reason(word).says
    assert says != explain_reason("AWordOfTomorrow").says
    assert word not in says, "in words, not in Slurm's own"
    assert "/" not in says


def test_a_reason_says_how_a_job_ends_whether_its_shell_was_killed_and_whether_it_is_held() -> None:
    words = ("TimeLimit", "NodeDown:n1", "RaisedSignal:9(Killed)", "JobLaunchFailure", "Priority", "JobHeldUser", "")
    assert [end_of(word) for word in words] == ["TIMEOUT", "NODE_FAIL", "FAILED", "FAILED", None, None, None]
    assert [says_shell_was_killed(word) for word in words] == [False, False, True, True, False, False, False]
    assert [word for word in (*words, "launch failed requeued held") if says_held(word)] == [
        "JobHeldUser", "launch failed requeued held",
    ]  # fmt: skip
