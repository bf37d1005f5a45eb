"""Why a run is as it is: every state and cause has a verdict and a next step, and the evidence is the run's own."""

from __future__ import annotations

import dataclasses
import re
import time
from pathlib import Path

import pytest

from hpc_trainer.operate.report.data import _hint
from hpc_trainer.operate.verdicts import BY_CAUSE, BY_STATE
from hpc_trainer.operate.why import Why, explain
from hpc_trainer.record.environment import write_environment
from hpc_trainer.record.files import write_json
from hpc_trainer.record.journal import Journal
from hpc_trainer.record.last_words import SETUP_ENDED
from hpc_trainer.record.ledger import append_spent, spent_so_far
from hpc_trainer.record.spec import append_specs
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.record.test_environment import RECORD
from tests.unit.slurm.fake_slurm import FakeSlurm

ERROR = {
    "rank": 1, "node": "n2", "exit_code": 1, "type": "ValueError", "message": "a batch of -1",
    "traceback": 'Traceback (most recent call last):\n  File "net.py", line 7, in forward\n    raise ValueError(n)\n'
                 "    ^^^^^^^^^^^^^^^^^^^\n"
                 "ValueError: a batch of -1\n",
}  # fmt: skip


@pytest.fixture
def sweep(tmp_path: Path, fake_slurm: FakeSlurm) -> SweepOnDisk:
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(1, "cluster=slurm", "hardware.partition=spare"))
    sweep.submit()
    return sweep


def _why(sweep: SweepOnDisk) -> Why:
    status = read_status(sweep.paths)
    return explain(status, status.runs[0])


def test_every_state_has_a_verdict_and_something_to_do() -> None:
    assert set(BY_STATE) == set(RunState)
    for verdict in (*BY_STATE.values(), *BY_CAUSE.values()):
        assert verdict.says.endswith(".")
        assert verdict.advice
        for advice in verdict.advice:
            assert set(re.findall(r"\{(\w+)\}", advice)) <= {
                "run",
                "sweep",
                "job",
                "flag",
                "logs",
                "idle",
                "longer",
                "memory",
                "words",
            }


def test_an_exception_is_shown_with_its_place(sweep: SweepOnDisk) -> None:
    sweep.start(resumed=0)
    sweep.end(state=RunState.FAILED, cause="exception", error=ERROR)
    why = _why(sweep)
    assert why.verdict.startswith("The training raised an exception")
    assert why.evidence[:3] == [
        "rank 1 on n2: ValueError: a batch of -1", '  File "net.py", line 7, in forward', "    raise ValueError(n)",
    ]  # fmt: skip
    assert f"hpc-trainer logs {why.run_id}" in why.advice, "it has one rank"


@pytest.mark.parametrize(
    ("cause", "found", "advised", "log"),
    [
        ("exception", None, "--rank 1", 1),
        ("stuck", None, "--all-ranks: it ends with the stack of each thread; the rank that is not in a collective", 1),
        ("stuck", 0, "--rank 0: it ends with the stack of each thread", 0),
    ],
)
def test_the_log_of_the_rank_to_look_at(
    cause: str, found: int | None, advised: str, log: int, tmp_path: Path, fake_slurm: FakeSlurm
) -> None:
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(1, "cluster=slurm", "hardware=cpu_x2"))
    sweep.submit()
    fake_slurm.answer("squeue", "")
    sweep.start(resumed=0)
    sweep.end(state=RunState.FAILED, cause=cause, error=ERROR)
    write_json(sweep.run().failure(0), ERROR)
    for rank in (0, 1):
        sweep.run().log(0, rank).write_text("")
    status = read_status(sweep.paths)
    why = explain(status, status.runs[0], rank=found)
    assert why.advice[0].startswith(f"hpc-trainer logs {why.run_id} {advised}")
    assert f"log: {sweep.run().log(0, log)}" in why.evidence


def test_an_attempt_that_ran_with_something_else_is_told(sweep: SweepOnDisk) -> None:
    sweep.start(resumed=0)
    sweep.end(state=RunState.REQUEUED, cause="preempted")
    sweep.start(attempt=1, resumed=4)
    sweep.run().logs.mkdir(parents=True, exist_ok=True)
    for attempt, version in enumerate(("2.13.0", "2.13.1")):
        write_environment(sweep.run(), attempt, {**RECORD, "packages": {"torch": version}})
    assert "attempt 1 ran with torch 2.13.1 (2.13.0); in parentheses attempt 0's" in _why(sweep).evidence


