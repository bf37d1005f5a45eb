"""A device that is too hot or fails: when it is told, what `status` and `why` say, and whose power limit is lowered."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest

from hpc_trainer.observe.host_counters import Notes
from hpc_trainer.observe.sampler import Care
from hpc_trainer.observe.telemetry import Device, Sample, Trouble, read_warnings
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.reading import Faults

COOL = Device(uuid="GPU-a", name="H100", temperature_c=60, temperature_limit_c=87, throttle=("power_cap",))
HOT = dataclasses.replace(COOL, temperature_c=90, throttle=("hw_slowdown", "hw_thermal"))


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    (tmp_path / "r" / "telemetry").mkdir(parents=True)
    return RunPaths(tmp_path / "r")


def _play(care: Care, *devices: Device | None) -> None:
    for number, device in enumerate(devices):
        care.take([
            Sample(
                attempt=1, rank=3, time=1000.0 + 5 * number, elapsed_s=5.0 * number, node="n7", step=number,
                device=device, host=None,
            )
        ])  # fmt: skip


def test_hard_work_is_no_trouble(paths: RunPaths) -> None:
    _play(Care(paths, None), COOL, None, COOL, COOL)
    assert list(paths.telemetry.iterdir()) == []


def test_a_moment_of_low_clocks_is_none(paths: RunPaths) -> None:
    _play(Care(paths, None), COOL, HOT, COOL, HOT, COOL)
    assert read_warnings(paths) == []


def test_heat_is_told_from_the_second_sample_on(paths: RunPaths) -> None:
    _play(Care(paths, None), COOL, HOT, HOT, *[dataclasses.replace(HOT, temperature_c=93)] * 20, COOL)
    (found,) = read_warnings(paths, 1)
    assert (found.trouble, found.since, found.device) == (Trouble.slowed, 1010.0, "H100 GPU-a")
    assert found.detail == "hw_slowdown, hw_thermal, up to 93 °C, its limit is 87 °C"
    assert found.seconds == found.last - found.since + 5 == 65.0  # written once a minute
    assert found.text == (
        "the GPU of rank 3 on n7 lowers its clocks (hw_slowdown, hw_thermal, up to 93 °C, its limit is 87 °C, for "
        "65 s): H100 GPU-a"
    )
    assert read_warnings(paths, 0) == []


def test_a_device_that_gives_no_reasons_is_judged_by_its_limit(paths: RunPaths) -> None:
    silent = dataclasses.replace(COOL, throttle=None, temperature_c=87)
    _play(Care(paths, None), silent, silent)
    assert [each.trouble for each in read_warnings(paths)] == [Trouble.hot]


@pytest.mark.parametrize(
    ("first", "then", "trouble", "detail"),
    [
        ({"ecc_uncorrected": 2}, {"ecc_uncorrected": 3}, Trouble.ecc, "1 since the attempt began"),
        ({}, {"xid": (31, 79)}, Trouble.xid, "Xid 79"),
        ({}, {"is_lost": True}, Trouble.lost, "GPU is lost"),
    ],
)
def test_a_device_that_fails(paths: RunPaths, first: object, then: object, trouble: Trouble, detail: str) -> None:
    _play(Care(paths, None), dataclasses.replace(COOL, **first), dataclasses.replace(COOL, **then))  # type: ignore[arg-type]
    (found,) = read_warnings(paths)
    assert (found.trouble, found.detail) == (trouble, detail)


@pytest.mark.parametrize("device", [{"ecc_uncorrected": 7}, {"xid": (13, 31, 43)}, {"ecc_corrected": 99}])
def test_errors_of_before_and_of_programs_are_no_trouble(paths: RunPaths, device: object) -> None:
    _play(Care(paths, None), *[dataclasses.replace(COOL, **device)] * 3)  # type: ignore[arg-type]
    assert read_warnings(paths) == []


def test_damaged_warnings_are_a_fault(paths: RunPaths) -> None:
    file = paths.telemetry / "attempt-000.rank-0.warnings.json"
    for text in ('{"warnings": [{"rank": 0}]}', '{"warnings": [7]}', "no"):
        file.write_text(text)
        faults = Faults()
        assert read_warnings(paths, faults=faults) == []
        assert len(faults) == 1


def test_power_is_lowered_once_a_minute_while_it_is_hot(paths: RunPaths) -> None:
    asked: list[str | None] = []
    _play(Care(paths, asked.append), COOL, HOT, HOT, HOT, COOL, *[HOT] * 14)
    assert asked == ["GPU-a", "GPU-a"]


def test_each_gpu_of_a_program_is_cared_for_by_itself(paths: RunPaths) -> None:
    asked: list[str | None] = []
    care = Care(paths, asked.append)
    for number in range(3):
        devices = (HOT, dataclasses.replace(HOT, uuid="GPU-b"), dataclasses.replace(COOL, uuid="GPU-c"))
        care.take([
            Sample(
                attempt=0, rank=0, time=1.0, elapsed_s=5.0 * number, node="n1", step=None, device=device, host=None
            )
            for device in devices
        ])  # fmt: skip
    assert asked == ["GPU-a", "GPU-b"]
    assert [each.device for each in read_warnings(paths)] == ["H100 GPU-a", "H100 GPU-b"]


def test_the_limit_goes_down_and_back(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("pynvml")
    from hpc_trainer.observe.nvidia import NvidiaDevices
    from tests.unit.observe.counters.nvml_player import NO_PERMISSION, Card, Library

    free, kept = Card("GPU-free", limits_mw=(600_000, 700_000)), Card("GPU-kept")
    kept.errors = {"SetPowerManagementLimit": NO_PERMISSION}
    with (library := Library(free, kept)).playing(), caplog.at_level(logging.WARNING):
        devices = NvidiaDevices.find(Notes(), uuid=None, index=None, environ={})
        assert devices is not None
        for _ in range(3):
            for uuid in ("GPU-free", "GPU-kept"):
                devices.lower_power(uuid)
        assert (free.limit_mw, kept.limit_mw) == (600_000, 700_000)
        devices.close()
    assert library.set_limits == [630_000, 600_000, 700_000]
    assert library.asked.count("SetPowerManagementLimit") == 4
    assert ["Insufficient Permissions" in each.getMessage() for each in caplog.records] == [False, True, False]


def _asked(paths: RunPaths, *devices: Device, after_s: float = 20.0) -> list[tuple[Trouble, float]]:
    asked: list[tuple[Trouble, float]] = []
    care = Care(paths, None, lambda each: asked.append((each.trouble, each.last - 1000)), after_s)
    _play(care, *devices)
    return asked


def test_heat_is_a_reason_to_leave_when_it_stands_without_a_break(paths: RunPaths) -> None:
    assert _asked(paths, *[HOT] * 4, COOL, *[HOT] * 4, COOL) == []
    asked = _asked(paths, COOL, *[HOT] * 6)
    assert [since for _, since in asked] == [25.0, 30.0], (
        "20 s after the first hot sample, and again: it may be refused"
    )
    assert len(read_warnings(paths)) == 1, "the warning is told first"
    assert {trouble for trouble, _ in asked} == {Trouble.slowed}


@pytest.mark.parametrize("then", [{"ecc_uncorrected": 1}, {"xid": (79,)}, {"is_lost": True}])
def test_a_device_that_fails_is_a_reason_at_once(paths: RunPaths, then: object) -> None:
    healthy = dataclasses.replace(COOL, ecc_uncorrected=0)
    ((trouble, since),) = _asked(paths, healthy, dataclasses.replace(healthy, **then), after_s=1e9)  # type: ignore[arg-type]
    assert not trouble.is_heat
    assert since == 5.0


def test_what_is_over_is_no_reason(paths: RunPaths) -> None:
    assert [since for _, since in _asked(paths, *[HOT] * 5, *[COOL] * 9)] == [20.0]
