"""scontrol show job, requeue and cancel, on what releases 22.05 and 24.11 print."""

from __future__ import annotations

import dataclasses
import time

import pytest

from hpc_trainer.errors import RefusedError, SlurmError
from hpc_trainer.slurm.jobs import (
    JobInfo,
    Preemption,
    cancel_jobs,
    cancel_named,
    hold_jobs,
    parse_duration,
    parse_job,
    parse_preemption,
    parse_time,
    read_script,
    release_jobs,
    requeue,
    requeue_by_hand,
    requeue_held,
    show_job,
    show_preemption,
    show_scripts,
    update_job,
)
from tests.unit.slurm.fake_slurm import FakeSlurm

# 22.05, SLURM_TIME_FORMAT=%s, an array element at work, preempted and in its grace period.
ELEMENT = (
    "JobId=1083 ArrayJobId=1080 ArrayTaskId=3 ArrayTaskThrottle=4 JobName=digits UserId=ann(1000) GroupId=ann(1000) "
    "MCS_label=N/A Priority=4294901758 Nice=0 Account=lab QOS=normal JobState=RUNNING Reason=None Dependency=(null) "
    "Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=0:0 RunTime=00:10:05 TimeLimit=01:00:00 TimeMin=N/A "
    "SubmitTime=1763690000 EligibleTime=1763690121 AccrueTime=1763690121 StartTime=1763690130 EndTime=1763693730 "
    "Deadline=N/A PreemptEligibleTime=1763690130 PreemptTime=1763690700 SuspendTime=None SecsPreSuspend=0 "
    "LastSchedEval=1763690130 Scheduler=Main Partition=low AllocNode:Sid=login1:4711 ReqNodeList=(null) "
    "ExcNodeList=(null) NodeList=gpu003 BatchHost=gpu003 NumNodes=1 NumCPUs=8 NumTasks=1 CPUs/Task=8 "
    "ReqB:S:C:T=0:0:*:* TRES=cpu=8,mem=60G,node=1,billing=8,gres/gpu=1 Socks/Node=* NtasksPerN:B:S:C=1:0:*:* "
    "CoreSpec=* MinCPUsNode=8 MinMemoryNode=0 MinTmpDiskNode=0 Features=(null) DelayBoot=00:00:00 "
    "OverSubscribe=OK Contiguous=0 Licenses=(null) Network=(null) Command=/home/ann/runs/digits/slurm/x.sh "
    "WorkDir=/home/ann Comment=0123456789abcdef StdErr=/home/ann/runs/digits/slurm/1080_3.out StdIn=/dev/null "
    "StdOut=/home/ann/runs/digits/slurm/1080_3.out Power= TresPerNode=gres:gpu:1\n"
)
# 24.11 with ISO times, waiting, without a limit.
WAITING = (
    "JobId=77 JobName=x UserId=ann(1000) JobState=PENDING Reason=BeginTime Dependency=(null) Requeue=1 Restarts=0 "
    "BatchFlag=1 ExitCode=0:0 RunTime=00:00:00 TimeLimit=UNLIMITED TimeMin=N/A SubmitTime=2026-11-21T03:00:00 "
    "EligibleTime=2026-11-21T03:02:01 StartTime=Unknown EndTime=Unknown Deadline=N/A PreemptTime=None "
    "SuspendTime=None Partition=low NodeList= NumNodes=1-1\n"
)
TIMED_OUT = (
    "JobId=78 JobName=x JobState=COMPLETING Reason=TimeLimit Requeue=1 Restarts=0 ExitCode=0:15 RunTime=1-00:00:02 "
    "TimeLimit=1-00:00:00 StartTime=2026-11-20T03:00:00 EndTime=2026-11-21T03:00:02 PreemptTime=None\n"
)


def test_an_array_element_at_work() -> None:
    job = parse_job(ELEMENT)
    assert (job.job_id, job.state, job.restarts) == ("1083", "RUNNING", 2)
    assert (job.end_time, job.preempt_time) == (1763693730.0, 1763690700.0)
    assert (job.run_time_s, job.time_limit_s, job.ran_full_time) == (605.0, 3600.0, False)
    assert job.seconds_left(1763693700.0) == 30.0
    assert job.seconds_left() == pytest.approx(1763693730.0 - time.time(), abs=60)


