"""Runs that wait or end for Slurm's reasons: `why` names each, and the corpus of the unit tests is made of them."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.failures.test_failing_programs import CORPUS, plain
from tests.programs.failing import CGROUPS
from tests.slurm.driver import Driver
from tests.slurm.test_first_day import TINY
from tests.slurm.testbed.cluster import SlurmCluster
from tests.unit.operate.test_failures import commands_in


@pytest.fixture
def driver(slurm: SlurmCluster, tmp_path: Path) -> Driver:
    return Driver(slurm, tmp_path)


@pytest.fixture
def closed(slurm: SlurmCluster) -> Iterator[None]:
    """The partition `main` starts no jobs."""
    slurm.run("scontrol", "update", "partitionname=main", "state=down")
    yield
    slurm.run("scontrol", "update", "partitionname=main", "state=up", "maxtime=1-00:00:00")


def _seen(driver: Driver, sweep: str, label: str, records: list[dict[str, Any]]) -> None:
    """`why` names the reason, what it advises of Slurm's commands exists, and the case joins the records."""
    run = driver.only_run(sweep)
    why = driver.json("why", run["run_id"], "--sweep", sweep)
    assert why["diagnosis"] == label, why
    for words in (line.partition(":")[0].split() for line in why["advice"]):
        if words[0] in ("sinfo", "squeue", "scontrol"):
            done = driver.slurm.run(*words[:2], check=False)
            assert "unrecognized" not in done.stderr + done.stdout, words
    for command in commands_in(why["advice"]):
        assert driver.run(*shlex.split(command)[1:2], "--help").returncode == 0, command
    waits = driver.slurm.run("squeue", "-h", "-j", run["job_id"], "-o", "%T|%r", check=False).stdout.strip()
    is_waiting = waits.startswith("PENDING")
    ended: list[str] = []

    def has_ended() -> bool:
        fields = ("-n", "-P", "-X", "-o", "State,ExitCode")
        ended[:] = driver.slurm.run("sacct", *fields, "-j", run["job_id"]).stdout.strip().split("|")
        return len(ended) == 2

    if not is_waiting:
        driver.slurm.wait_for(has_ended, 60, f"the end of {run['job_id']} in the accounting")
    folder = driver.run_folder(sweep)
    kept = ("attempt-*.jsonl", "logs/*.rank-0.log", "logs/*.failure.json", "heartbeat.json")
    names = [path.relative_to(folder) for pattern in kept for path in folder.glob(pattern)]
    # The unit tests lay the run out as an element of job 500.
    texts = {str(name): plain((folder / name).read_text()) for name in names}
    files = {name: re.sub(rf"\b{run['job_id']}\b", "500_0", text) for name, text in texts.items()}
    output = driver.runs / sweep / "slurm" / f"{run['job_id']}.out"
    if output.exists() and not is_waiting:
        files["slurm/500_0.out"] = plain(output.read_text())
    state, _, reason = waits.partition("|")
    answers = {
        "squeue": f"500_0|{state}||{reason}|x\n" if is_waiting else "",
        "sacct": "" if is_waiting else f"500_0|{ended[0].split()[0]}|{ended[1]}|n1\n",
    }
    records.append({
        "case": f"slurm_{label}" if is_waiting else f"slurm_{sweep}", "label": label,
        "source": "tests/slurm/test_failures.py", "overrides": ["cluster=slurm"], "files": files,
        "answers": answers,
    })  # fmt: skip


