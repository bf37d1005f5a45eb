"""`hpc-trainer profile` on a run that trains in this moment, on two ranks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.integration.conftest import LocalDriver

WORDS = (
    "experiment=digits", "cluster=local", "hardware=cpu_x2", "model=mlp", "train.num_steps=1000000",
    "train.eval_every_steps=0", "monitor.heartbeat_every_s=0.2", "sweep_name=live",
)  # fmt: skip


@pytest.mark.long
@pytest.mark.dist
def test_a_live_run_is_watched_on_both_ranks_and_goes_on(local: LocalDriver) -> None:
    local.run("submit", *WORDS)
    local.wait_for_step("live", 20)
    folder = local.run_folder("live")
    document = local.json("profile", folder.name, "--steps", "4", "--ranks", "0,1")
    assert [(each["rank"], each["num_steps"], each["device"]) for each in document["ranks"]] == [
        (0, 4, "cpu"), (1, 4, "cpu"),
    ]  # fmt: skip
    assert all(sum(each["work"].values()) > 0 for each in document["ranks"])
    assert "communication" in document["ranks"][0]["work"]
    assert "on rank 1 of 2" in (folder / "profile" / "rank-1.txt").read_text()
    assert not (folder / "profile" / "request.json").exists()
    step = json.loads((folder / "heartbeat.json").read_text())["step"]
    local.wait_for_step("live", step + 20)
    local.run("cancel", "live")
    refused = local.run("profile", folder.name, check=False)
    assert refused.returncode == 1
    assert "only a running run can be profiled" in refused.stderr
