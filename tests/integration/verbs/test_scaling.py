"""Strong and weak scaling of an experiment over hardware, in one line each, with real ranks; and what report says."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.integration.conftest import LocalDriver

TINY = (
    "experiment=digits", "model=mlp", "model.hidden_dim=16", "cluster=local", "snapshot=off", "train.num_steps=30",
    "hardware=cpu_x1,cpu_x2",
)  # fmt: skip


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.parametrize(("kind", "batches"), [("weak", [64, 128]), ("strong", [64, 64])])
def test_an_experiment_over_hardware(local: LocalDriver, kind: str, batches: list[int]) -> None:
    # A profile too: of rank 0, also where it is one of two.
    profile = ("debug=profile", "monitor.profile_warmup_steps=2", "monitor.profile_steps=2")
    done = local.json("submit", *TINY, f"sweep={kind}_scaling", *profile, "--wait")
    assert done["status"]["counts"] == {"COMPLETED": 2}
    assert done["sweep"] == f"digits-{kind}_scaling"
    for run in done["status"]["runs"]:
        assert run["speed"]["samples_per_s"] > 0
    report = local.json("report", "--plain", "--warmup-steps", "10")
    (scaling,) = report["scaling"]
    assert (scaling["kind"], scaling["unit"]) == (kind, "samples/s")
    assert [(point["hardware"], point["ranks"]) for point in scaling["points"]] == [("cpu_x1", 1), ("cpu_x2", 2)]
    assert [point["global_batch_size"] for point in scaling["points"]] == batches
    assert [run["num_windows"] for run in report["runs"]] == [4, 4]  # logged every 5 steps, 10 of 30 left out
    assert scaling["points"][0]["efficiency"] == 1.0
    assert 0 < scaling["points"][1]["efficiency"] < 4
    folder = local.folder / "runs" / report["sweep"]
    page = (folder / "report.html").read_text()
    assert f"{kind.capitalize()} scaling" in page
    for run in report["runs"]:
        table = (folder / run["run_id"] / "profile.txt").read_text()
        assert table.startswith("profile: steps 3 to 4,")
        assert f"on rank 0 of {run['ranks']}" in table
        trace = json.loads(gzip.decompress((folder / run["run_id"] / "profile.trace.json.gz").read_bytes()))
        assert trace["traceEvents"]