@pytest.mark.long
@pytest.mark.usefixtures("closed")
def test_what_a_run_waits_for_and_how_it_ends(driver: Driver) -> None:
    """With HPC_TRAINER_UPDATE_GOLDEN=1 the corpus gets these cases anew."""
    records: list[dict[str, Any]] = []
    driver.submit(*TINY, "sweep_name=waits")
    job_id = driver.only_run("waits")["job_id"]
    run = driver.slurm.run

    def wait_for(reason: str) -> None:
        driver.slurm.wait_for(lambda: driver.slurm.job(job_id)["Reason"] == reason, 60, reason)
        _seen(driver, "waits", reason, records)

    wait_for("PartitionDown")
    run("scontrol", "update", "partitionname=main", "maxtime=00:01:00", "state=up")
    wait_for("PartitionTimeLimit")
    run("scontrol", "uhold", job_id)
    wait_for("JobHeldUser")
    run("scontrol", "release", job_id)
    run("scontrol", "hold", job_id)
    wait_for("JobHeldAdmin")
    run("scontrol", "update", "partitionname=main", "maxtime=1-00:00:00", "state=down")
    run("scontrol", "update", f"jobid={job_id}", "starttime=now+3600")
    run("scontrol", "release", job_id)
    wait_for("BeginTime")
    run("scancel", job_id)
    driver.wait_for_states("waits", "CANCELLED")
    assert driver.json("why", "waits")["diagnosis"] == "cancelled"
    run("scontrol", "update", "partitionname=main", "state=up")
    driver.submit(*TINY, "sweep_name=module", "cluster.setup=['module load cuda/99']")
    driver.submit(*TINY, "sweep_name=python", "cluster.python=/no/such/python")
    for sweep, label in (("module", "no_modules"), ("python", "missing_file")):
        driver.wait_for_states(sweep, "FAILED")
        _seen(driver, sweep, label, records)
    broken = driver.slurm.submit("exit 1", cwd=driver.folder)
    driver.slurm.wait_for_state(broken, "FAILED")
    run("scontrol", "update", "partitionname=main", "state=down")
    driver.submit(*TINY, "sweep_name=follows")
    job_id = driver.only_run("follows")["job_id"]
    run("scontrol", "update", f"jobid={job_id}", f"dependency=afterok:{broken}")
    driver.slurm.wait_for(lambda: driver.slurm.job(job_id)["Reason"] == "DependencyNeverSatisfied", 60, "the reason")
    _seen(driver, "follows", "DependencyNeverSatisfied", records)
    _keep(records)


@pytest.mark.long
def test_a_lost_node_and_a_time_limit_without_progress(driver: Driver) -> None:
    """With HPC_TRAINER_UPDATE_GOLDEN=1 the corpus gets these cases anew."""
    records: list[dict[str, Any]] = []
    slurm, words = driver.slurm, ("--command", "sleep 600", "hardware=testbed_x1")
    driver.submit(*words, "sweep_name=lost")
    slurm.wait_for(lambda: driver.attempts("lost", "start"), 120, "the start")
    job_id = driver.only_run("lost")["job_id"]
    slurm.run("scontrol", "update", f"jobid={job_id}", "requeue=0")  # else it comes back by itself
    node = slurm.job(job_id)["NodeList"]
    slurm.cut_power(node)
    slurm.give_up(node)
    driver.wait_for_states("lost", "NODE_FAIL")
    _seen(driver, "lost", "node_fail", records)
    program = driver.folder / "slow.sh"
    program.write_text("""echo '{"step": 1, "loss": 2.0}' >>"$HPC_TRAINER_METRICS"\nsleep 600\n""")
    limit = ("hardware=testbed_x1", "hardware.time_limit_min=1", "cluster.max_no_progress=1", "sweep_name=limit")
    driver.submit("--command", f"sh {program}", *limit)
    for number in range(2):
        slurm.wait_for(lambda number=number: len(driver.attempts("limit", "end")) > number, 200, "the time limit")
        assert driver.attempts("limit", "end")[number]["cause"] == "timeout"
        driver.start_again(driver.only_run("limit")["job_id"])
    driver.wait_for_states("limit", "FAILED")
    _seen(driver, "limit", "no_progress", records)
    _keep(records)