def test_every_value_of_a_job_is_read() -> None:
    text = (
        "JobId=9 JobState=RUNNING Reason=None Restarts=1 RunTime=00:10:05 TimeLimit=01:00:00 EndTime=1763693730 "
        "PreemptTime=1763690700 Partition=low ExcNodeList=n[1-2] NodeList=n3\n"
    )
    assert parse_job(text) == JobInfo(
        job_id="9", state="RUNNING", reason="None", restarts=1, run_time_s=605.0, time_limit_s=3600.0,
        end_time=1763693730.0, preempt_time=1763690700.0, partition="low", excluded="n[1-2]",
    )  # fmt: skip
    assert parse_job("JobState=PENDING ExcNodeList=(null) Restarts=x\n") == JobInfo(
        job_id="", state="PENDING", restarts=0, run_time_s=None, time_limit_s=None, end_time=None, preempt_time=None
    )


@pytest.mark.parametrize(
    ("run_time", "limit", "is_full"),
    [("00:59:59", "01:00:00", False), ("01:00:00", "01:00:00", True), ("01:00:00", "UNLIMITED", False)],
)
def test_a_job_that_ran_exactly_as_long_as_it_may_ran_its_full_time(run_time: str, limit: str, is_full: bool) -> None:
    assert parse_job(f"JobState=TIMEOUT RunTime={run_time} TimeLimit={limit}\n").ran_full_time is is_full


def test_seconds_left_may_be_asked_for_the_time_zero() -> None:
    assert parse_job("JobState=RUNNING EndTime=30\n").seconds_left(0.0) == 30.0


def test_a_waiting_job_without_a_limit() -> None:
    job = parse_job(WAITING)
    assert (job.state, job.restarts, job.end_time, job.preempt_time) == ("PENDING", 0, None, None)
    assert (job.time_limit_s, job.ran_full_time, job.seconds_left()) == (None, False, None)


def test_a_job_at_its_time_limit() -> None:
    job = parse_job(TIMED_OUT)
    assert job.ran_full_time
    assert job.end_time == time.mktime((2026, 11, 21, 3, 0, 2, 0, 0, -1))


def test_the_first_line_of_a_whole_array_wins() -> None:
    assert parse_job(ELEMENT + WAITING).job_id == "1083"


def test_half_a_word_of_a_line_that_was_cut_is_not_believed() -> None:
    whole = parse_job(ELEMENT)
    words = [each.name for each in dataclasses.fields(JobInfo)]
    for length in range(len(ELEMENT.rstrip())):
        try:
            job = parse_job(ELEMENT[:length])
        except SlurmError:
            continue
        for word in words:
            assert getattr(job, word) in (getattr(whole, word), None, 0, ""), (word, ELEMENT[:length][-30:])


@pytest.mark.parametrize("text", ["", "\n", "slurm_load_jobs error: Invalid job id specified\n", "JobId=3 Reason=x"])
def test_what_says_no_state_is_an_error(text: str) -> None:
    with pytest.raises(SlurmError, match="no JobState"):
        parse_job(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("00:00:00", 0), ("00:01:05", 65), ("10:00:00", 36000), ("1-00:00:00", 86400), ("365-23:59:59", 31622399),
        ("UNLIMITED", None), ("Partition_Limit", None), ("INVALID", None), ("", None), ("N/A", None), ("5", 300),
        ("2:03", 123), ("1-2", 93_600), ("1-02:03", 93_780), ("1-02:03:04", 93_784), ("01:02:03:04", None),
    ],
)  # fmt: skip
def test_durations(text: str, seconds: float | None) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["Unknown", "None", "N/A", "(null)", "", "2026-13-01T00:00:00"])
def test_no_time(text: str) -> None:
    assert parse_time(text) is None


