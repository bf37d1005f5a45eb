"""Many short runs on a real Slurm, looked at all the time: not one is shown in a state that it never was in."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from pathlib import Path

import pytest

from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.status import read_status
from tests.slurm.driver import Driver
from tests.slurm.test_submission import TINY
from tests.slurm.testbed.cluster import SlurmCluster

# What a run that ends well may be, in this order.
_WAY = ("PENDING", "RUNNING", "COMPLETED")


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_300_short_runs_are_never_shown_in_a_false_state(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The moment between the last word of a run and Slurm's is short: a look every few tenths of a second."""
    driver = Driver(slurm, tmp_path)
    driver.submit(*TINY, "seed=range(0,300)", "sweep_name=short", "cluster.array_parallelism=4")
    for name, value in driver.env.items():
        monkeypatch.setenv(name, value)
    sweep = SweepPaths(tmp_path / "runs" / "short")
    seen: dict[str, list[str]] = {}
    looks = [time.monotonic()]
    while True:
        status = read_status(sweep)
        looks.append(time.monotonic())
        assert status.notes == []
        for run in status.runs:
            states = seen.setdefault(run.run_id, [])
            if states[-1:] != [run.state.value]:
                states.append(run.state.value)
        if not status.has_active:
            break
        assert looks[-1] - looks[0] < 3400, status.counts
        time.sleep(0.05)
    gaps = sorted(after - before for before, after in itertools.pairwise(looks))
    print(
        f"{len(seen)} runs, {len(gaps)} looks in {looks[-1] - looks[0]:.0f} s, {gaps[len(gaps) // 2]:.2f} s apart "
        f"(median): {Counter(' '.join(states) for states in seen.values())}"
    )
    wrong = {run_id: states for run_id, states in seen.items() if states != sorted(set(states), key=_WAY.index)}
    assert wrong == {}
    assert {states[-1] for states in seen.values()} == {"COMPLETED"}
