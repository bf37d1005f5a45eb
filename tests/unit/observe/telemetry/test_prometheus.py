"""The text file for node_exporter: what Prometheus' own parser reads of it, and that none is left standing."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest

from hpc_trainer.config.rules.cluster_rules import monitor_problems
from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.config.schema.output import MonitorConfig
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.observe import sampler
from hpc_trainer.observe.sampler import PrometheusFile, sampler_of
from hpc_trainer.observe.telemetry import Device, Host, Sample, read_telemetry
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.runtime.rank_env import read_rank_env
from hpc_trainer.runtime.stop import StopFlag

parser = pytest.importorskip("prometheus_client.parser", reason="prometheus-client is in the extra prometheus")


def _samples() -> list[Sample]:
    devices = (
        Device(uuid="GPU-a", temperature_c=61, sm_clock_mhz=1755, energy_j=5.5, throttle=("power_cap",)),
        Device(uuid="GPU-b", temperature_c=70),
    )
    return [
        Sample(
            attempt=0, rank=3, time=1.8e9, elapsed_s=5.0, node="n1", step=40, device=device,
            host=Host(cpus=1.5) if index == 0 else None,
        )
        for index, device in enumerate(devices)
    ]  # fmt: skip


def _values(path: Path) -> dict[tuple[str, str, str], float]:
    found = {}
    for family in parser.text_string_to_metric_families(path.read_text()):
        for each in family.samples:
            assert (each.labels["run_id"], each.labels["rank"]) == ("my-run", "3")
            found[each.name, each.labels.get("gpu", ""), each.labels.get("reason", "")] = each.value
    return found


def test_what_prometheus_reads(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        file = PrometheusFile(tmp_path, "my-run", 3)
        file.take(_samples())
        file.take(_samples())
    finally:
        os.umask(before)
    (path,) = tmp_path.iterdir()
    assert path.name == "hpc_trainer_my-run.rank-3.prom"
    assert path.stat().st_mode & 0o777 == 0o644  # the collector is another user
    found = _values(path)
    assert found["hpc_trainer_gpu_temperature_celsius", "GPU-a", ""] == 61
    assert found["hpc_trainer_gpu_temperature_celsius", "GPU-b", ""] == 70
    assert found["hpc_trainer_gpu_sm_clock_hertz", "GPU-a", ""] == 1.755e9
    assert found["hpc_trainer_gpu_energy_joules_total", "GPU-a", ""] == 5.5
    assert found["hpc_trainer_gpu_throttled", "GPU-a", "power_cap"] == 1
    assert found["hpc_trainer_gpu_throttled", "GPU-a", "hw_thermal"] == 0
    assert ("hpc_trainer_gpu_throttled", "GPU-b", "power_cap") not in found
    assert (found["hpc_trainer_step", "", ""], found["hpc_trainer_cpus_busy", "", ""]) == (40, 1.5)
    file.close()
    assert not list(tmp_path.iterdir())


def test_what_a_killed_rank_left_goes_and_what_is_of_now_stays(tmp_path: Path) -> None:
    for name, age_s in (("hpc_trainer_old.rank-0.prom", 7_200), ("hpc_trainer_new.rank-0.prom", 60), ("x.prom", 7_200)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    file = PrometheusFile(tmp_path, "my-run", 3)
    file.take(_samples())
    file.close()
    assert {each.name for each in tmp_path.iterdir()} == {"hpc_trainer_new.rank-0.prom", "x.prom"}


def test_a_node_without_the_package_trains_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config, paths = TrainConfig(), RunPaths(tmp_path / "my-run")
    paths.folder.mkdir()
    config.monitor.prometheus_dir = str(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(sampler, "_LAST_S", 60.0)
    with caplog.at_level(logging.WARNING), sampler_of(config, paths, read_rank_env({}), 0, StopFlag(), step=lambda: 3):
        pass
    (told,) = [each.getMessage() for each in caplog.records]
    assert "pip install 'hpc_trainer[prometheus]'" in told
    assert len(read_telemetry(paths)) == 2


@pytest.mark.parametrize("is_there", [True, False])
def test_a_run_has_it_while_it_works(tmp_path: Path, is_there: bool, caplog: pytest.LogCaptureFixture) -> None:
    config, paths = TrainConfig(), RunPaths(tmp_path / "my-run")
    paths.folder.mkdir()
    (folder := tmp_path / "node").mkdir()
    config.monitor.telemetry_every_s = 0.02
    config.monitor.prometheus_dir = str(folder if is_there else tmp_path / "none")
    seen: set[str] = set()
    with caplog.at_level(logging.WARNING), sampler_of(config, paths, read_rank_env({}), 0, StopFlag(), step=lambda: 3):
        deadline = time.monotonic() + 60
        while not (seen or caplog.records) and time.monotonic() < deadline:
            seen = {each.name for each in folder.glob("*.prom")}
    assert seen == ({"hpc_trainer_my-run.rank-0.prom"} if is_there else set())
    assert len(caplog.records) == (0 if is_there else 1)
    assert is_there or f"monitor.prometheus_dir={tmp_path / 'none'} is not a folder on " in caplog.text
    deadline = time.monotonic() + 60
    while list(folder.iterdir()) and time.monotonic() < deadline:  # the thread may outlive the block by its last sample
        time.sleep(0.01)
    assert not list(folder.iterdir())


def test_what_cannot_be_is_told_at_plan_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(monitor_problems(MonitorConfig(), Executor.slurm)) == []
    assert list(monitor_problems(MonitorConfig(prometheus_dir="/var/lib/node_exporter"), Executor.slurm)) == []
    (relative,) = monitor_problems(MonitorConfig(prometheus_dir="here"), Executor.slurm)
    assert "absolute path" in relative
    (idle,) = monitor_problems(MonitorConfig(prometheus_dir="/x", telemetry_every_s=0), Executor.slurm)
    assert "takes none" in idle
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (package,) = monitor_problems(MonitorConfig(prometheus_dir="/x"), Executor.slurm)
    assert "pip install 'hpc_trainer[prometheus]'" in package
