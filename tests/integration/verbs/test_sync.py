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


# The digits, which stand still after 200 batches while a file says so: a fast machine would be done before the kill.
HELD_DATA = """
import time
from pathlib import Path
from hpc_trainer.config.schema.data import DigitsConfig
from hpc_trainer.training.data.digits import build as digits

class Held:
    def __init__(self, inner):
        self._inner, self._calls = inner, 0
        self.input_shape, self.num_classes = inner.input_shape, inner.num_classes
    def __len__(self):
        return len(self._inner)
    def __getitems__(self, indices):
        self._calls += 1
        while self._calls > 200 and Path("hold").exists():
            time.sleep(0.02)
        return self._inner.__getitems__(indices)

def build(split):
    return Held(digits(DigitsConfig(), split)) if split == "train" else digits(DigitsConfig(), split)
"""


@pytest.mark.long
def test_a_training_that_was_killed_is_one_run_with_each_step_once(local: LocalDriver) -> None:
    (local.folder / "held.py").write_text(HELD_DATA)
    (local.folder / "hold").touch()
    words = (
        "experiment=digits", "model=mlp", "train.num_steps=600", "monitor.log_every_steps=5", "tracker=mlflow",
        "checkpoint.every_steps=70", "train.eval_every_steps=0", "sweep_name=ours", "data=custom",
        "data._target_=held.build", "data.num_workers=0", "monitor.heartbeat_every_s=0", "--trust", "held",
    )  # fmt: skip
    training = local.start("train", *words)
    local.wait_for_step("ours", 150)
    local.wait_for_checkpoint("ours")
    local.signal_rank("ours", signal.SIGKILL)
    training.communicate(timeout=100)
    (local.folder / "hold").unlink()
    (before,) = local.json("sync", "ours")["runs"]
    assert before["num_new"] > 10
    local.train(*words)
    (resumed,) = {event["step"] for event in local.events("ours", "resume")} - {0}
    assert resumed < before["step"] < 600, "steps that were synced are done again"
    (after,) = local.json("sync")["runs"]
    assert (after["step"], after["num_new"]) == (600, 120 - before["num_new"])
    assert _steps(local, "ours") == list(range(5, 601, 5))
    assert "COMPLETED" in local.run("sync", "ours").stdout


@pytest.mark.long
def test_metrics_of_a_program_are_synced_too(local: LocalDriver) -> None:
    tell = 'for i in 1 2 3; do echo "{\\"step\\": $i, \\"loss\\": 0.$i}" >> "$HPC_TRAINER_METRICS"; done'
    (local.folder / "tell.sh").write_text(tell)
    local.train("--command", "sh tell.sh", "tracker=mlflow", "tracker.project=theirs", "sweep_name=program")
    assert local.json("sync", "program")["runs"][0]["num_new"] == 3
    assert _steps(local, "theirs") == [1, 2, 3]
    refused = local.run("train", "--command", "sh tell.sh", "tracker=tensorboard", check=False)
    assert (refused.returncode, "tracker=tensorboard has no effect" in refused.stderr) == (2, True)