def test_the_memory_of_a_gpu_is_told_from_other_exceptions(sweep: SweepOnDisk) -> None:
    sweep.start(resumed=0)
    error = {**ERROR, "type": "OutOfMemoryError", "message": "CUDA out of memory."}
    sweep.end(state=RunState.FAILED, cause="exception", error=error)
    assert "smaller train.micro_batch_size" in _why(sweep).advice[0]


def test_a_refused_resume_is_told_with_the_flag_that_allows_it(sweep: SweepOnDisk) -> None:
    sweep.start()
    flag = "checkpoint.allow_changes=[seed,model.width]"
    message = f"step-4 is of another training (was -> is):\n  seed: 0 -> 5\nTake it back, or: {flag}"
    error = {**ERROR, "exit_code": 78, "type": "IncompatibleResumeError", "message": message}
    sweep.end(state=RunState.FAILED, cause="incompatible_resume", error=error)
    why = _why(sweep)
    assert (why.verdict, why.cause) == (BY_CAUSE["incompatible_resume"].says, "incompatible_resume")
    assert "seed: 0 -> 5" in why.evidence[0]
    assert why.evidence[1].startswith("step "), "where in our code it was refused tells nobody anything"
    assert f"the same command with {flag}" in why.advice[0]
    assert any("--fresh" in line and "sweep_name" in line and "resume_from" in line for line in why.advice)
    advice = " ".join(why.advice)
    assert "hpc-trainer retry" not in advice, "it would be refused in the same way"
    assert "fix the code" not in advice


def test_the_end_of_a_ranks_memory_has_figures_and_keys(sweep: SweepOnDisk) -> None:
    sweep.start(resumed=0)
    write_json(sweep.run().memory, {"weights": 2e9, "optimizer": 4e9, "step": 10, "peak": 1e9, "limit": 80e9})
    memory = {"activations": 70e9, "peak": 79e9, "limit": None, "step": 12, "micro_batch_size": 64}
    error = {**ERROR, "type": "OutOfMemoryError", "message": "CUDA out of memory.", "memory": memory}
    sweep.end(state=RunState.OUT_OF_MEMORY, cause="out_of_memory", error=error)
    why = _why(sweep)
    assert (why.state, why.verdict) == (RunState.OUT_OF_MEMORY, BY_CAUSE["out_of_memory"].says)
    assert why.evidence[:3] == [
        "rank 1 on n2: OutOfMemoryError: CUDA out of memory.",
        "GB on the rank after step 12: weights 2, optimizer 4, activations 70 (micro-batch of 64)",
        "79 of 80 GB at the most",
    ]  # fmt: skip
    assert why.advice[0].startswith("a smaller train.micro_batch_size, as =32 or =auto")
    assert "saves about 35 GB" in why.advice[0]
    assert "hpc-trainer submit" in why.advice[-1]


def test_the_hosts_memory_is_slurms_word_and_another_matter(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    sweep.start(resumed=0)
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "500_0|OUT_OF_MEMORY|0:125|n7\n")
    why = _why(sweep)
    assert why.verdict == BY_STATE[RunState.OUT_OF_MEMORY].says
    assert why.advice[0].startswith(f"hpc-trainer retry {why.run_id} hardware.mem_gb_per_node=")
    assert "--retry-failed" in why.advice[1], "submit alone leaves a failed run where it is"


def test_a_rank_that_told_more_than_slurm_knows_is_believed(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    """Rank 0 was killed with its step before it could journal what rank 1 had met."""
    sweep.start(resumed=0)
    write_json(sweep.run().failure(0), {**ERROR, "cause": "out_of_memory", "memory": {"step": 3}})
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "500_0|FAILED|1:0|n7\n")
    assert (_why(sweep).state, _why(sweep).cause) == (RunState.OUT_OF_MEMORY, "out_of_memory")


