"""What runs have logged is in W&B and MLflow, each step once: over attempts, rollbacks, and syncs that were killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.config.schema.output import SYNCED, TrackerConfig, TrackerName
from hpc_trainer.errors import ConfigError, RunStateError
from hpc_trainer.operate import sync as driver
from hpc_trainer.operate import sync as to_wandb
from hpc_trainer.operate.sync import SyncResult, ToMlflow, ToWandb, read_logged, sync_runs
from hpc_trainer.record.metrics import MetricsLog
from hpc_trainer.record.states import DONE, RunState
from hpc_trainer.record.status import read_status
from tests.unit.operate.wandb_server import Run, WandbServer, wandb_server
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk

pytestmark = pytest.mark.usefixtures("no_slurm")
API_KEY = "0123456789" * 4


class Story:
    """A sweep whose first run logs, is preempted, goes on from an earlier step, and is done."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.sweep = SweepOnDisk(folder / "runs" / "tracked", make_specs(2, *words))
        self.run_id = self.sweep.specs[0].run_id
        self.paths = self.sweep.run()

    def first_attempt(self) -> None:
        """Steps 1 to 6; it dies after it saved step 3."""
        self.sweep.start(attempt=0)
        self._log(1, 6)
        self.sweep.end(attempt=0, state=RunState.PREEMPTED, cause="preemption", step=6, saved_step=3)

    def second_attempt(self) -> None:
        """Steps 4 to 9, the last with an evaluation, and done."""
        self.sweep.start(attempt=1, resumed=3)
        MetricsLog(self.paths.metrics).rewind(3)
        self._log(4, 9)
        MetricsLog(self.paths.metrics).append(9, {"eval_loss": 0.5, "time": 1e9 + 9})
        self.sweep.end(attempt=1, state=RunState.COMPLETED, cause="completed", step=9, saved_step=9)
        self.paths.result.write_text(json.dumps({"run_id": self.run_id, "step": 9, "metrics": {"eval_loss": 0.5}}))
        self.paths.marker(DONE).touch()

    def _log(self, first: int, last: int) -> None:
        log = MetricsLog(self.paths.metrics)
        for step in range(first, last + 1):
            log.append(step, {"loss": 1 / step, "time": 1e9 + step})

    def sync(self, to: TrackerName | None = None) -> SyncResult:
        return sync_all(self.sweep, to)


def sync_all(sweep: SweepOnDisk, to: TrackerName | None = None) -> SyncResult:
    status = read_status(sweep.paths, is_look=True)
    return sync_runs(status, [*status.specs], to)


LOSSES = {step: 1 / step for step in range(1, 10)}


