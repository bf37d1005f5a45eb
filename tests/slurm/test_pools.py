"""Pools on a real Slurm: a few jobs work through many runs, each run once, whatever happens to the jobs."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.journals import journal_records
from tests.mps_stand_in import write_stand_in
from tests.slurm.driver import Driver
from tests.slurm.testbed.cluster import SlurmCluster

# The program of a run: one line for each start, step and end; it holds a lock, so that two at once would be seen.
_PROGRAM = """#!/bin/bash
exec 9> "$HPC_TRAINER_RUN_DIR/lock"
flock -n 9 || { echo "two at once" >> "$HPC_TRAINER_RUN_DIR/told"; exit 1; }
at="$HPC_TRAINER_CHECKPOINTS/step"
step=$(cat "$at" 2> /dev/null || echo 0)
echo "start $step" >> "$HPC_TRAINER_RUN_DIR/told"
trap 'exit 75' TERM USR2
while [ $step -lt $1 ]; do
    sleep "$2" 9>&- & wait $!
    step=$((step + 1))
    echo $step > "$at.new"; mv "$at.new" "$at"
    echo "step $step" >> "$HPC_TRAINER_RUN_DIR/told"
done
echo "done" >> "$HPC_TRAINER_RUN_DIR/told"
"""


@pytest.fixture
def driver(slurm: SlurmCluster, tmp_path: Path) -> Driver:
    program = tmp_path / "work.sh"
    program.write_text(_PROGRAM)
    program.chmod(0o755)
    return Driver(slurm, tmp_path)


def _submit(driver: Driver, sweep: str, num_runs: int, steps: int, step_s: float, *words: str) -> Any:
    answer = driver.submit(
        "hardware=testbed_x1", "--command", f"./work.sh {steps} {step_s}", f"seed=range(0,{num_runs})",
        f"sweep_name={sweep}", *words,
    )  # fmt: skip
    assert len(answer["arrays"]) == 1, "one sbatch for all"
    return answer["arrays"][0]["job_id"]


def _folders(driver: Driver, sweep: str) -> list[Path]:
    return sorted(path.parent for path in (driver.runs / sweep).glob("*/attempt-000.jsonl") if "slot-" not in str(path))


def _told(folder: Path) -> list[str]:
    return (folder / "output" / "told").read_text().splitlines()


def _check_exactly_once(driver: Driver, sweep: str, steps: int) -> None:
    for folder in _folders(driver, sweep):
        told = _told(folder)
        assert "two at once" not in told, folder
        assert told.count("done") == 1, told
        # The power may go between a checkpoint and its line.
        assert [line for line in told if line.startswith("step")] == [
            f"step {step}" for step in range(1, steps + 1) if f"step {step}" in told
        ], told
        starts = journal_records(folder, "start")
        assert len({(start["job_id"], start["restart_count"]) for start in starts}) == len(starts)


def test_three_slots_run_forty_runs_each_once_with_one_sbatch(driver: Driver) -> None:
    job_id = _submit(driver, "forty", 40, 1, 0.05, "pool.jobs=3")
    rows = driver.wait_for_states("forty", "COMPLETED")
    assert len(rows) == 40
    assert {row["job_id"] for row in rows.values()} <= {f"{job_id}_{slot}" for slot in range(3)}
    assert max(Counter(row["job_id"] for row in rows.values()).values()) < 40, "one slot did all the work"
    _check_exactly_once(driver, "forty", 1)
    driver.slurm.wait_for(lambda: not driver.slurm.run("squeue", "-h").stdout.strip(), 60, "the end of the slots")
    assert driver.submit(
        "hardware=testbed_x1", "--command", "./work.sh 1 0.05", "seed=range(0,40)", "sweep_name=forty", "pool.jobs=3"
    )["submitted"] == 0  # fmt: skip


@pytest.mark.long
def test_a_slot_whose_node_dies_loses_its_run_to_another_slot(driver: Driver) -> None:
    job_id = _submit(driver, "power", 4, 40, 0.5, "pool.jobs=2", "hardware.whole_node=true")
    driver.slurm.wait_for(lambda: len(_folders(driver, "power")) >= 2, 120, "two runs at work")
    node = driver.slurm.job(f"{job_id}_1")["NodeList"]
    records = ((folder.name, journal_records(folder, "start")[-1]) for folder in _folders(driver, "power"))
    held = next(run for run, start in records if start["job_id"] == f"{job_id}_1")
    driver.slurm.cut_power(node)
    driver.slurm.give_up(node)
    driver.wait_for_states("power", "COMPLETED")
    starts = journal_records(driver.runs / "power" / held, "start")
    assert [start["job_id"] for start in starts] == [f"{job_id}_1", f"{job_id}_0"]
    _check_exactly_once(driver, "power", 40)


def test_a_preempted_slot_gives_its_run_back_and_comes_back_itself(driver: Driver) -> None:
    words = ("pool.jobs=1", "hardware.partition=preempt", "hardware.whole_node=true")
    job_id = _submit(driver, "preempted", 2, 30, 0.3, *words)
    driver.slurm.wait_for(lambda: len(_folders(driver, "preempted")) >= 1, 120, "a run at work")
    preemptor = driver.slurm.preempt()
    driver.slurm.wait_for_state(f"{job_id}_0", "PENDING", timeout_s=120)
    assert {row["state"] for row in driver.status("preempted").values()} == {"REQUEUED", "PENDING"}
    assert {row["pending_reason"] for row in driver.status("preempted").values()} != {None}
    driver.slurm.run("scancel", str(preemptor))
    driver.start_again(f"{job_id}_0")
    driver.wait_for_states("preempted", "COMPLETED")
    (slot,) = (driver.runs / "preempted").glob("slot-*")
    assert [end["action"] for end in journal_records(slot, "end")] in (["requeue", "none"], ["none", "none"])
    assert {len(journal_records(folder, "start")) for folder in _folders(driver, "preempted")} == {1, 2}
    _check_exactly_once(driver, "preempted", 30)


@pytest.mark.long
def test_cancel_of_a_run_ends_it_alone_and_cancel_of_the_sweep_ends_the_slots(driver: Driver) -> None:
    job_id = _submit(driver, "cancel", 8, 400, 0.25, "pool.jobs=2")
    driver.slurm.wait_for(lambda: len(_folders(driver, "cancel")) >= 2, 120, "two runs at work")
    first = _folders(driver, "cancel")[0].name
    driver.run("cancel", first)
    driver.slurm.wait_for(lambda: len(_folders(driver, "cancel")) >= 3, 60, "the next run in its place")
    rows = driver.status("cancel")
    assert rows[first]["state"] == "CANCELLED"
    assert Counter(row["state"] for row in rows.values())["RUNNING"] == 2
    assert driver.slurm.job_state(f"{job_id}_0") == driver.slurm.job_state(f"{job_id}_1") == "RUNNING"
    second = next(run_id for run_id, row in rows.items() if row["state"] == "RUNNING")
    assert driver.json("hold", second, "--save")["saving"] == [second]
    driver.slurm.wait_for(lambda: driver.status("cancel")[second]["state"] == "HELD", 60, "a run that saved and left")
    driver.slurm.wait_for(lambda: len(_folders(driver, "cancel")) >= 4, 60, "the next run in its place")
    assert driver.slurm.job_state(f"{job_id}_0") == driver.slurm.job_state(f"{job_id}_1") == "RUNNING"
    driver.run("cancel", "cancel")
    rows = driver.wait_for_states("cancel", "CANCELLED")
    driver.slurm.wait_for(lambda: not driver.slurm.run("squeue", "-h").stdout.strip(), 60, "the end of the slots")
    waiting = next(run for run in rows if not (driver.runs / "cancel" / run / "attempt-000.jsonl").exists())
    driver.run("retry", waiting)
    driver.slurm.wait_for(
        (driver.runs / "cancel" / waiting / "attempt-000.jsonl").exists, 120, "the retried run in a new pool"
    )
    driver.run("cancel", "cancel")


@pytest.mark.long
def test_a_slot_at_its_time_limit_brings_itself_back_and_nothing_is_lost(driver: Driver) -> None:
    words = ("pool.jobs=1", "hardware.time_limit_min=1", "cluster.signal_lead_s=15")
    job_id = _submit(driver, "limit", 3, 60, 0.5, *words)
    driver.slurm.wait_for_state(f"{job_id}_0", "PENDING", timeout_s=150)
    asked = 0.0

    def all_are_done() -> bool:
        nonlocal asked
        # Slurm holds a requeued job back for two minutes. Asked again at once, it would put off the start each time.
        if time.monotonic() - asked > 20 and driver.slurm.job_state(f"{job_id}_0") == "PENDING":
            driver.start_again(f"{job_id}_0")
            asked = time.monotonic()
        return len(list((driver.runs / "limit").glob("*/DONE"))) == 3

    driver.slurm.wait_for(all_are_done, 500, "the runs, in as many starts of the slot as they take")
    driver.wait_for_states("limit", "COMPLETED")
    _check_exactly_once(driver, "limit", 60)


@pytest.mark.long
def test_places_beside_each_other_have_their_own_gpus_and_cores(driver: Driver) -> None:
    show = "sh -c 'echo \"$CUDA_VISIBLE_DEVICES $(taskset -cp $$ | sed s/.*:.//)\" > {run.dir}/share; sleep 3'"
    driver.submit(
        "hardware=testbed_x1", "--command", show, "seed=range(0,4)", "sweep_name=beside", "pool.jobs=1",
        "pool.per_node=4",
    )  # fmt: skip
    driver.wait_for_states("beside", "COMPLETED")
    shares = [(folder / "output" / "share").read_text().split() for folder in _folders(driver, "beside")]
    assert len({gpus for gpus, _ in shares}) == 4, shares
    (slot,) = (driver.runs / "beside").glob("slot-*")
    ends = [json.loads(line) for line in (slot / "ends.jsonl").read_text().splitlines()]
    times = sorted((end["time"] - end["seconds"], end["time"]) for end in ends)
    assert times[-1][0] < times[0][1], "they were not beside each other"


def test_runs_share_gpus_by_a_service_that_ends_with_their_slot(driver: Driver) -> None:
    """Two slots of two GPUs and four places, one run that fails; then a slot that is cancelled."""
    told = write_stand_in(driver.folder / "bin")
    show = (
        "sh -c 'echo $CUDA_VISIBLE_DEVICES $CUDA_MPS_PIPE_DIRECTORY > {run.dir}/told; test {seed} != 1 || exit 3; "
        "sleep {params.s}'"
    )
    words = (
        "hardware=testbed_x1", "--command", show, "pool.per_node=4", "pool.per_gpu=2", "pool.mps=on",
        f"cluster.setup=['export PATH={driver.folder}/bin:$PATH']",
    )  # fmt: skip
    planned = driver.run("plan", "cluster=testbed", *words, "seed=range(0,8)", "params.s=3", "pool.jobs=2").stdout
    assert "2 slot(s) of 4 place(s), 2 on each GPU: 2 job(s) instead of 8, with 2 GPU(s)" in planned
    driver.submit(*words, "seed=range(0,8)", "params.s=3", "pool.jobs=2", "sweep_name=share")
    rows = driver.wait_for_states("share", "COMPLETED", "FAILED")
    assert Counter(row["state"] for row in rows.values()) == {"COMPLETED": 7, "FAILED": 1}
    driver.slurm.wait_for(lambda: told.read_text().splitlines().count("quit") == 2, 60, "the ends of the services")
    starts = [line.split() for line in told.read_text().splitlines() if line.startswith("start ")]
    gpus = {pipes: names.split(",") for _, names, pipes, _ in starts}
    assert [len(names) for names in gpus.values()] == [2, 2], "each slot has a service of its own, for its two GPUs"
    for folder in _folders(driver, "share"):
        (claim,) = (json.loads(path.read_text()) for path in (folder.parent / "turns").glob(f"{folder.name}.*"))
        ((gpu, pipes),) = (line.split() for line in _told(folder))
        assert gpu == gpus[pipes][claim["place"] // 2]
    begun = [start for folder in _folders(driver, "share") for start in journal_records(folder, "start")]
    assert {start["per_gpu"] for start in begun} == {2}
    used = sum(row["gpu_hours"] for row in driver.json("results", "share"))
    assert used == pytest.approx(sum(row["wall_s"] for row in rows.values()) / 2 / 3600, abs=0.0005)
    (use,) = driver.json("usage", "share")
    assert use["gpu_hours_used"] - use["gpu_hours_idle"] == pytest.approx(used, abs=0.004), "turns are a little longer"

    told.unlink()
    driver.submit(*words, "seed=range(2,6)", "params.s=600", "pool.jobs=1", "sweep_name=cancelled")
    driver.slurm.wait_for(lambda: len(_folders(driver, "cancelled")) == 4, 120, "the runs of the slot")
    driver.run("cancel", "cancelled")
    driver.slurm.wait_for(lambda: told.read_text().splitlines()[-1] == "quit", 120, "the end of the service")
    pipes = Path(told.read_text().split()[2])
    driver.slurm.wait_for(lambda: not pipes.parent.exists(), 30, "the end of its folder")


def test_more_places_than_a_node_has_are_refused_with_the_most_that_fit(driver: Driver) -> None:
    done = driver.run(
        "plan", "cluster=testbed", "hardware=testbed_x1", "--command", "true", "seed=0,1", "sweep_name=big",
        "pool.jobs=1", "pool.per_node=900", check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert re.search(
        r"pool\.per_node=900: a node .* has room for (\d+) such run\(s\).* Use pool\.per_node=\1 or auto", done.stdout
    )