@pytest.mark.parametrize("cause", sorted(BY_CAUSE))
def test_a_failure_is_explained_by_its_cause(sweep: SweepOnDisk, cause: str) -> None:
    sweep.start(resumed=0)
    sweep.end(state=RunState.FAILED, cause=cause)
    assert _why(sweep).verdict.startswith(BY_CAUSE[cause].says)


def _timed_out(sweep: SweepOnDisk, *, attempts: int, training_s: float) -> None:
    for attempt in range(attempts):
        sweep.start(attempt=attempt, resumed=attempt)
        seconds = {"start_up": 60.0 - training_s, "step": training_s}
        append_spent(sweep.run(), attempt, attempt + 1, spent_so_far(seconds.items(), steps_done=1))
        sweep.end(attempt=attempt, state=RunState.REQUEUED, cause="timeout", saved_step=attempt + 1)


def test_a_local_run_whose_folder_was_deleted_is_not_called_new(tmp_path: Path) -> None:
    """`why` said that it had not been submitted."""
    sweep = SweepOnDisk(tmp_path / "runs" / "here", make_specs(1, "cluster=local"))
    assert _why(sweep).verdict == "It has not been submitted yet."
    sweep.submit(f"vm:{2**22 + 1}:1.0", executor="local")  # a queue that has ended
    why = _why(sweep)
    assert why.state is RunState.NEW
    assert "its folder has been deleted" in why.verdict
    assert "hpc-trainer submit" in why.advice[0]


