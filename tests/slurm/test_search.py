"""A search on a real Slurm: slots draw its trials, one slot is requeued, and paused trials continue, programs' too."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.journals import journal_records
from tests.slurm.driver import Driver
from tests.slurm.testbed.cluster import SlurmCluster

_PROGRAM = """#!/bin/bash
trap 'exit 75' TERM USR2
sleep "$2" & wait $!
awk -v lr="$1" 'BEGIN { x = log(lr) / log(10) + 2; printf "{\\"step\\": 1, \\"loss\\": %f}\\n", x * x }' \\
    >> "$HPC_TRAINER_METRICS"
"""
_RUNGS = Path(__file__).parents[1] / "programs" / "rungs"
_LR = "tag(log,interval(1e-4,1e-1))"


@pytest.fixture
def driver(slurm: SlurmCluster, tmp_path: Path) -> Driver:
    program = tmp_path / "work.sh"
    program.write_text(_PROGRAM)
    program.chmod(0o755)
    return Driver(slurm, tmp_path)


def _search(driver: Driver, sweep: str) -> Any:
    return driver.json("status", sweep)["search"]


@pytest.mark.long  # a requeued job waits two minutes for its BeginTime
def test_slots_draw_each_trial_once_although_one_of_them_is_requeued(driver: Driver) -> None:
    words = ("hardware=testbed_x1", "--command", "./work.sh {params.lr} 2", "search=random", "search.metric=loss",
             "search.parallel=2", "sweep_name=tried", f"params.lr={_LR}")  # fmt: skip
    made = driver.submit(*words, "search.trials=8")
    assert made["trials"] == 8
    driver.slurm.wait_for(lambda: _search(driver, "tried")["drawn"] >= 3, 120, "the third trial")
    driver.slurm.run("scontrol", "requeue", f"{made['job_id']}_0")
    driver.slurm.wait_for(lambda: _search(driver, "tried")["is_over"], 300, "the end of the search")
    rows = driver.status("tried")
    assert [row["state"] for row in rows.values()] == ["COMPLETED"] * 8
    assert {row["job_id"] for row in rows.values()} <= {f"{made['job_id']}_{slot}" for slot in range(2)}
    best = driver.json("best", "tried")
    assert best["value"] == min(row["metrics"]["loss"] for row in rows.values())
    driver.slurm.wait_for(lambda: not driver.slurm.run("squeue", "-h").stdout.strip(), 240, "the end of the slots")
    again = driver.submit(*words, "search.trials=10")
    assert again["job_id"] != made["job_id"]
    driver.slurm.wait_for(lambda: _search(driver, "tried")["is_over"], 300, "two more trials")
    assert len(driver.status("tried")) == 10


def test_asha_pauses_trials_and_promotes_them_on_slurm(driver: Driver) -> None:
    driver.submit(
        "hardware=testbed_x1", "experiment=digits", "model=mlp", "train.num_steps=16", "schedule.warmup_steps=2",
        "train.eval_every_steps=4", "search=asha", "search.rungs=[4,8]", "search.eta=2", "search.trials=4",
        "search.metric=eval_accuracy", "search.parallel=2", "sweep_name=asha", f"optim.lr={_LR}",
    )  # fmt: skip
    driver.slurm.wait_for(lambda: _search(driver, "asha")["is_over"], 400, "the end of the search")
    rows = driver.status("asha")
    assert {(row["state"], row["step"]) for row in rows.values()} <= {("PAUSED", 4), ("PAUSED", 8), ("COMPLETED", 16)}
    assert _search(driver, "asha")["rungs"]["4"] == 4
    assert any(row["state"] == "COMPLETED" for row in rows.values())


def _played(driver: Driver, sweep: str) -> dict[str, tuple[int, list[str]]]:
    """Wait for the end of a search with rungs at 3 and 6 of 12 steps; return each run's starts and computed lines.

    Each run was stopped at its rungs, saved, and was started again only when it was promoted.
    """
    driver.slurm.wait_for(lambda: _search(driver, sweep)["is_over"], 500, "the end of the search")
    rows = driver.status(sweep)
    assert {row["state"] for row in rows.values()} == {"PAUSED", "COMPLETED"}
    found = {}
    for run_id, row in rows.items():
        folder = driver.runs / sweep / run_id
        starts, ends = (journal_records(folder, event) for event in ("start", "end"))
        assert [end["state"] for end in ends[:-1]] == ["PAUSED"] * (len(ends) - 1), "promoted from a pause"
        assert (len(starts), ends[-1]["state"]) == (len(ends), row["state"])
        lines = (folder / "output" / "checkpoints" / "computed.txt").read_text().splitlines()
        assert [int(line.split()[0]) for line in lines] == list(range(1, row["step"] + 1)), "no step is computed twice"
        assert (row["state"] == "COMPLETED") == (row["step"] == 12)
        found[run_id] = len(starts), lines
    assert max(starts for starts, _ in found.values()) >= 2, "a run was promoted"
    assert driver.json("best", sweep)["run_id"] in {run for run, row in rows.items() if row["state"] == "COMPLETED"}
    return found


_ASHA = (
    "hardware=testbed_x1", "search=asha", "search.rungs=[3,6]", "search.eta=2", "search.trials=4", "search.metric=loss",
    "search.parallel=2",
)  # fmt: skip


@pytest.mark.long
def test_a_program_is_stopped_at_rungs_and_continues_from_its_own_checkpoint(driver: Driver) -> None:
    shutil.copy(_RUNGS / "work.py", driver.folder)
    command = ("--command", "python work.py {params.lr} {run.checkpoints}")
    made = driver.submit(*_ASHA, *command, "sweep_name=program", f"params.lr={_LR}")
    assert len(_played(driver, "program")) == 4
    jobs = {row["job_id"] for row in driver.status("program").values()}
    assert jobs <= {f"{made['job_id']}_{slot}" for slot in range(2)}, "in the two slots"


@pytest.mark.long
def test_a_hydra_app_is_stopped_at_rungs_and_continues_from_its_own_checkpoint(driver: Driver) -> None:
    shutil.copytree(_RUNGS, driver.folder, dirs_exist_ok=True)
    driver.run("submit", "cluster=testbed", *_ASHA, "sweep_name=app", "--app", "train.py", f"optim.lr={_LR}",
               "model=small,big")  # fmt: skip
    found, rows = _played(driver, "app"), driver.status("app")
    for run_id, (_, lines) in found.items():
        assert {f"{float(line.split()[1]):.6g}" for line in lines} == {rows[run_id]["axes"]["params.optim.lr"]}
