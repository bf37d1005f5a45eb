"""The ledger of a run that is preempted three times: every second that Slurm gave it, in one class."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.scenarios.scene import Scene
from tests.slurm.testbed.cluster import SlurmCluster

LATE, STEPS = 3.0, 400


def _elapsed(slurm: SlurmCluster, job_id: str) -> list[int]:
    """Seconds of each start of the job, as sacct has them."""
    answer = slurm.run("sacct", "-n", "-P", "-X", "-D", "-S", "now-1hours", "-o", "ElapsedRaw,End", "-j", job_id)
    rows = [row.split("|") for row in answer.stdout.splitlines()]
    return [int(seconds) for seconds, end in rows if end != "Unknown"]


def _why(scene: Scene) -> dict[str, Any]:
    told: dict[str, Any] = scene.driver.json("why", scene.run.folder.name)
    return told


@contextlib.contextmanager
def _held(scene: Scene) -> Iterator[None]:
    """Rank 0 stands still, whatever wakes it: a preemption begins with SIGCONT."""
    pid, ended = scene.run.records("start")[-1]["pid"], threading.Event()

    def hold() -> None:
        with contextlib.suppress(ProcessLookupError):
            while not ended.wait(0.001):
                os.kill(pid, signal.SIGSTOP)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.long
def test_every_second_of_three_preemptions_is_in_one_class(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Two with a save, one in which rank 0 stands still until Slurm kills it: its steps are done again."""
    scene = Scene(slurm, tmp_path, "testbed_x1")
    scene.submit(f"train.num_steps={STEPS}", partition="preempt0", pace_s=0.05)
    killed = 1
    for attempt in range(3):
        scene.wait_for_step(70 * (attempt + 1) + (35 if attempt == killed else 0), attempt)
        with _held(scene) if attempt == killed else contextlib.nullcontext():
            preemptor = scene.preempt()
            scene.wait_for_job("PENDING")
        slurm.run("scancel", str(preemptor))
        scene.start_now()
    scene.wait_for_step(300, 3)
    scene.full_speed()
    scene.wait_until_done()
    scene.wait_for(lambda: len(_elapsed(slurm, scene.run.job_id)) == 4, "four ends in the accounting", 60)
    elapsed = _elapsed(slurm, scene.run.job_id)

    before = _why(scene)["ledger"]
    attempts = before["attempts"]
    assert [each["attempt"] for each in attempts] == [0, 1, 2, 3]
    assert before["is_by_slurm"]
    print(json.dumps(before, indent=1), elapsed)
    for each, seconds in zip(attempts, elapsed, strict=True):
        assert sum(each["seconds"].values()) == pytest.approx(each["elapsed_s"], abs=0.01)
        assert each["elapsed_s"] == pytest.approx(seconds, abs=1.0)  # Slurm's seconds are whole ones
        assert each["unknown_s"] == 0
    total = sum(seconds for each in attempts for seconds in each["seconds"].values())
    error = abs(total - sum(elapsed)) / sum(elapsed)
    assert error <= 0.005, (total, elapsed)

    # What processes measured themselves is nearly all of it: little is left to what no span can see.
    lines = [json.loads(line) for line in (scene.run.folder / "ledger.jsonl").read_text().splitlines()]
    measured = {line["attempt"]: sum(line["seconds"].values()) for line in lines}
    assert sorted(measured) == [0, 1, 2, 3]
    print("measured", measured, "Elapsed", elapsed)
    for index, seconds in enumerate(elapsed):
        limit = 12.0 if index == killed else LATE  # KillWait is 6 s
        assert seconds - measured[index] < limit, (index, seconds, measured)

    kinds = [each["seconds"] for each in attempts]
    assert all(each["imports"] > 0 and each["start_up"] > 0 and each["step"] > 0 for each in kinds)
    assert kinds[killed]["redone"] > 1.0
    assert all(each.get("redone", 0.0) < kinds[killed]["redone"] for index, each in enumerate(kinds) if index != killed)
    assert all("restore" in each for each in kinds[1:])
    assert kinds[3]["evaluation"] > 0
    assert all("hang" not in each for each in kinds)
    # The pace of the scene is in its batches.
    assert 0 < before["goodput"] < before["seconds"]["data_wait"] / before["elapsed_s"] < 1

    (row,) = scene.driver.json("usage", "scene", "--by", "sweep,person,account")
    cores = int(slurm.job(scene.run.job_id)["NumCPUs"])
    assert (row["jobs"], row["is_by_slurm"]) == (4, True)
    assert row["core_hours_used"] == pytest.approx(sum(elapsed) * cores / 3600, rel=0.01)
    assert row["core_hours_redone"] == pytest.approx(before["seconds"]["redone"] * cores / 3600, rel=0.01)
    assert row["waiting_h"] > 0
    assert row["core_hours_requested"] > row["core_hours_used"]
    by_month = scene.driver.json("usage", "scene", "--by", "month")
    assert sum(each["core_hours_used"] for each in by_month) == pytest.approx(row["core_hours_used"], rel=0.01)

    # The accounting is asked once in the life of an attempt: it forgets.
    again = scene.driver.json("status", "scene")["runs"][0]
    assert again["goodput"] == before["goodput"]
    assert _why(scene)["ledger"] == before