def test_a_time_is_local_or_since_the_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_time("1763690000") == 1763690000.0
    monkeypatch.setenv("TZ", "UTC-2")
    time.tzset()
    try:
        assert parse_time("1970-01-02T02:00:00") == 86400.0
    finally:
        monkeypatch.delenv("TZ")
        time.tzset()


# --- asking the controller ---


def test_one_element_is_asked_for_by_its_array_name(fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("scontrol", ELEMENT)
    assert show_job("1080_3").state == "RUNNING"
    assert fake_slurm.calls() == ["scontrol show job -o 1080_3"]


def test_a_forgotten_job_is_an_error(fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("scontrol", error="slurm_load_jobs error: Invalid job id specified\n", code=1)
    with pytest.raises(SlurmError, match="Invalid job id specified"):
        show_job("1080_3")


def test_requeue_asks_for_incomplete_jobs_only(fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("scontrol")
    assert requeue("1080_3") == "requeued"
    assert fake_slurm.calls() == ["scontrol requeue Incomplete 1080_3"]


def test_a_job_that_waits_already_was_requeued_by_somebody(fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("scontrol", error="Job is pending execution for job 1080_3\n", code=1)
    assert requeue("1080_3") == "already_pending"


@pytest.mark.parametrize(
    "error", ["Requested operation is presently disabled", "Access/permission denied", "Invalid job id specified"]
)
def test_a_refused_requeue_is_an_error(fake_slurm: FakeSlurm, error: str) -> None:
    fake_slurm.answer("scontrol", error=f"{error} for job 1080_3\n", code=1)
    with pytest.raises(RefusedError, match=error):
        requeue("1080_3")


def test_cancelled_elements_go_as_ranges(fake_slurm: FakeSlurm) -> None:
    cancel_jobs([*(f"7_{index}" for index in (3, 0, 1, 2, 9, 11, 10, 9)), "8", "9_5"])
    assert fake_slurm.calls() == ["scancel --quiet 8 7_[0-3,9-11] 9_[5]"]
    fake_slurm.forget_calls()
    cancel_jobs([f"7_{index}" for index in range(10_000)])
    assert fake_slurm.calls() == ["scancel --quiet 7_[0-9999]"]


def test_elements_far_apart_stay_below_what_one_word_of_a_command_may_have(fake_slurm: FakeSlurm) -> None:
    """128 KiB on Linux: of 60,000 elements each other one was too long, and nothing was cancelled."""
    cancel_jobs([f"7_{index}" for index in range(0, 60_000, 2)])
    (call,) = fake_slurm.calls()
    words = call.split()[2:]
    assert max(map(len, words)) < 128 * 1024
    listed = [int(index) for word in words for index in word.removeprefix("7_[").rstrip("]").split(",")]
    assert listed == list(range(0, 60_000, 2))


def test_cancel_is_one_command_for_all(fake_slurm: FakeSlurm) -> None:
    cancel_jobs([])
    assert fake_slurm.calls() == []
    cancel_jobs(["1_0", "1_1", "2"])
    assert fake_slurm.calls() == ["scancel --quiet 2 1_[0-1]"]


def test_a_signal_for_a_job_that_has_ended_is_no_error(fake_slurm: FakeSlurm) -> None:
    """`scancel --quiet --signal` says nothing of such a job and exits with 1 or 229 (22.05)."""
    fake_slurm.answer("scancel", code=229)
    cancel_jobs(["7_0", "7_1"], signal="USR2")
    fake_slurm.answer("scancel", error="scancel: error: Kill job error on job id 7: Access/permission denied\n", code=1)
    with pytest.raises(RefusedError, match="permission denied"):
        cancel_jobs(["7_0"], signal="USR2")


def test_how_a_partition_preempts() -> None:
    config = "Configuration data as of 2026-11-21T10:00:00\nKillWait    = 90 sec\nPreemptMode      = REQUEUE\n"
    line = "PartitionName=spare AllowGroups=ALL GraceTime=20 PreemptMode=CANCEL QoS=N/A\n"
    assert parse_preemption(line + config) == Preemption(mode="CANCEL", grace_s=20.0, kill_wait_s=90.0)
    without = parse_preemption("PartitionName=spare GraceTime=0\n" + config)
    assert without == Preemption(mode="REQUEUE", grace_s=0.0, kill_wait_s=90.0)
    assert parse_preemption(line) == Preemption(mode="CANCEL", grace_s=20.0, kill_wait_s=30.0)
    assert parse_preemption("slurm_load_partitions error: Invalid partition name specified\n") is None


def test_elements_are_held_and_released_by_ranges_and_only_those_that_could_not_be_are_told(
    fake_slurm: FakeSlurm,
) -> None:
    fake_slurm.answer("scontrol")
    assert hold_jobs(["7_1", "8", "7_2", "7_4"]) == []
    assert release_jobs(["7_1"]) == []
    assert fake_slurm.calls() == ["scontrol uhold 8", "scontrol uhold 7_[1-2,4]", "scontrol release 7_[1]"]
    fake_slurm.answer("scontrol", error="Job/step already completing or completed for job 7_1\n", code=1)
    assert hold_jobs(["7_1"]) == [], "it has ended"
    fake_slurm.answer("scontrol", error="Access/permission denied for job 8\n", code=1)
    assert release_jobs(["8", "9"]) == [
        "8: Access/permission denied for job 8", "9: Access/permission denied for job 8",
    ]  # fmt: skip
    fake_slurm.answer("scontrol", code=1)
    assert hold_jobs(["8"]) == ["8: scontrol uhold failed (1): "]


def test_many_ranges_are_held_by_several_requests(fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("scontrol")
    assert hold_jobs([f"7_{index}" for index in range(0, 802, 2)]) == []
    assert [call.count(",") + 1 for call in fake_slurm.calls()] == [200, 200, 1]


def test_the_script_of_a_job_is_named_by_its_array_if_it_has_one(fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer(
        "scontrol",
        "JobId=41 JobName=a UserId=me(1) Command=/runs/s/scripts/a.sh WorkDir=/runs\n"
        "JobId=43 ArrayJobId=42 ArrayTaskId=1 JobName=b Command=/runs/s/scripts/b c.sh WorkDir=/runs\n",
    )
    assert show_scripts(["41", "42"]) == {"41": "/runs/s/scripts/a.sh", "42": "/runs/s/scripts/b c.sh"}


def test_what_else_is_done_to_a_job(fake_slurm: FakeSlurm) -> None:
    fake_slurm.print("scontrol", "#!/bin/sh\n")
    fake_slurm.print("scancel", "")
    assert read_script("7") == "#!/bin/sh\n"
    requeue_by_hand("7_1")
    requeue_held("7_2")
    update_job("7_3", ["StartTime=now", "Nice=0"])
    cancel_named("7_4", "digits-01234567")
    assert fake_slurm.calls() == [
        "scontrol write batch_script 7 -", "scontrol requeue 7_1", "scontrol requeuehold Incomplete 7_2",
        "scontrol update JobId=7_3 StartTime=now Nice=0", "scancel --quiet --name=digits-01234567 7_4",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "brings_back"), [("REQUEUE", True), ("REQUEUE,GANG", True), ("CANCEL", False), ("SUSPEND,GANG", False)]
)
def test_which_preemption_brings_a_job_back(mode: str, brings_back: bool) -> None:
    assert Preemption(mode=mode, grace_s=0.0, kill_wait_s=30.0).brings_back is brings_back


def test_how_a_partition_preempts_is_asked_in_one_call(fake_slurm: FakeSlurm) -> None:
    fake_slurm.print(
        "scontrol", "PartitionName=low GraceTime=60 PreemptMode=REQUEUE\nKillWait                = 45 sec\n"
    )
    assert show_preemption("low") == Preemption(mode="REQUEUE", grace_s=60.0, kill_wait_s=45.0)
    assert fake_slurm.calls() == ["scontrol -o"]
    assert parse_preemption("PreemptMode=CANCEL") == Preemption(mode="CANCEL", grace_s=0.0, kill_wait_s=30.0)
    assert parse_preemption("GraceTime=60") is None
