"""What `status` shows of runs whose files another client writes: late perhaps, never false, and never acted upon."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.journals import journal_records
from tests.slurm.driver import Driver
from tests.slurm.shared_folder.watch import Watcher, falsehoods
from tests.slurm.test_submission import TINY
from tests.slurm.testbed.cluster import SlurmCluster

On = Callable[[str], SlurmCluster]
_KINDS = ("nfs3", "nfs4", "nfs60", "lustre")


@pytest.mark.long
@pytest.mark.parametrize("kind", _KINDS)
def test_runs_that_complete_are_never_shown_as_anything_else(on: On, kind: str, tmp_path: Path) -> None:
    """They are looked at from before they begin: their files are known to be missing when they are made."""
    driver = Driver(on(kind), tmp_path)
    words = (*TINY, "seed=range(0,6)", "sweep_name=short", "cluster.array_parallelism=3")
    blocker = driver.slurm.preempt(seconds=3)
    driver.slurm.wait_for_state(blocker, "RUNNING")
    driver.submit(*words)
    with Watcher(tmp_path / "looks.jsonl", (driver, "short")) as watcher:
        driver.wait_for_states("short", "COMPLETED")
        driver.slurm.wait_for(lambda: driver.slurm.job_processes() == [], 60, "the end of all jobs")
    wrong = falsehoods(watcher.looks(), driver.slurm.cache_age_s)
    assert wrong == [], "\n".join(map(str, wrong))
    ends = (driver.runs / "short" / "ends").glob("*.jsonl")
    recorded = [json.loads(line)["state"] for path in ends for line in path.read_text().splitlines()]
    assert recorded == [], "what is recorded stays, and every run has told its end itself"


@pytest.mark.long
@pytest.mark.parametrize("kind", ["nfs3", "nfs60"])
def test_submit_wait_ends_with_0_when_all_are_done(on: On, kind: str, tmp_path: Path) -> None:
    driver = Driver(on(kind), tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "hpc_trainer", "submit", *TINY, "seed=range(0,3)", "sweep_name=waited", "--wait"],
        cwd=tmp_path, env=driver.env, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert driver.json("submit", *TINY, "seed=range(0,3)", "sweep_name=waited")["submitted"] == 0


@pytest.mark.long
@pytest.mark.parametrize("kind", ["nfs3", "nfs60"])
def test_a_second_submit_right_after_the_end_submits_nothing(on: On, kind: str, tmp_path: Path) -> None:
    """The login shell has seen that DONE is missing; the jobs have left the queue."""
    driver = Driver(on(kind), tmp_path)
    words = (*TINY, "seed=range(0,2)", "sweep_name=again")
    driver.submit(*words)
    driver.slurm.wait_for(
        lambda: driver.status("again") and len(list((driver.runs / "again").glob("*/DONE"))) == 2, 240, "both DONE"
    )
    driver.slurm.wait_for(lambda: driver.slurm.job_processes() == [], 60, "the end of all jobs")
    for _ in range(3):
        assert driver.json("submit", "cluster=testbed", *words, "--retry-failed")["submitted"] == 0
    starts = [len(journal_records(done.parent, "start")) for done in (driver.runs / "again").glob("*/DONE")]
    assert starts == [1, 1]