# MLflow


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    """No server of the person's own; what `sync` sets for its own process ends with the test."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    for name in ("MLFLOW_ALLOW_FILE_STORE", "WANDB_ERROR_REPORTING", "WANDB_SILENT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def mlflow_story(tmp_path: Path) -> Story:
    return Story(tmp_path, "tracker=mlflow", "experiment=digits", "optim.lr=0.003")


def mlflow_client(story: Story) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=(story.sweep.paths.folder.parent / "mlruns").as_uri())


def mlflow_run(story: Story) -> Any:
    """The one run of the one experiment."""
    client = mlflow_client(story)
    (run,) = client.search_runs([client.get_experiment_by_name("tracked").experiment_id])
    return run


def mlflow_history(story: Story, name: str) -> list[tuple[int, float]]:
    run = mlflow_run(story)
    return [(each.step, each.value) for each in mlflow_client(story).get_metric_history(run.info.run_id, name)]


@pytest.mark.long
def test_mlflow_has_one_run_over_all_attempts_and_each_step_once(mlflow_story: Story) -> None:
    mlflow_story.first_attempt()
    (told,) = mlflow_story.sync().synced
    assert (told.step, told.num_new, told.state) == (6, 6, RunState.PREEMPTED)
    assert mlflow_run(mlflow_story).info.status == "KILLED"
    mlflow_story.second_attempt()
    result = mlflow_story.sync()
    assert [(each.step, each.num_new) for each in result.synced] == [(9, 3)]
    assert result.num_not_begun == 1
    assert mlflow_story.sync().synced[0].num_new == 0, "what is complete there is not looked at again"

    run = mlflow_run(mlflow_story)
    assert mlflow_history(mlflow_story, "loss") == list(LOSSES.items())
    assert mlflow_history(mlflow_story, "eval_loss") == [(9, 0.5)]
    assert (run.info.status, run.info.run_name) == ("FINISHED", mlflow_story.run_id)
    assert (run.data.params["optim.lr"], run.data.params["model.name"]) == ("0.003", "cnn")
    assert not [key for key in run.data.params if key.startswith(("cluster", "paths"))]
    tags = {key: run.data.tags[f"hpc_trainer.{key}"] for key in ("sweep", "run_id", "attempts", "state")}
    assert tags == {"sweep": "tracked", "run_id": mlflow_story.run_id, "attempts": "2", "state": "COMPLETED"}


def test_a_sync_to_mlflow_that_was_killed_goes_on_where_it_was(
    mlflow_story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.store.tracking.file_store import FileStore

    mlflow_story.first_attempt()
    mlflow_story.second_attempt()
    write, written = FileStore._log_run_metric, []

    def die_in_the_middle(store: FileStore, info: Any, metric: Any) -> None:
        if len(written) == 4:
            raise KeyboardInterrupt
        written.append(metric.step)
        write(store, info, metric)

    with monkeypatch.context() as patch:
        patch.setattr(FileStore, "_log_run_metric", die_in_the_middle)
        with pytest.raises(KeyboardInterrupt):
            mlflow_story.sync()
    assert [step for step, _ in mlflow_history(mlflow_story, "loss")] == [1, 2, 3, 4]
    assert mlflow_story.sync().synced[0].num_new == 5
    assert mlflow_history(mlflow_story, "loss") == list(LOSSES.items())


def test_a_run_that_begins_anew_is_another_one_there(mlflow_story: Story) -> None:
    mlflow_story.first_attempt()
    mlflow_story.sync()
    mlflow_story.paths.folder.rename(mlflow_story.paths.folder.with_name("old"))
    mlflow_story.sweep.run()
    mlflow_story.first_attempt()
    assert mlflow_story.sync().synced[0].num_new == 6
    client = mlflow_client(mlflow_story)
    assert len(client.search_runs([client.get_experiment_by_name("tracked").experiment_id])) == 2


def test_a_run_at_work_keeps_its_last_step_back(mlflow_story: Story) -> None:
    """Its evaluation may come in a line of its own, and W&B takes no second word about a step."""
    mlflow_story.sweep.start(attempt=0, executor="local", pid=os.getpid())
    mlflow_story._log(1, 3)
    (told,) = mlflow_story.sync().synced
    assert (told.state.is_active, told.step) == (True, 2)
    assert mlflow_run(mlflow_story).info.status in ("RUNNING", "SCHEDULED")


def test_every_metric_has_a_name_of_its_own_in_a_folder_of_mlflow(tmp_path: Path) -> None:
    """`a,b` and `a;b` were one metric; `loss` beside `loss/train`, or a name with `..`, ended the sync of the run."""
    story = Story(tmp_path, "tracker=mlflow", "experiment=digits")
    story.sweep.start(attempt=0)
    names = [
        "loss", "loss/train", "a,b", "a;b", "a_b", "acc@1", "x/../../../../evil", "/abs", "..", ".", "x" * 300,
        "x" * 299 + "y", "p/q", "p/q/", "p//q",
    ]  # fmt: skip
    MetricsLog(story.paths.metrics).append(1, {"time": 1e9, **{name: float(i) for i, name in enumerate(names)}})
    story.sweep.end(attempt=0, state=RunState.COMPLETED, cause="completed", step=1, saved_step=1)
    story.paths.marker(DONE).touch()
    assert not story.sync().failed
    found = mlflow_run(story).data.metrics
    assert sorted(found.values()) == [float(i) for i in range(len(names))]
    assert {name: found.get(name) for name in ("loss", "a_b", "acc_1", "p/q")} == {
        "loss": 0.0, "a_b": 4.0, "acc_1": 5.0, "p/q": 12.0
    }  # fmt: skip


def test_one_sync_at_a_time(mlflow_story: Story) -> None:
    mlflow_story.first_attempt()
    with (
        driver._only_one(mlflow_story.sweep.paths),
        pytest.raises(RunStateError, match="another sync works on tracked"),
    ):
        mlflow_story.sync()


def test_runs_without_a_tracker_are_told_to_one_that_is_named(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.first_attempt()
    with pytest.raises(ConfigError, match="--to wandb"):
        story.sync()
    assert story.sync(TrackerName.mlflow).synced[0].num_new == 6
    assert len(mlflow_history(story, "loss")) == 6


def test_a_tracker_that_takes_nothing_is_left_alone_after_a_few_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = SweepOnDisk(tmp_path / "runs" / "tracked", make_specs(5, "tracker=mlflow"))
    for index in range(5):
        sweep.start(index, attempt=0)

    def refuse(*_: object) -> None:
        raise OSError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(ToMlflow, "send", refuse)
        result = sync_all(sweep)
    assert (list(result.failed.values()), result.has_given_up) == (["OSError: no room"] * 3, True)
    assert not sweep.run().tracker.exists()
    assert len(sync_all(sweep).synced) == 5, "the next sync begins where this one failed"


def test_each_tracker_that_is_synced_has_a_destination() -> None:
    assert tuple(driver.DESTINATIONS) == SYNCED


def test_a_store_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "file").touch()
    story = Story(tmp_path, "tracker=mlflow", "tracker.uri=file/below")
    story.first_attempt()
    with pytest.raises(RunStateError, match=r"tracker=mlflow cannot be reached.*Not a directory"):
        story.sync()


def test_a_package_that_is_missing_is_named(mlflow_story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow_story.first_attempt()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'hpc_trainer\[mlflow\]'"):
        mlflow_story.sync()


# W&B


@pytest.fixture
def server() -> Iterator[WandbServer]:
    with wandb_server() as found:
        yield found


@pytest.fixture
def wandb_story(tmp_path: Path, server: WandbServer, monkeypatch: pytest.MonkeyPatch) -> Story:
    """Its W&B is the server of this test; nothing of the person's own is read or written."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    settings = {"BASE_URL": server.url, "API_KEY": API_KEY, "INIT_TIMEOUT": "20"}
    folders = {f"{name}_DIR": str(tmp_path / name.lower()) for name in ("CONFIG", "CACHE", "DATA")}
    for name, value in {**settings, **folders}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.chdir(tmp_path)
    return Story(tmp_path, "tracker=wandb", "tracker.project=digits", "optim.lr=0.003")