# Five steps an attempt, then it sleeps into the time limit; the next attempt goes on where this one was.
_FIVE_MORE = """\
step=$(cat reached 2>/dev/null || echo 0); last=$((step + 5))
while [ $step -lt $last ]; do
    step=$((step + 1)); echo $step >reached
    echo "{\\"step\\": $step, \\"num_steps\\": 40, \\"loss\\": 2.0}" >>"$HPC_TRAINER_METRICS"
done
sleep 600
"""


@pytest.mark.long
def test_a_time_limit_that_ends_attempt_after_attempt_with_progress(driver: Driver) -> None:
    """With HPC_TRAINER_UPDATE_GOLDEN=1 the corpus gets this case anew."""
    records: list[dict[str, Any]] = []
    (driver.folder / "five.sh").write_text(_FIVE_MORE)
    words = ("hardware=testbed_x1", "hardware.time_limit_min=1", "sweep_name=advances")
    driver.submit("--command", "sh five.sh", *words)
    for number in range(2):
        driver.slurm.wait_for(
            lambda number=number: len(driver.attempts("advances", "end")) > number, 200, "the time limit"
        )
        assert driver.attempts("advances", "end")[number]["cause"] == "timeout"
        if number == 0:
            driver.start_again(driver.only_run("advances")["job_id"])
    job_id = driver.only_run("advances")["job_id"]
    driver.slurm.wait_for(lambda: driver.slurm.job(job_id)["Reason"] == "BeginTime", 60, "its return to the queue")
    _seen(driver, "advances", "timeouts", records)
    why = driver.json("why", "advances")
    said = "each made some 5 steps: for the other 30 steps it needs 6 more"
    assert said in " ".join(why["evidence"]), why["evidence"]
    assert any("hardware.time_limit_min=4: it continues with more time" in line for line in why["advice"]), why
    driver.run("cancel", "advances")
    _keep(records)


@pytest.mark.long
@pytest.mark.skipif(not os.access(CGROUPS, os.W_OK), reason=f"{CGROUPS}: no memory controller of cgroup v1 to write")
def test_slurms_own_control_group_ends_a_run_that_needs_too_much_memory(
    slurm_variant: Callable[[str], SlurmCluster], tmp_path: Path
) -> None:
    """With HPC_TRAINER_UPDATE_GOLDEN=1 the corpus gets this case anew."""
    records: list[dict[str, Any]] = []
    driver = Driver(slurm_variant("cgroups"), tmp_path)
    eats = "def main(*_):\n    kept = []\n    while True:\n        kept.append(bytearray(50_000_000))\n"
    (tmp_path / "eats.py").write_text(f"{eats}\n\nif __name__ == '__main__':\n    main()\n")
    words = ("hardware=testbed_x1", "hardware.mem_gb_per_node=1")
    driver.submit("--command", f"{sys.executable} {tmp_path}/eats.py", *words, "sweep_name=program")
    driver.submit("--trust", "eats", "train.main=eats.main", *words, "sweep_name=rank")
    driver.submit(*TINY, *words[1:], f"cluster.setup=['{sys.executable} {tmp_path}/eats.py']", "sweep_name=shell")
    for sweep in ("program", "rank", "shell"):  # the kernel kills the program, the rank, or a child of the batch shell
        driver.wait_for_states(sweep, "FAILED", "OUT_OF_MEMORY")
        _seen(driver, sweep, "host_memory", records)
    told = [record["answers"]["sacct"].split("|")[1] for record in records]
    assert told == ["FAILED", "FAILED", "OUT_OF_MEMORY"]  # Slurm 22.05 tells the end of the batch shell
    _keep(records)


def _keep(records: list[dict[str, Any]]) -> None:
    """Let the records replace those of their cases in the corpus, if it is recorded anew."""
    if os.environ.get("HPC_TRAINER_UPDATE_GOLDEN"):
        names = {record["case"] for record in records}
        kept = [line for line in CORPUS.read_text().splitlines() if json.loads(line)["case"] not in names]
        CORPUS.write_text("".join(f"{line}\n" for line in (*kept, *map(json.dumps, records))))