def test_a_run_that_hardly_trains_is_told_before_it_is_stopped(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("squeue", "500_0|PENDING||BeginTime\n")
    _timed_out(sweep, attempts=1, training_s=1.0)
    assert not any("time limit of" in line for line in _why(sweep).evidence), "once says little"
    _timed_out(sweep, attempts=2, training_s=1.0)
    run_id, why = sweep.specs[0].run_id, _why(sweep)
    said = "the time limit of 60 min ended its last 2 attempts, and 1.7 % of their 2 min 0 s was training"
    assert f"{said}; it is stopped for good if that stays so" in why.evidence
    assert why.advice[0].startswith(
        f"hpc-trainer cancel {run_id} && hpc-trainer retry {run_id} hardware.time_limit_min=120: "
    )
    assert (read_status(sweep.paths).runs[0].warning or "").startswith(said)


def test_a_run_that_trains_in_its_short_attempts_is_left_alone(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("squeue", "500_0|PENDING||BeginTime\n")
    _timed_out(sweep, attempts=4, training_s=6.0)
    assert read_status(sweep.paths).runs[0].warning is None
    assert not any("it is stopped for good" in line for line in _why(sweep).evidence)


def test_a_run_that_each_time_limit_ends_a_bit_further_is_told_how_many_more_it_needs(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm
) -> None:
    fake_slurm.answer("squeue", "500_0|PENDING||BeginTime|x\n")
    _timed_out(sweep, attempts=1, training_s=30.0)
    assert _why(sweep).diagnosis == "BeginTime", "once says little"
    _timed_out(sweep, attempts=4, training_s=30.0)
    run_id, why, left = sweep.specs[0].run_id, _why(sweep), sweep.specs[0].num_steps - 4
    assert why.diagnosis == "timeouts"
    assert "Slurm's reason: BeginTime" in " ".join(why.evidence)
    said = "the time limit of 60 min ended its last 3 attempts, and each made some 1 steps"
    assert any(line.startswith(f"{said}: for the other {left} steps it needs {left} more, ") for line in why.evidence)
    longer = f"hpc-trainer cancel {run_id} && hpc-trainer retry {run_id} hardware.time_limit_min=240: "
    assert why.advice[0] == "nothing: it continues by itself"
    assert why.advice[1].startswith(longer)
    fake_slurm.answer("squeue", "500_0|PENDING||PartitionDown|x\n")
    assert _why(sweep).diagnosis == "PartitionDown", "which needs more than patience"
    sweep.start(attempt=4, resumed=4)
    sweep.end(attempt=4, state=RunState.FAILED, cause="exception")
    assert not any("time limit of" in line for line in _why(sweep).evidence)


def test_a_run_that_was_stopped_for_it_is_told_a_longer_limit(sweep: SweepOnDisk) -> None:
    _timed_out(sweep, attempts=3, training_s=1.0)
    sweep.start(attempt=3)
    sweep.end(attempt=3, state=RunState.FAILED, cause="low_goodput")
    run_id = sweep.specs[0].run_id
    assert f"hpc-trainer retry {run_id} hardware.time_limit_min=120: the same run continues" in _why(sweep).advice[0]


def test_the_story_has_every_attempt(sweep: SweepOnDisk) -> None:
    sweep.start(attempt=0, resumed=0)
    sweep.end(attempt=0, state=RunState.REQUEUED, cause="preempted", saved_step=40, action="requeue", signal="SIGTERM")
    sweep.start(attempt=1)
    story = [line[21:] for line in _why(sweep).timeline]
    assert story == [
        "attempt 0 began from step 0, job 500_0 on n1",
        "attempt 0 ended: REQUEUED, preempted, SIGTERM, saved step 40, requeue",
        "attempt 1 began, job 500_0 on n1",
    ], "a program, and an attempt that has not come so far, has no first step to tell of"


def test_a_cancelled_run_says_so_once(sweep: SweepOnDisk) -> None:
    sweep.start(resumed=0)
    sweep.mark("CANCEL")
    sweep.end(state=RunState.CANCELLED, cause="cancelled", saved_step=40)
    why = _why(sweep)
    assert why.state is RunState.CANCELLED
    assert "cancelled" not in why.evidence
    assert why.timeline[-1].endswith("attempt 0 ended: CANCELLED, saved step 40")


def test_skipped_spikes_and_rollbacks_are_told(sweep: SweepOnDisk) -> None:
    sweep.start(attempt=0, resumed=0)
    journal = Journal(sweep.run())
    journal.guard(0, action="skip", step=17, count=3)
    text = "spike at step 41: gradient norm 53.1. Rolled back from step 50 to 40; 1 batches are skipped"
    journal.guard(0, action="rollback", step=41, to=40, text=text)
    sweep.end(attempt=0, state=RunState.FAILED, cause="diverged")
    why = _why(sweep)
    assert "spikes" in why.verdict
    assert [line[21:] for line in why.timeline][1:3] == [
        "attempt 0: 3 spike(s) up to step 17 skipped",
        f"attempt 0: {text}",
    ]


def test_a_grace_that_is_too_short_is_told_with_its_figures(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    sweep.start(resumed=0)
    sweep.end(state=RunState.REQUEUED, cause="preempted", saved_step=10)
    write_json(sweep.run().heartbeat, {"attempt": 0, "step": 10, "time": time.time(), "step_s": 2.0, "save_s": 90.5})
    fake_slurm.answer("scontrol", "PartitionName=spare GraceTime=20 PreemptMode=REQUEUE\nKillWait = 30 sec\n")
    fake_slurm.forget_calls()
    why = _why(sweep)
    assert (
        "a stop takes 92.5 s (a step and a save, the slowest 1 %), and partition spare gives 50 s (GraceTime=20, "
        "KillWait=30): a preempted run loses up to a checkpoint interval."
    ) in why.evidence
    assert "checkpoint.every=auto, or a partition with more grace" in why.advice
    assert len(fake_slurm.calls("scontrol")) == 1
    fake_slurm.answer("scontrol", "PartitionName=spare GraceTime=100 PreemptMode=REQUEUE\nKillWait = 30 sec\n")
    assert not [line for line in _why(sweep).evidence if "a stop takes" in line]
    fake_slurm.answer("scontrol", code=1, error="Unable to contact slurm controller")
    assert not [line for line in _why(sweep).evidence if "a stop takes" in line], "no answer, no guess"


def test_slurms_reason_is_told_in_words_with_what_helps(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("squeue", "500_0|PENDING||JobHeldAdmin|x\n")
    why = _why(sweep)
    assert (why.state, why.pending_reason) == (RunState.HELD, "JobHeldAdmin")
    assert why.verdict == "It is held, and starts when it is released. An administrator holds it."
    assert why.evidence[0] == "Slurm's reason: JobHeldAdmin"
    assert why.advice == ["ask the administrators: they may scontrol release 500_0"]
    fake_slurm.answer("squeue", "500_0|PENDING||PartitionTimeLimit|x\n")
    why = _why(sweep)
    assert why.verdict.startswith("It waits for its turn. Its time limit is longer than its partition's")
    assert "hpc-trainer cancel " + why.run_id in why.advice[0]
    fake_slurm.answer("squeue", "500_0|PENDING||Priority|x\n")
    assert _why(sweep).advice == ["nothing: it starts by itself"]


def test_a_requeued_run_keeps_its_cause_beside_the_reason(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    sweep.start(resumed=0)
    sweep.end(state=RunState.REQUEUED, cause="preempted")
    fake_slurm.answer("squeue", "500_0|PENDING||BeginTime|x\n")
    why = _why(sweep)
    assert (why.state, why.cause, why.pending_reason) == (RunState.REQUEUED, "preempted", "BeginTime")
    assert why.evidence[0] == "preempted; Slurm's reason: BeginTime"
    assert "\n".join([why.verdict, *why.evidence, *why.advice]).count("two minutes") == 1


@pytest.mark.parametrize("row", ["", "500_0|RUNNING|n1|None|x\n"])
def test_a_run_that_does_not_wait_has_no_reason(sweep: SweepOnDisk, fake_slurm: FakeSlurm, row: str) -> None:
    fake_slurm.answer("squeue", row)
    assert read_status(sweep.paths).runs[0].pending_reason is None


def test_a_cancelled_run_waits_for_nothing(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    sweep.run()
    sweep.mark("CANCEL")
    fake_slurm.answer("squeue", "500_0|PENDING||Priority|x\n")
    (run,) = read_status(sweep.paths).runs
    assert (run.state, run.pending_reason, run.reason) == (RunState.CANCELLED, None, "cancelled")


SIGNS = {
    "slurmstepd: error: execve(): python3.99: No such file or directory": ("python3.99", "cluster.python"),
    "bash: line 9: exec: python3.99: not found": ("python3.99", "cluster.python"),
    "bash: line 9: /no/python: No such file or directory": ("/no/python", "cluster.python"),
    "ModuleNotFoundError: No module named 'torch'": ("torch", "pip install"),
    "/usr/bin/python3: No module named hpc_trainer": ("hpc_trainer", "pip install"),
    "/var/spool/slurmd/job7/slurm_script: line 26: module: command not found": ("`module`", "source"),
    'Lmod has detected the following error: The following module(s) are unknown: "cuda/99"': ("cuda/99", "avail"),
    "ERROR: Unable to locate a modulefile for 'cuda/99'": ("cuda/99", "avail"),
    "slurm_script: line 3: conda: command not found": ("conda", "conda.sh"),
    "CondaError: Run 'conda init' before 'conda activate'": ("conda", "conda.sh"),
    "EnvironmentNameNotFound: Could not find conda environment: trains": ("trains", "conda env list"),
    "EnvironmentLocationNotFound: Not a conda environment: /lab/envs/trains": ("/lab/envs/trains", "conda env list"),
    "slurm_script: line 3: nvcc: command not found": ("nvcc", "full path"),
    "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.": ("memory", "mem_gb_per_node"),
    "srun: error: n1: task 0: Killed": ("memory", "mem_gb_per_node"),
    "bash: /opt/env/bin/python: Permission denied": ("/opt/env/bin/python", "ls -ld"),
    "slurmstepd: error: execve(): /opt/python: Exec format error": ("processor", "cluster.python"),
    "python: /lib64/libc.so.6: version `GLIBC_2.34' not found (required by python)": ("GLIBC_2.34", "container"),
    "ImportError: libcudart.so.12: cannot open shared object file: No such file": ("libcudart.so.12", "module"),
    "srun: error: n1: task 0: Segmentation fault (core dumped)": ("Segmentation fault", "logs"),
    "srun: error: Unable to create step for job 7: More processors requested than permitted": (
        "More processors", "srun_args",
    ),
    "srun: unrecognized option '--nonsense=1'": ("--nonsense", "srun_args"),
    "OSError: [Errno 122] Disk quota exceeded": ("quota", "make room"),
}  # fmt: skip


@pytest.mark.parametrize("printed", SIGNS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_a_job_printed_last_is_told_with_what_helps(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, printed: str, when: str
) -> None:
    """Before the worker began, and after it: killed, it could write nothing itself."""
    began = f"{sweep.specs[0].run_id}: attempt 0, rank 0 logs to {sweep.run().log(0, 0)}"
    if when == "after":
        sweep.start(resumed=0)
    sweep.paths.scripts.mkdir(exist_ok=True)
    before = began if when == "after" else "loading"
    ends = "srun: error: n1: task 0: Exited with exit code 2"
    (sweep.paths.scripts / "500_0.out").write_text(f"{before}\n{printed}\n{ends}\n")
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "500_0|FAILED|2:0|n7\n")
    names, helps = SIGNS[printed]
    why = _why(sweep)
    assert names in why.verdict
    assert helps in why.advice[0] + why.advice[1]
    assert printed in why.evidence[0], "the line itself, before those of Slurm"
    assert f"  {ends}" in why.evidence
    assert printed in str(read_status(sweep.paths).runs[0].reason), "which `status` and the report show"
    hint = _hint(read_status(sweep.paths).runs[0])
    assert hint is not None
    assert "{" not in hint, "the report fills in the same"


def test_a_line_that_nobody_knows_stands_before_slurms_own(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    """After the worker began: killed, it could write nothing itself."""
    sweep.start(resumed=0)
    sweep.paths.scripts.mkdir(exist_ok=True)
    began = f"{sweep.specs[0].run_id}: attempt 0, rank 0 logs to {sweep.run().log(0, 0)}"
    ends = "srun: error: n1: task 0: Exited with exit code 2"
    (sweep.paths.scripts / "500_0.out").write_text(f"{began}\nthe licence has run out\n{ends}\n")
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "500_0|FAILED|2:0|n7\n")
    assert str(read_status(sweep.paths).runs[0].reason).endswith(": the licence has run out")


def test_what_a_job_printed_fills_in_nothing(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    sweep.paths.scripts.mkdir()
    (sweep.paths.scripts / "500_0.out").write_text("bash: {sweep}{0}: command not found\n")
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "500_0|FAILED|2:0|n7\n")
    assert "no program {sweep}{0}" in _why(sweep).verdict


def test_a_set_up_line_that_failed_is_the_cause(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    config = {**sweep.specs[0].config}
    config["cluster"] = {**config["cluster"], "setup": ["module purge", "module load cuda/99"]}
    append_specs(sweep.paths, [dataclasses.replace(sweep.specs[0], config=config)])
    sweep.paths.scripts.mkdir()
    lines = ["ERROR: Unable to locate a modulefile for 'cuda/99'", f"{SETUP_ENDED} 2: exit status 1"]
    (sweep.paths.scripts / "500_0.out").write_text("\n".join([*lines, ""]))
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "500_0|FAILED|1:0|n7\n")
    why = _why(sweep)
    assert why.evidence[0] == ("Slurm: FAILED (1:0): cluster.setup line 2 failed: `module load cuda/99`: " + lines[0])
    assert "there is no module cuda/99" in why.verdict


# Lmod 8.6.19
OF_LMOD = """Lmod has detected the following error: The following module(s) are unknown:
"cuda/99"

Please check the spelling or version number. Also try "module spider ..."
It is also possible your cache file is out-of-date; it may help to try:
  $ module --ignore_cache load "cuda/99"

Also make sure that all modulefiles written in TCL start with the string
#%Module
"""


def test_the_module_that_lmod_does_not_know_is_named(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    """Lmod writes the name into a line of its own, and much after it."""
    config = {**sweep.specs[0].config}
    config["cluster"] = {**config["cluster"], "environment": {"modules": ["cuda/99"]}}
    append_specs(sweep.paths, [dataclasses.replace(sweep.specs[0], config=config)])
    sweep.paths.scripts.mkdir()
    (sweep.paths.scripts / "500_0.out").write_text(f"{OF_LMOD}\n\n\n{SETUP_ENDED} 2: exit status 1\n")
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "500_0|FAILED|1:0|n7\n")
    why = _why(sweep)
    assert "there is no module cuda/99" in why.verdict
    assert "`module load cuda/99`: Lmod has detected the following error" in why.evidence[0]
    assert "cluster.environment.modules" in why.advice[0]