def the_run(server: WandbServer) -> Run:
    (run,) = server.runs.values()
    return run


def test_wandb_has_one_run_over_all_attempts_and_each_step_once(wandb_story: Story, server: WandbServer) -> None:
    wandb_story.first_attempt()
    assert wandb_story.sync().synced[0].num_new == 6
    wandb_story.second_attempt()
    assert [(each.step, each.num_new) for each in wandb_story.sync().synced] == [(9, 3)]
    run = the_run(server)
    assert run.steps == list(LOSSES)
    assert run.values("loss") == LOSSES
    assert run.values("eval_loss") == {9: 0.5}
    assert run.values("_timestamp")[9] == 1e9 + 9, "when it was logged, not when it was synced"
    config = json.loads(run.config)
    assert (config["optim"]["value"]["lr"], config["hpc_trainer"]["value"]["run_id"]) == (0.003, wandb_story.run_id)
    assert "cluster" not in config
    assert (run.project, run.group, run.name, run.exit_code) == ("digits", "tracked", wandb_story.run_id, 0)
    files = [path for path in wandb_story.sweep.paths.folder.rglob("*") if path.is_file()]
    assert not [path for path in files if API_KEY.encode() in path.read_bytes()]
    assert not wandb_story.paths.wandb.exists()
    assert not (wandb_story.paths.wandb_work).exists()


