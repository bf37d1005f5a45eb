"""The sampler of a rank: what goes wrong is told once, and the training knows nothing of it."""

from __future__ import annotations

import dataclasses
import errno
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from hpc_trainer.config.schema.train import CommandPer, TrainConfig
from hpc_trainer.observe import sampler as module
from hpc_trainer.observe import telemetry
from hpc_trainer.observe.sampler import Sampler, sampler_of
from hpc_trainer.observe.telemetry import Device, Host, read_telemetry, read_warnings
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.runtime.rank_env import read_rank_env
from hpc_trainer.runtime.spans import Spans
from hpc_trainer.runtime.stop import StopFlag
from hpc_trainer.worker.begin import recording
from hpc_trainer.worker.program import run_program


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine under load takes seconds for what takes milliseconds; no test is of the limit."""
    monkeypatch.setattr(module, "_LAST_S", 60.0)


class _Host:
    def read(self, now: float) -> Host:
        return Host(cpus=1.0)


class _Gpus:
    def lower_power(self, uuid: str | None) -> None: ...

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
    deadline = time.monotonic() + 60
    with sampler.sampling():
        while len(read_telemetry(sampler.paths)) < 6:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    found = read_telemetry(sampler.paths)
    assert {(each.attempt, each.rank, each.step) for each in found} == {(2, 0, 7)}
    assert [each.device.uuid for each in found[:4] if each.device] == ["GPU-a", "GPU-b"] * 2
    assert [each.host for each in found[:3]] == [Host(cpus=1.0), None, Host(cpus=1.0)]  # the node counts once
    assert gpus.is_closed
    assert found[-1].elapsed_s >= 0.04


def test_of_a_shared_gpu_a_run_counts_its_share_of_the_energy(tmp_path: Path) -> None:
    gpus = _Gpus()
    gpus.read = lambda now: [Device(uuid="GPU-a", energy_j=90.0, power_w=300.0)]  # type: ignore[method-assign]
    sampler = _sampler(tmp_path, gpus)
    sampler.env = dataclasses.replace(sampler.env, per_gpu=3)
    sampler.sample(_Host(), gpus)
    (sample,) = read_telemetry(sampler.paths)
    assert sample.device == Device(uuid="GPU-a", energy_j=30.0, power_w=300.0)


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


def test_samples_of_an_old_run_are_written_together_and_the_last_at_once(tmp_path: Path) -> None:
    sampler = _sampler(tmp_path)
    sampler._first = time.monotonic() - 100.0
    num_lines = []
    for is_last in (False, False, True):
        if is_last:
            sampler._ended.set()
        sampler.sample(_Host(), None)
        num_lines.append(len(read_telemetry(sampler.paths)))
    assert num_lines == [1, 1, 3], "the second waits for the next one, the last for none"


def test_none_where_nobody_asks_for_it(tmp_path: Path) -> None:
    config = TrainConfig()
    config.monitor.telemetry_every_s = 0
    with sampler_of(config, RunPaths(tmp_path), read_rank_env({}), 0, StopFlag(), step=lambda: None):
        pass
    assert not list(tmp_path.iterdir())


def _gpu_config(per: CommandPer = CommandPer.rank) -> TrainConfig:
    config = TrainConfig()
    config.monitor.telemetry_every_s = 60
    config.hardware.gpus_per_node = 2
    config.train.command, config.train.command_per = "x", per
    return config


@pytest.mark.parametrize(("per", "expected"), [(CommandPer.rank, ["GPU-b"]), (CommandPer.node, ["GPU-b", "GPU-a"])])
def test_a_rank_of_gpus_is_sampled_and_cared_for(
    tmp_path: Path, per: CommandPer, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all of pynvml at work over recorded answers: each rank's own device, or all of a program that drives all."""
    pytest.importorskip("pynvml")
    from tests.unit.observe.counters.nvml_player import Card, Library

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    paths = RunPaths(tmp_path / "r")
    paths.folder.mkdir()
    cards = Card("GPU-a"), Card("GPU-b", reasons=0x4 | 0x40, temperature=95)
    with Library(*cards).playing():
        for _ in range(2):
            with sampler_of(_gpu_config(per), paths, read_rank_env({}), 0, StopFlag(), step=lambda: 3):
                pass
    found = read_telemetry(paths)
    assert [each.device.uuid for each in found if each.device][: len(expected)] == expected
    assert found[0].host is not None
    (warned,) = read_warnings(paths)  # the sample at the end is the second in a row
    assert warned.device == "NVIDIA H100 80GB HBM3 GPU-b"


def test_no_driver_is_one_note_and_the_host_is_sampled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("pynvml")
    if Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists():
        pytest.skip("there is a driver here")
    paths = RunPaths(tmp_path / "r")
    paths.folder.mkdir()
    with (
        caplog.at_level(logging.WARNING),
        sampler_of(_gpu_config(), paths, read_rank_env({}), 0, StopFlag(), step=lambda: 3),
    ):
        pass
    assert [each.getMessage() for each in caplog.records] == [
        "telemetry: no GPU figures: NVML Shared Library Not Found (NVML)"
    ]
    assert [each.device for each in read_telemetry(paths)] == [None, None]


def test_a_program_and_its_children_are_sampled(tmp_path: Path) -> None:
    """The real worker of a program, in this process: what it starts keeps a core busy, and its memory counts."""
    (tmp_path / "sweep").mkdir(mode=0o700)
    paths = RunPaths(tmp_path / "sweep" / "r")
    for folder in (paths.folder, paths.logs, paths.checkpoints):
        folder.mkdir(mode=0o700)
    config = TrainConfig()
    config.monitor.telemetry_every_s = 0.05
    busy = "import time; block = bytearray(200 << 20); exec('while time.process_time() < 0.4: pass')"
    config.train.command, config.train.command_dir = f'sh -c "{sys.executable} -c \\"{busy}\\"; true"', str(tmp_path)
    assert run_program(config, paths, read_rank_env({}), StopFlag(), 0, Spans()) == 0
    found = [each.host for each in read_telemetry(paths) if each.host is not None]
    own = psutil.Process().memory_info().rss
    assert max(each.rss_bytes or 0 for each in found) > own + (150 << 20)
    assert max(each.cpus or 0.0 for each in found) > 0.01


def test_a_user_who_may_have_no_more_threads_trains_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    sampler = _sampler(tmp_path)
    paths = RunPaths(tmp_path / "r")
    paths.logs.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with sampler.sampling(), recording(TrainConfig(), paths, read_rank_env({}), 2, StopFlag()):
            trained = True
    assert trained
    assert caplog.text.count("can't start new thread") == 2


def test_a_stop_waits_for_no_sample(tmp_path: Path) -> None:
    go = threading.Event()

    class _Slow(_Host):
        def read(self, now: float) -> Host:
            go.wait(60)
            return Host(cpus=1.0)

    sampler = _sampler(tmp_path)
    sampler.host = lambda notes: _Slow()
    begin = time.monotonic()
    with sampler.sampling():
        sampler.stop.request("SIGTERM")
    waited_s = time.monotonic() - begin
    go.set()

    assert waited_s < 10, "it waits for the driver, here 60 s"
