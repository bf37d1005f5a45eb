"""NVIDIA's GPUs through the real pynvml over recorded answers; and the real library where there is no driver."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping

import pytest

from hpc_trainer.observe.host_counters import Notes
from hpc_trainer.observe.nvidia import NvidiaDevices
from hpc_trainer.observe.telemetry import Device

pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is in the extra nvidia")

from tests.unit.observe.counters.nvml_player import (  # noqa: E402
    GPU_IS_LOST,
    NO_PERMISSION,
    NOT_SUPPORTED,
    Card,
    Library,
)

A, B, C = "GPU-aaaaaaaa-0000", "GPU-bbbbbbbb-0000", "GPU-bbcccccc-0000"


def _found(
    library: Library, notes: Notes | None = None, *, uuid: str | None = None, index: int | None = 0,
    environ: Mapping[str, str] = {},
) -> list[str | None]:  # fmt: skip
    """UUIDs of the rank's devices."""
    with library.playing():
        devices = NvidiaDevices.find(notes or Notes(), uuid=uuid, index=index, environ=environ)
        return [] if devices is None else [each.uuid for each in devices.read(0.0)]


def _three(**of_second: str) -> Library:
    return Library(Card(A), Card(B, **of_second), Card(C))  # type: ignore[arg-type]


def test_all_figures_of_a_device() -> None:
    card = Card(A, events=[79, 31, 79], ecc={(0, 0): 4, (1, 0): 1, (0, 1): 9, (1, 1): 2}, reasons=0x1 | 0x4 | 0x20)
    notes = Notes()
    with Library(card).playing():
        devices = NvidiaDevices.find(notes, uuid=None, index=0, environ={})
        assert devices is not None
        devices.read(100.0)
        card.energy_mj += 6_000_000
        card.fields = {key: value + 1_000 for key, value in card.fields.items()}
        (found,) = devices.read(110.0)
        devices.close()
    assert found == Device(
        uuid=A, name="NVIDIA H100 80GB HBM3", utilisation=0.97, memory_used=61_203_283_968, memory_total=85_520_809_984,
        temperature_c=61, temperature_limit_c=87, power_w=612.345, power_limit_w=700.0, energy_j=6_000.0,
        sm_clock_mhz=1755, mem_clock_mhz=2619, throttle=("power_cap", "sw_thermal"), ecc_corrected=4, ecc_uncorrected=1,
        xid=(), nvlink_bytes=2_000 * 1024, pcie_bytes=2_000,
    )  # fmt: skip
    assert not notes.subjects


def test_xid_come_once_each() -> None:
    card = Card(A, events=[79, 31, 79])
    with Library(card).playing():
        devices = NvidiaDevices.find(Notes(), uuid=None, index=0, environ={})
        assert devices is not None
        assert [devices.read(at)[0].xid for at in (0.0, 1.0)] == [(79, 31), ()]


# --- which device ---


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_numbers_of_cuda_are_not_those_of_nvml(order: tuple[int, ...]) -> None:
    told = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, order))}
    assert [_found(_three(), index=index, environ=told)[0] for index in range(3)] == [(A, B, C)[each] for each in order]


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("GPU-bbb,GPU-aaa", [B, A]),
        ("GPU-bb", []),  # two begin so
        (f" {C} , 0", [C, A]),
        ("1,7,0", [B]),  # CUDA ends its list there
        ("1,-1,0", [B]),
        ("", []),
        ("NoDevFiles", []),
    ],
)
def test_lists_as_cuda_reads_them(told: str, expected: list[str]) -> None:
    assert _found(_three(), index=None, environ={"CUDA_VISIBLE_DEVICES": told}) == expected


def test_more_ranks_than_devices_share_them() -> None:
    assert _found(_three(), index=5, environ={"CUDA_VISIBLE_DEVICES": "2,1"}) == [B]


def test_what_slurm_hides_does_not_count() -> None:
    """NVML counts it and refuses it; CUDA's number 1 is the third on the bus then."""
    assert _found(Library(Card(A), Card(B, is_hidden=True), Card(C)), index=1) == [C]


def test_torch_knows_best() -> None:
    assert _found(_three(), uuid="bbcccccc-0000", index=0, environ={"CUDA_VISIBLE_DEVICES": "0,1"}) == [C]
    assert _found(_three(), uuid="of-another-library", index=1) == [B]


def test_a_program_that_drives_all_has_all() -> None:
    assert _found(_three(), index=None, environ={"CUDA_VISIBLE_DEVICES": "2,0"}) == [C, A]


def test_numbers_of_unlike_devices_are_known_only_by_the_order_of_the_bus() -> None:
    notes, mixed = Notes(), _three(name="NVIDIA A30")
    assert _found(mixed, notes, index=0) == []
    assert notes.subjects == {"order", "driver"}
    assert _found(mixed, index=1, environ={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}) == [B]
    assert _found(mixed, index=0, environ={"CUDA_VISIBLE_DEVICES": B}) == [B]


# --- MIG ---


def _mig() -> Library:
    gpu = Card(A, temperature=70)
    gpu.parts = [
        Card(f"MIG-{letter}1111111", "NVIDIA H100 MIG 1g.10gb", parent=gpu, memory=(10, number))
        for number, letter in enumerate("def")
    ]
    return Library(gpu, Card(B))