def test_a_sync_to_wandb_that_was_killed_sends_nothing_twice(
    wandb_story: Story, server: WandbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb_story.first_attempt()
    with monkeypatch.context() as patch:
        patch.setattr(driver, "write_json", die)  # the server has all, and nobody remembers
        with pytest.raises(KeyboardInterrupt):
            wandb_story.sync()
    assert the_run(server).steps == [1, 2, 3, 4, 5, 6]
    assert wandb_story.sync().synced[0].num_new == 0
    wandb_story.second_attempt()
    wandb_story.sync()
    assert the_run(server).steps == list(LOSSES)


def die(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.few(1)
@pytest.mark.parametrize("place", ["before it is whole", "before it is remembered", "before it is in its place"])
def test_offline_folders_hold_each_step_once_wherever_a_sync_was_killed(
    wandb_story: Story, server: WandbServer, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb_story.first_attempt()
    with monkeypatch.context() as patch:
        if place == "before it is whole":
            patch.setattr(to_wandb, "write_json", die)
        elif place == "before it is remembered":
            patch.setattr(driver, "write_json", die)
        else:
            settle, calls = to_wandb.ToWandb.settle, []

            def once(destination: Any, *words: Any) -> None:
                calls.append(words)
                if len(calls) == 2:
                    raise KeyboardInterrupt
                settle(destination, *words)

            patch.setattr(to_wandb.ToWandb, "settle", once)
        with pytest.raises(KeyboardInterrupt):
            wandb_story.sync()
    wandb_story.second_attempt()
    result = wandb_story.sync()
    assert (result.failed, [each.step for each in result.synced]) == ({}, [9])
    assert server.runs == {}, "offline is offline"
    assert not wandb_story.paths.wandb_work.exists()
    folders = sorted(wandb_story.paths.wandb.glob("offline-run-*"))
    monkeypatch.delenv("WANDB_MODE")
    done = subprocess.run(
        [sys.executable, "-m", "wandb", "sync", *map(str, folders)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert the_run(server).steps == list(LOSSES)
    assert the_run(server).values("eval_loss") == {9: 0.5}


def test_folders_of_two_syncs_in_one_second_are_both_kept(wandb_story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb_story.first_attempt()
    wandb_story.sync()
    (first,) = wandb_story.paths.wandb.iterdir()
    again = wandb_story.paths.wandb_work / "wandb" / first.name
    again.mkdir(parents=True)
    (wandb_story.paths.wandb_work / "whole.json").write_text('{"step": 6}')
    destination = ToWandb(TrackerConfig(name=TrackerName.wandb))
    sweep = wandb_story.sweep.paths
    destination.settle(read_logged(sweep, read_status(sweep).run(wandb_story.run_id)), 6)
    destination.close()
    assert sorted(wandb_story.paths.wandb.iterdir()) == [first, first.with_name(f"{first.name}-next")]


def test_without_a_key_nobody_is_asked(wandb_story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY")
    wandb_story.first_attempt()
    with pytest.raises(ConfigError, match="Run: wandb login"):
        wandb_story.sync()


def test_a_server_that_is_not_there_is_told_and_nothing_is_remembered(
    wandb_story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    wandb_story.first_attempt()
    assert list(wandb_story.sync().failed) == [wandb_story.run_id]
    assert not wandb_story.paths.tracker.exists()
