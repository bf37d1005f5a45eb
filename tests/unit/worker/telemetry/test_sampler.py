"""The sampler of a rank: what goes wrong is told once, and the training knows nothing of it."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.runs.layout import RunPaths
from hpc_trainer.runs.monitoring import telemetry
from hpc_trainer.runs.monitoring.telemetry import Device, Host, read_telemetry
from hpc_trainer.runtime.rank_env import read_rank_env
from hpc_trainer.worker.telemetry import sampler as module
from hpc_trainer.worker.telemetry.sampler import Sampler, sampler_of


class _Host:
    def read(self, now: float) -> Host:
        return Host(cpus=1.0)


class _Gpus:
    def __init__(self, *fails: Exception) -> None:
        self._fails, self.is_closed = list(fails), False

    def read(self, now: float) -> Sequence[Device]:
        if self._fails:
            raise self._fails.pop(0)
        return [Device(uuid="GPU-a"), Device(uuid="GPU-b")]

    def close(self) -> None:
        self.is_closed = True
        raise RuntimeError("the driver is gone")


def _sampler(tmp_path: Path, gpus: _Gpus | None = None, clock: Callable[[], float] = time.time) -> Sampler:
    paths = RunPaths(tmp_path / "r")
    paths.telemetry.mkdir(parents=True, exist_ok=True)
    return Sampler(
        paths=paths, env=read_rank_env({}), attempt=2, every_s=0.02, step=lambda: 7, devices=lambda notes: gpus,
        host=lambda notes: _Host(), clock=clock,
    )  # fmt: skip


def test_samples_from_the_begin_to_the_end(tmp_path: Path) -> None:
    gpus = _Gpus()
    sampler = _sampler(tmp_path, gpus)
    with sampler.sampling():
        time.sleep(0.1)
    found = read_telemetry(sampler.paths)
    assert len(found) >= 4
    assert {(each.attempt, each.rank, each.step) for each in found} == {(2, 0, 7)}
    assert [each.device.uuid for each in found[:4] if each.device] == ["GPU-a", "GPU-b"] * 2
    assert [each.host for each in found[:3]] == [Host(cpus=1.0), None, Host(cpus=1.0)]  # the node counts once
    assert gpus.is_closed
    assert found[-1].elapsed_s >= 0.05


def test_an_error_of_the_training_is_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(KeyError), _sampler(tmp_path).sampling():
        raise KeyError


def test_what_goes_wrong_is_told_once_and_sampling_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gpus = _Gpus(RuntimeError("odd"), RuntimeError("odd"), ValueError("other"))
    sampler = _sampler(tmp_path, gpus)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            sampler.sample(_Host(), gpus)
    assert [each.getMessage() for each in caplog.records] == [
        "telemetry: a sample is lost: RuntimeError: odd", "telemetry: a sample is lost: ValueError: other",
    ]  # fmt: skip
    assert len(read_telemetry(sampler.paths)) == 4


def test_a_full_disk_is_told_once_and_when_there_is_room_it_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = _sampler(tmp_path)

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(module, "append_samples", full)
        sampler.sample(_Host(), None)
        sampler.sample(_Host(), None)
    sampler.sample(_Host(), None)
    assert len(caplog.records) == 1
    assert "No space left on device" in caplog.records[0].getMessage()
    assert len(read_telemetry(sampler.paths)) == 1


def test_a_folder_that_cannot_be_made_leaves_no_thread(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sampler = _sampler(tmp_path)
    sampler.paths.telemetry.rmdir()
    sampler.paths.telemetry.write_text("a file")
    with caplog.at_level(logging.WARNING), sampler.sampling():
        pass
    assert len(caplog.records) == 1


def test_a_clock_that_goes_back_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    times = iter([1000.0, 1005.0, 400.0, 405.0, 300.0])
    sampler = _sampler(tmp_path, clock=lambda: next(times))
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            sampler.sample(_Host(), None)
    assert [each.getMessage() for each in caplog.records] == ["telemetry: the node's clock went back by 605 s"]
    found = read_telemetry(sampler.paths)
    assert [each.time for each in found] == [1000.0, 1005.0, 400.0, 405.0, 300.0]
    assert sorted(each.elapsed_s for each in found) == [each.elapsed_s for each in found]


def test_a_long_run_is_thinned_out_as_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "MAX_LINES", 40)
    monkeypatch.setattr(telemetry, "_DENSE", 5)
    monkeypatch.setattr(module, "MAX_LINES", 40)
    sampler = _sampler(tmp_path)
    for _ in range(130):
        sampler.sample(_Host(), None)
    assert 5 < len(read_telemetry(sampler.paths)) < 40


def test_none_where_nobody_asks_for_it(tmp_path: Path) -> None:
    config = TrainConfig()
    config.monitor.telemetry_every_s = 0
    with sampler_of(config, RunPaths(tmp_path), read_rank_env({}), 0, step=lambda: None):
        pass
    assert not list(tmp_path.iterdir())