@pytest.mark.parametrize(
    ("environ", "uuid", "expected"),
    [
        ({"CUDA_VISIBLE_DEVICES": "MIG-e1111111"}, None, "MIG-e1111111"),
        ({"CUDA_VISIBLE_DEVICES": "MIG-f"}, None, "MIG-f1111111"),
        ({"CUDA_VISIBLE_DEVICES": "MIG-e1111111"}, "aaaaaaaa-0000", "MIG-e1111111"),  # torch names the whole GPU
        ({}, "e1111111", "MIG-e1111111"),  # torch names the part
        ({"CUDA_VISIBLE_DEVICES": "0"}, None, "MIG-d1111111"),  # CUDA takes the first part alone
        ({"CUDA_VISIBLE_DEVICES": "1"}, None, B),
    ],
)
def test_a_part_of_a_gpu(environ: dict[str, str], uuid: str | None, expected: str) -> None:
    assert _found(_mig(), uuid=uuid, environ=environ) == [expected]


def test_a_part_has_its_own_memory_and_the_heat_of_the_whole() -> None:
    with _mig().playing():
        devices = NvidiaDevices.find(Notes(), uuid=None, index=0, environ={"CUDA_VISIBLE_DEVICES": "MIG-e1111111"})
        assert devices is not None
        (found,) = devices.read(0.0)
    assert (found.memory_total, found.memory_used, found.temperature_c) == (10, 1, 70)
    assert (found.utilisation, found.power_w, found.energy_j) == (None, None, None)


# --- what goes wrong ---


def test_a_device_that_is_lost_in_the_middle(caplog: pytest.LogCaptureFixture) -> None:
    card = Card(A)
    library = Library(card)
    with library.playing(), caplog.at_level(logging.WARNING):
        devices = NvidiaDevices.find(Notes(), uuid=None, index=0, environ={})
        assert devices is not None
        assert devices.read(0.0)[0].is_lost is None
        card.energy_mj += 7_000
        (before,) = devices.read(2.0)
        card.errors = {"": GPU_IS_LOST}
        (during,) = devices.read(5.0)
        library.asked.clear()
        (after,) = devices.read(10.0)
        devices.close()
    assert before.energy_j == 7.0
    assert (during.is_lost, during.temperature_c, during.energy_j) == (True, None, 7.0)
    assert after == Device(uuid=A, name="NVIDIA H100 80GB HBM3", is_lost=True, energy_j=7.0), "what was used stays"
    assert not [name for name in library.asked if name.startswith("Get")]
    assert [each.getMessage() for each in caplog.records] == [
        f"telemetry: NVIDIA H100 80GB HBM3 {A}: GPU is lost. No more figures of this GPU are recorded."
    ]


def test_what_is_not_permitted_is_told_once_and_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    card = Card(A, errors={"GetTotalEccErrors": NO_PERMISSION, "GetCurrentClocksThrottleReasons": NOT_SUPPORTED})
    library = Library(card)
    with library.playing(), caplog.at_level(logging.WARNING):
        devices = NvidiaDevices.find(Notes(), uuid=None, index=0, environ={})
        assert devices is not None
        found = [devices.read(float(at))[0] for at in range(3)]
    assert {(each.ecc_corrected, each.throttle, each.temperature_c) for each in found} == {(None, None, 61)}
    assert library.asked.count("GetTotalEccErrors") == library.asked.count("GetCurrentClocksThrottleReasons") == 1
    (told,) = [each.getMessage() for each in caplog.records]
    assert "does not report: throttle reasons (Not Supported), ECC (Insufficient Permissions)" in told


def test_power_is_added_up_where_there_is_no_counter_and_bytes_where_there_is_none() -> None:
    card = Card(A, errors={"GetTotalEnergyConsumption": NOT_SUPPORTED}, power_mw=400_000, fields={})
    with Library(card).playing():
        devices = NvidiaDevices.find(Notes(), uuid=None, index=0, environ={})
        assert devices is not None
        devices.read(0.0)
        card.power_mw = 200_000
        (found,) = devices.read(10.0)
    assert found.energy_j == 3_000.0
    assert found.pcie_bytes == 10 * 2 * 1_000 * 1024
    assert found.nvlink_bytes is None


def test_a_counter_that_begins_anew_loses_nothing() -> None:
    card = Card(A, energy_mj=5_000)
    with Library(card).playing():
        devices = NvidiaDevices.find(Notes(), uuid=None, index=0, environ={})
        assert devices is not None
        told = []
        for value in (5_000, 9_000, 1_000, 2_000):  # the driver was loaded anew
            card.energy_mj = value
            told.append(devices.read(0.0)[0].energy_j)
    assert told == [0.0, 4.0, 5.0, 6.0]


def test_a_driver_that_does_not_fit_is_one_note() -> None:
    notes = Notes()
    assert _found(Library(Card(A), init=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH), notes) == []
    assert notes.subjects == {"driver"}


def test_the_real_library_without_a_driver(caplog: pytest.LogCaptureFixture) -> None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        pass
    else:
        pytest.skip("there is a driver here")
    with caplog.at_level(logging.WARNING):
        assert NvidiaDevices.find(Notes(), uuid=None, index=0, environ={}) is None
    assert [each.getMessage() for each in caplog.records] == [
        "telemetry: no GPU figures: NVML Shared Library Not Found (NVML)"
    ]


def test_without_the_package_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert NvidiaDevices.find(Notes(), uuid=None, index=0, environ={}) is None
    assert "pip install 'hpc_trainer[nvidia]'" in caplog.records[0].getMessage()
