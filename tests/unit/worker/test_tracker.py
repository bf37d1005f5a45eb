"""The tracker that a run writes itself: each step once over attempts, and no training hangs on it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.training.reporter import Reporter, Tracker
from hpc_trainer.worker.attempt import build_tracker
from tests.unit.record.builders import make_config, make_specs
from tests.unit.record.sweeps import SweepOnDisk


class _Signs:
    """As much of LifeSigns as logging needs."""

    num_steps = 9

    def show(self, numbers: dict[str, float]) -> None:
        """Nobody looks."""


def _reporter(folder: Path, make_tracker: Any) -> Reporter:
    sweep = SweepOnDisk(folder / "tracked", make_specs(1))
    signs: Any = _Signs()
    return Reporter(paths=sweep.run(), signs=signs, make_tracker=make_tracker)


def _config() -> TrainConfig:
    return make_config("tracker=tensorboard", "optim.lr=0.003")


def test_event_files_have_each_step_once_and_the_hyperparameters(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    for first, last in ((0, 6), (3, 9)):  # preempted after step 6, back at step 3
        tracker = build_tracker(_config(), tmp_path, first)
        for step in range(first + 1, last + 1):
            tracker.log(step, {"loss": 1 / step})
        tracker.close()
    found = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in found.Scalars("loss")] == list(range(1, 10))
    data = HParamsPluginData.FromString(found.SummaryMetadata("_hparams_/session_start_info").plugin_data.content)
    hparams = data.session_start_info.hparams
    assert hparams["optim.lr"].number_value == 0.003
    assert hparams["model.name"].string_value == "mlp"
    assert not [key for key in hparams if key.startswith(("cluster", "paths"))]


def test_a_missing_package_is_noted_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    reporter = _reporter(tmp_path, lambda step: build_tracker(_config(), tmp_path, step))
    with caplog.at_level(logging.WARNING):
        reporter.start(0)
        reporter.log(1, {"loss": 1.0}, sync=False)
    assert [record.message.count("pip install 'hpc_trainer[tensorboard]'") for record in caplog.records] == [1]
    assert '"loss": 1.0' in reporter.paths.metrics.read_text()


@pytest.mark.parametrize("where", ["log", "close"])
def test_a_failing_tracker_is_noted_once_and_training_goes_on(
    tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing:
        def log(self, step: int, values: dict[str, float]) -> None:
            if where == "log":
                raise OSError(28, "No space left on device")

        def close(self) -> None:
            raise RuntimeError("its writer is dead")

    def make(step: int) -> Tracker:
        return Failing()

    reporter = _reporter(tmp_path, make)
    with caplog.at_level(logging.WARNING):
        reporter.start(0)
        for step in (1, 2, 3):
            reporter.log(step, {"loss": 1.0}, sync=False)
        reporter.close()
    assert len(caplog.records) == 1
    assert len(reporter.paths.metrics.read_text().splitlines()) == 3
