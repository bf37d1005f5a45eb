"""`verify preempt` on the local executor: whatever is done to a run, it goes on at the step that was saved."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.integration.conftest import LocalDriver

PROGRAMS = Path(__file__).parents[2] / "programs"
WORDS = (
    "experiment=digits", "cluster=local", "model=mlp", "train.num_steps=1000000", "train.eval_every_steps=0",
    "checkpoint.every_steps=50", "monitor.heartbeat_every_s=0.1", "sweep_name=preempted",
)  # fmt: skip


@pytest.mark.long
def test_every_interruption_passes_and_loses_at_most_an_interval(local: LocalDriver) -> None:
    local.run("submit", *WORDS)
    resumed = [0]
    for kind in ("preempt", "kill", "cancel", "nodefail"):
        local.wait_for_step("preempted", resumed[-1] + 60)
        report = local.json("verify", "preempt", "--kind", kind, "preempted")
        assert report["problems"] == [], (report, local.logs())
        resumed.append(report["resumed_step"])
        assert resumed[-1] >= resumed[-2] + 50, "the checkpoint of before is not the newest"
        if kind in ("preempt", "cancel"):
            assert report["resumed_step"] == report["saved_step"]
        else:
            assert report["saved_step"] is None
    assert [record["step"] for record in local.events("preempted", "resume")] == resumed
    local.run("cancel", "preempted")


@pytest.mark.long
@pytest.mark.parametrize(("program", "passes"), [("./count.sh {params.steps}", True), ("sh anew.sh", False)])
def test_a_program_has_to_find_its_own_checkpoint(local: LocalDriver, program: str, passes: bool) -> None:
    shutil.copy(PROGRAMS / "count.sh", local.folder)
    told = '{\\"step\\": $i}'
    loop = f'i=0; while true; do i=$((i + 1)); echo "{told}" >> "$HPC_TRAINER_METRICS"; sleep 0.05; done'
    (local.folder / "anew.sh").write_text(f"trap 'exit 75' TERM; {loop}\n")
    name = "found" if passes else "anew"
    words = (f"sweep_name={name}", "params.steps=100000", "monitor.heartbeat_every_s=0.1", "cluster=local")
    local.run("submit", "--command", program, *words)
    local.wait_for_step(name, 20)
    report = json.loads(local.run("verify", "preempt", name, "--json", check=False).stdout)
    assert [problem[:13] for problem in report["problems"]] == ([] if passes else ["it began anew"]), local.logs()
    local.run("cancel", name)


@pytest.mark.long
def test_preempt_wants_one_run_that_trains(local: LocalDriver) -> None:
    local.run("submit", *WORDS, "seed=0,1", "local.max_parallel=1")
    missing = local.run("verify", "preempt", "--kind", "kill", check=False)
    assert missing.returncode == 2
    assert "SWEEP|RUN" in missing.stderr
    both = local.run("verify", "preempt", "--kind", "kill", "mlp", check=False)
    assert both.returncode == 1
    assert "2 match" in both.stderr
    local.wait_for_step("preempted", 20)
    waiting = next(run["run_id"] for run in local.json("status", "preempted")["runs"] if run["state"] == "PENDING")
    refused = local.run("verify", "preempt", "--kind", "kill", waiting, check=False)
    assert refused.returncode == 1
    assert "needs a run that trains" in refused.stderr
    assert "PENDING" in refused.stderr
    local.run("cancel", "preempted")
    deadline = time.monotonic() + 60
    while local.json("status", "preempted")["counts"] != {"CANCELLED": 2}:
        assert time.monotonic() < deadline
        time.sleep(0.5)
