"""`hpc-trainer sync`: a training that was killed, and a program of a person's own, come to MLflow, each step once."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.integration.conftest import LocalDriver


@pytest.fixture(autouse=True)
def _readable(monkeypatch: pytest.MonkeyPatch) -> None:
    """For MLflow in this process; `hpc-trainer sync` sets it itself."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


def _steps(local: LocalDriver, project: str) -> list[int]:
    """Of the loss, as the one run of an experiment has it."""
    from mlflow.tracking import MlflowClient

    client: Any = MlflowClient(tracking_uri=(local.folder / "runs" / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name(project).experiment_id])
    assert run.info.status == "FINISHED"
    return [each.step for each in client.get_metric_history(run.info.run_id, "loss")]


def test_a_training_that_was_killed_is_one_run_with_each_step_once(local: LocalDriver) -> None:
    words = (
        "experiment=digits", "model=mlp", "train.num_steps=600", "monitor.log_every_steps=5", "tracker=mlflow",
        "checkpoint.every_steps=70", "train.eval_every_steps=0", "sweep_name=ours",
    )  # fmt: skip
    training = local.start("train", *words)
    local.wait_for_step("ours", 150)
    local.signal_rank("ours", signal.SIGKILL)
    training.communicate(timeout=100)
    (before,) = local.json("sync", "ours")["runs"]
    assert before["num_new"] > 10
    local.train(*words)
    (resumed,) = {event["step"] for event in local.events("ours", "resume")} - {0}
    assert resumed < before["step"], "steps that were synced are done again"
    (after,) = local.json("sync")["runs"]
    assert (after["step"], after["num_new"]) == (600, 120 - before["num_new"])
    assert _steps(local, "ours") == list(range(5, 601, 5))
    assert "COMPLETED" in local.run("sync", "ours").stdout


def test_metrics_of_a_program_are_synced_too(local: LocalDriver) -> None:
    tell = 'for i in 1 2 3; do echo "{\\"step\\": $i, \\"loss\\": 0.$i}" >> "$HPC_TRAINER_METRICS"; done'
    (local.folder / "tell.sh").write_text(tell)
    local.train("--command", "sh tell.sh", "tracker=mlflow", "tracker.project=theirs", "sweep_name=program")
    assert local.json("sync", "program")["runs"][0]["num_new"] == 3
    assert _steps(local, "theirs") == [1, 2, 3]
    refused = local.run("train", "--command", "sh tell.sh", "tracker=tensorboard", check=False)
    assert (refused.returncode, "tracker=tensorboard has no effect" in refused.stderr) == (2, True)
