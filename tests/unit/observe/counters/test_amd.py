"""AMD's GPUs by a stand-in for amdsmi, which answers in the forms of its Python interface (ROCm 6 and 7); not a GPU."""

from __future__ import annotations

import enum
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_trainer.observe.amd import AmdDevices
from hpc_trainer.observe.host_counters import Notes
from hpc_trainer.observe.telemetry import Device


class _Refused(Exception):  # noqa: N818
    pass


class _Kind(enum.Enum):
    HOTSPOT = CURRENT = 0
    CRITICAL = 1
    GFX = 2
    MEM = 3


class _Smi(SimpleNamespace):
    """Two MI300X; the handle is their number."""

    AmdSmiTemperatureType = AmdSmiTemperatureMetric = AmdSmiClkType = _Kind
    ticks = 1_000_000

    def amdsmi_init(self) -> None: ...

    def amdsmi_shut_down(self) -> None: ...

    def amdsmi_get_processor_handles(self) -> list[int]:
        return [0, 1]

    def amdsmi_get_gpu_device_bdf(self, handle: int) -> str:
        return f"0000:{0xC1 + handle:02X}:00.0"

    def amdsmi_get_gpu_device_uuid(self, handle: int) -> str:
        return f"d0ff74a1-0000-1000-80{handle}"

    def amdsmi_get_gpu_asic_info(self, handle: int) -> dict[str, str]:
        return {"market_name": "AMD Instinct MI300X"}

    def amdsmi_get_gpu_activity(self, handle: int) -> dict[str, Any]:
        return {"gfx_activity": 88, "umc_activity": 20, "mm_activity": "N/A"}

    def amdsmi_get_gpu_vram_usage(self, handle: int) -> dict[str, int]:
        return {"vram_total": 196_592, "vram_used": 1_000}

    def amdsmi_get_power_info(self, handle: int) -> dict[str, Any]:
        return {"current_socket_power": 650, "average_socket_power": "N/A", "power_limit": 750_000_000}

    def amdsmi_get_temp_metric(self, handle: int, sensor: _Kind, metric: _Kind) -> int:
        return 100 if metric is _Kind.CRITICAL else 71

    def amdsmi_get_energy_count(self, handle: int) -> dict[str, Any]:
        return {"energy_accumulator": self.ticks, "counter_resolution": 15.3, "timestamp": 7}

    def amdsmi_get_clock_info(self, handle: int, kind: _Kind) -> dict[str, Any]:
        return {"clk": 2_100 if kind is _Kind.GFX else 1_300, "min_clk": 500}

    def amdsmi_get_gpu_total_ecc_count(self, handle: int) -> dict[str, int]:
        return {"correctable_count": 3, "uncorrectable_count": 0}

    def amdsmi_get_violation_status(self, handle: int) -> dict[str, Any]:
        return {"active_ppt_pwr": True, "active_socket_thrm": True, "active_hbm_thrm": True, "active_vr_thrm": "N/A"}


@pytest.fixture
def smi(monkeypatch: pytest.MonkeyPatch) -> _Smi:
    made = _Smi(__spec__=object())
    monkeypatch.setitem(sys.modules, "amdsmi", made)  # type: ignore[arg-type]
    return made


def test_all_figures(smi: _Smi) -> None:
    notes = Notes()
    found = AmdDevices.find(notes, names=["of-torch", "0000:c2:00"], index=0, environ={})
    assert found is not None
    found.read(0.0)
    smi.ticks += 1_000_000
    (device,) = found.read(10.0)
    found.close()
    assert device == Device(
        uuid="d0ff74a1-0000-1000-801", name="AMD Instinct MI300X", utilisation=0.88, memory_total=196_592 << 20,
        memory_used=1_000 << 20, temperature_c=71, temperature_limit_c=100, power_w=650, power_limit_w=750.0,
        energy_j=pytest.approx(15.3), sm_clock_mhz=2_100, mem_clock_mhz=1_300, throttle=("power_cap", "hw_thermal"),
        ecc_corrected=3, ecc_uncorrected=0,
    )  # fmt: skip
    assert not notes.subjects


@pytest.mark.parametrize(
    ("environ", "index", "expected"),
    [
        ({}, 1, ["801"]),
        ({"HIP_VISIBLE_DEVICES": "1,0"}, 0, ["801"]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, 3, ["801"]),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, None, ["801"]),
        ({"ROCR_VISIBLE_DEVICES": "1,0"}, None, ["801", "800"]),
        ({"HIP_VISIBLE_DEVICES": ""}, 0, []),
    ],
)
def test_which_device(smi: _Smi, environ: dict[str, str], index: int | None, expected: list[str]) -> None:
    found = AmdDevices.find(Notes(), names=[], index=index, environ=environ)
    assert [str(each.uuid)[-3:] for each in (found.devices if found else [])] == expected


def test_what_it_refuses_is_none_and_told_once(smi: _Smi) -> None:
    def refuse(*args: object) -> None:
        raise _Refused("AMDSMI_STATUS_NOT_SUPPORTED")

    smi.amdsmi_get_violation_status = smi.amdsmi_get_energy_count = refuse
    notes = Notes()
    found = AmdDevices.find(notes, names=[], index=0, environ={})
    assert found is not None
    found.read(0.0)
    (device,) = found.read(10.0)
    assert (device.throttle, device.energy_j, device.temperature_c) == (None, 6_500.0, 71)
    assert len(notes.subjects) == 1


def test_a_library_without_its_driver(smi: _Smi) -> None:
    def refuse() -> None:
        raise OSError("libamd_smi.so: cannot open shared object file")

    smi.amdsmi_init = refuse
    notes = Notes()
    assert AmdDevices.find(notes, names=[], index=0, environ={}) is None
    assert notes.subjects == {"driver"}
