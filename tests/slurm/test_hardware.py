"""The cluster at hand, described and checked: what `hardware discover` writes plans, and runs to its end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.driver import Driver
from tests.slurm.testbed.cluster import SlurmCluster
from tests.slurm.testbed.spec import ACCOUNT

TINY = (
    "experiment=digits", "model=mlp", "train.num_steps=12", "schedule.warmup_steps=2", "train.eval_every_steps=0",
    "hardware.device=cpu",  # pretend GPUs
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("variant", ["", "noaccounting", "smallarray", "cancel"])
def test_what_was_discovered_plans_and_runs(
    variant: str, slurm_variant: Callable[[str], SlurmCluster], tmp_path: Path
) -> None:
    driver = Driver(slurm_variant(variant), tmp_path)
    name = driver.slurm.spec.cluster_name
    found = driver.json("hardware", "discover", "--partition", "main", "--partition", "preempt")
    assert [file["name"] for file in found["files"]] == [
        name, f"{name}/main_a100_x1", f"{name}/main_a100_x4", f"{name}/preempt_a100_x1", f"{name}/preempt_a100_x4",
    ]  # fmt: skip
    cluster, one, whole, preempted, _ = found["files"]
    facts = " ".join(cluster["comments"])
    assert f"An array may have {21 if variant == 'smallarray' else 1001} elements." in facts
    mode = "CANCEL" if variant == "cancel" else "REQUEUE"
    assert f"Jobs here may be preempted: {mode} after 20 s." in preempted["comments"]
    assert (one["values"]["cpus_per_gpu"], one["values"]["mem_gb_per_gpu"]) == (2, 1.95)
    accounts = [row["account"] for row in found["accounts"]]
    assert (ACCOUNT in accounts) == (variant != "noaccounting")
    assert not any(ACCOUNT in path.read_text() for path in (tmp_path / "site").rglob("*.yaml"))

    words = ["--config-dir", "site", *TINY, "sweep_name=discovered"]
    for file in (one, whole):
        check = driver.json("hardware", "check", file["name"], "--config-dir", "site")
        assert {line["verdict"] for line in check["lines"]} == {"ok"}
        plan = driver.json("plan", *words, f"hardware={file['name']}")
        assert plan["problems"] == []
    assert driver.json("submit", *words, f"hardware={one['name']}")["submitted"] == 1
    (run,) = driver.wait_for_states("discovered", "COMPLETED", "FAILED").values()
    assert run["state"] == "COMPLETED", driver.all_logs()

    driver.slurm.run("scontrol", "update", "nodename=n1", "state=drain", "reason=test")
    again = driver.json("hardware", "discover", "--partition", "main", "--partition", "preempt")
    assert {file["action"] for file in again["files"]} == {"same"}, "a drained node changes no figure"


@pytest.mark.long
def test_the_time_limit_of_a_partitions_qos_binds_as_plan_says(
    slurm_variant: Callable[[str], SlurmCluster], tmp_path: Path
) -> None:
    """Slurm accepts a longer job and never starts it; `sbatch --test-only` tells a start."""
    driver = Driver(slurm_variant("smallarray"), tmp_path)  # limits are enforced here
    slurm = driver.slurm
    reason = "QOSMaxWallDurationPerJobLimit"
    try:
        slurm.run("sacctmgr", "-i", "modify", "qos", "limited", "set", "MaxWall=2")
        slurm.run("scontrol", "update", "partitionname=main", "qos=limited")
        slurm.run("sbatch", "--time=3", "--mem=50", "--wrap=true")
        slurm.wait_for(lambda: reason in slurm.run("squeue", "-h", "-o", "%r").stdout, 60, reason)
        found = driver.json("hardware", "discover", "--partition", "main")
        assert {file["values"]["time_limit_min"] for file in found["files"][1:]} == {2}
        words = ("--config-dir", "site", *TINY, f"hardware={found['files'][1]['name']}", "sweep_name=long")
        assert driver.json("plan", *words)["problems"] == []
        refused = driver.run("plan", *words, "hardware.time_limit_min=3", check=False)
        assert refused.returncode
        assert "must be at most 2, the MaxWall of QOS limited, which partition main has" in refused.stdout
    finally:
        slurm.run("scancel", "--state=PENDING")
        slurm.run("scontrol", "update", "partitionname=main", "qos=")
        slurm.run("sacctmgr", "-i", "modify", "qos", "limited", "set", "MaxWall=-1")


@pytest.mark.long
def test_a_job_measures_two_nodes_with_two_ranks_each(slurm: SlurmCluster, tmp_path: Path) -> None:
    driver = Driver(slurm, tmp_path)
    copy = tmp_path / "site" / "hardware" / "copy.yaml"  # of the same name: the same figures
    copy.parent.mkdir(parents=True)
    copy.write_text("# A copy.\ndefaults:\n  - testbed_x4@_here_\n  - _self_\n")
    done = driver.run("hardware", "check", "copy", "--config-dir", "site", "cluster=testbed", "--run", "--no-internet",
                      "--json", timeout_s=400)  # fmt: skip
    told: dict[str, Any] = json.loads(done.stdout)
    measured = told["measured"]
    assert [(rank["rank"], rank["node"], rank["is_whole"]) for rank in measured["ranks"]] == [
        (0, "n1", True), (1, "n1", True), (2, "n2", True), (3, "n2", True),
    ]  # fmt: skip
    reduce = measured["all_reduce"]
    assert {scope: found["ranks"] for scope, found in reduce.items()} == {"node": 2, "across": 2, "all": 4}
    assert all(found["latency_s"] > 0 and found["bus_bytes_per_s"] > 0 for found in reduce.values())
    assert measured["write_bytes_per_s"]["slowest_node"] > 0
    assert all(abs(offset) < 2 for offset in measured["clock_offset_s"].values()), "all nodes are this machine"
    assert measured["has_internet"] is None
    assert {line["key"]: line["verdict"] for line in told["measured_lines"]}["ranks"] == "ok"
    kept = list((tmp_path / "state").rglob("testbed_x4.json"))
    assert json.loads(kept[0].read_text()) == measured
    gpt = ("experiment=gpt_bytes", "hardware=testbed_x4", "cluster=testbed")
    (expected,) = driver.json("plan", *gpt)["expected"]
    link = reduce["all"]
    assert expected["reduce_s"] == pytest.approx(
        link["latency_s"] + 1.5 * expected["reduce_bytes"] / link["bus_bytes_per_s"]
    )
    shown = driver.run("plan", *gpt).stdout
    assert f"Expected on testbed_x4, by hardware check testbed_x4 --run, {measured['day']}:" in shown


@pytest.mark.long
def test_a_job_that_cannot_start_is_cancelled_at_the_end_of_the_wait(slurm: SlurmCluster, tmp_path: Path) -> None:
    driver = Driver(slurm, tmp_path)
    for node in ("n1", "n2", "n3", "n4"):
        slurm.run("scontrol", "update", f"nodename={node}", "state=drain", "reason=test")
    done = driver.run("hardware", "check", "testbed_x1", "cluster=testbed", "--run", "--timeout", "5", check=False)
    assert done.returncode == 1
    assert "has not ended after 5 s, and is PENDING. It was cancelled." in done.stderr
    assert slurm.run("squeue", "-h").stdout.strip() == ""
