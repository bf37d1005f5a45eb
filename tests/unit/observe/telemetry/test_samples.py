"""telemetry/*.jsonl: what is written comes back, what is damaged costs itself only, and a month fits in a megabyte."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
from functools import partial
from pathlib import Path

import pytest

from hpc_trainer.observe.telemetry import (
    MAX_LINES,
    Device,
    Host,
    Sample,
    append_samples,
    energy_j,
    newest_of_ranks,
    newest_samples,
    read_telemetry,
    read_warnings,
    record_of,
    thin_out,
)
from hpc_trainer.record.files import append_texts
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.reading import Faults
from tests.seeds import chosen_seed


def _sample(number: int, *, attempt: int = 0, rank: int = 0, **of_device: object) -> Sample:
    device = Device(uuid=f"GPU-{rank}", **of_device) if of_device else None  # type: ignore[arg-type]
    return Sample(
        attempt=attempt, rank=rank, time=1.8e9 + 5 * number, elapsed_s=5.0 * number, node="n1", step=number,
        device=device, host=Host(cpus=1.5, rss_bytes=1000 + number),
    )  # fmt: skip


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    (tmp_path / "r" / "telemetry").mkdir(parents=True)
    return RunPaths(tmp_path / "r")


def test_every_field_comes_back(paths: RunPaths) -> None:
    device = Device(
        uuid="GPU-1", name="NVIDIA H100", utilisation=0.5, memory_used=7, memory_total=9, temperature_c=60.0,
        temperature_limit_c=87.0, power_w=300.5, power_limit_w=700.0, energy_j=12.0, sm_clock_mhz=1980,
        mem_clock_mhz=2619, throttle=("power_cap",), ecc_corrected=1, ecc_uncorrected=0,
        xid=(79,), nvlink_bytes=5, pcie_bytes=6, is_lost=True,
    )  # fmt: skip
    host = Host(**{each.name: 3 for each in dataclasses.fields(Host)})
    assert None not in dataclasses.asdict(device).values()
    wrote = dataclasses.replace(_sample(4), device=device, host=host)
    append_samples(paths, [wrote])
    assert read_telemetry(paths) == newest_samples(paths) == [wrote]


def test_times_are_kept_to_the_millisecond() -> None:
    record = record_of(dataclasses.replace(_sample(0), time=1.23456, elapsed_s=2.34567))
    assert (record["time"], record["elapsed_s"]) == (1.235, 2.346)


def test_columns_of_earlier_versions_are_passed_over(paths: RunPaths) -> None:
    host = '{"cpus": 1.5, "net_bytes": 7, "power_w": 300.0}'
    device = '{"uuid": "GPU-1", "ecc_corrected": 1, "ecc_corrected_aggregate": 3, "ecc_uncorrected_aggregate": 0}'
    line = f'{{"time": 1, "elapsed_s": 1, "node": "n1", "step": 2, "host": {host}, "device": {device}}}\n'
    append_texts(paths.telemetry_file(0, 0), [line])
    faults = Faults()
    (sample,) = read_telemetry(paths, faults)
    assert (sample.host, sample.device) == (Host(cpus=1.5), Device(uuid="GPU-1", ecc_corrected=1))
    assert not faults


@pytest.mark.parametrize(("word", "is_lost"), [("true", True), ("false", None), ("1", None), ('"yes"', None)])
def test_a_device_is_lost_only_if_the_sample_says_so(paths: RunPaths, word: str, is_lost: bool | None) -> None:
    device = f'{{"uuid": "GPU-1", "is_lost": {word}}}'
    line = f'{{"time": 1, "elapsed_s": 1, "node": "n1", "step": 2, "host": {{}}, "device": {device}}}\n'
    append_texts(paths.telemetry_file(0, 0), [line])
    (sample,) = read_telemetry(paths)
    assert sample.device == Device(uuid="GPU-1", is_lost=is_lost)


def test_no_telemetry_is_no_fault(tmp_path: Path) -> None:
    faults = Faults()
    assert read_telemetry(RunPaths(tmp_path / "no"), faults) == newest_samples(RunPaths(tmp_path / "no"), faults) == []
    assert not faults


def test_a_folder_that_cannot_be_listed_is_told(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / ("r" * 300))  # longer than a name may be
    for read in (read_telemetry, newest_samples, read_warnings):
        faults = Faults()
        assert read(paths, faults=faults) == read(paths) == []
        assert len(faults) == 1
        assert "File name too long" in faults[0]


def test_damaged_lines_cost_themselves_only(paths: RunPaths) -> None:
    file = paths.telemetry_file(0, 0)
    append_samples(paths, [_sample(0)])
    others = ('{"time": "x"}', "no json", '{"time": 1, "elapsed_s": null, "device": 7, "host": {"cpus": "much"}}')
    append_texts(file, [f"{each}\n" for each in others], sync=False)
    append_samples(paths, [_sample(1)])
    with file.open("a") as handle:
        handle.write('{"time": 1, "elap')  # killed in it
    (paths.telemetry / "attempt-000.rank-0.jsonl.bak").write_text("{}")
    faults = Faults()
    found = read_telemetry(paths, faults)
    assert [each.step for each in found] == [0, None, 1]
    assert (found[1].device, found[1].host) == (None, Host())
    assert len(faults) == 1
    assert "line 3" in faults[0]
    assert [each.step for each in newest_samples(paths)] == [1]


def test_a_month_stays_below_a_megabyte_or_two_and_keeps_its_whole_length(paths: RunPaths) -> None:
    """Each fill of the file by hand: a month of samples, a period each, without writing half a million lines."""
    file = paths.telemetry_file(0, 0)
    number, lines = 0, 0
    for _ in range(12):
        fresh = [_sample(each, power_w=300.0, throttle=("power_cap",)) for each in range(number, number + 1_500)]
        append_samples(paths, fresh)
        number += 1_500
        if (lines := lines + 1_500) >= MAX_LINES:
            lines = thin_out(file)
            assert MAX_LINES // 4 < lines <= MAX_LINES // 2
    found = read_telemetry(paths)
    assert len(found) == lines < MAX_LINES
    assert file.stat().st_size < 2**20
    assert (found[0].step, found[-1].step) == (0, number - 1)
    spaces = [after.elapsed_s - each.elapsed_s for each, after in itertools.pairwise(found)]
    assert max(spaces) <= 4 * 5 * number / (MAX_LINES // 4)  # no hole: a multiple of the mean at most


def test_thinning_takes_times_as_they_come(paths: RunPaths) -> None:
    """All at one time, or back and forth: as many lines as asked for, the newest among them."""
    generator = random.Random(chosen_seed())
    for times in ([5.0] * 3_000, [generator.uniform(0, 1e6) for _ in range(3_000)]):
        file = paths.telemetry_file(0, 0)
        file.unlink(missing_ok=True)
        append_samples(paths, [dataclasses.replace(_sample(n), elapsed_s=each) for n, each in enumerate(times)])
        assert 256 < thin_out(file) <= MAX_LINES // 2
        assert [each.step for each in read_telemetry(paths)][-256:] == list(range(3_000 - 256, 3_000))


def test_energy_is_of_devices_where_they_tell_it_and_else_of_the_node() -> None:
    node = dataclasses.replace(_sample(0), host=Host(energy_j=100.0))
    assert energy_j([]) is None
    assert energy_j([_sample(0)]) is None
    assert energy_j([node, dataclasses.replace(node, rank=4)]) == 200.0
    assert energy_j([node, _sample(0, energy_j=10.0)]) == 10.0
    # Several devices of one rank: a program that drives all GPUs of its node.
    both = [_sample(0, energy_j=10.0), dataclasses.replace(_sample(0), device=Device(uuid="GPU-b", energy_j=3.0))]
    assert energy_j(both) == 13.0
    # It counts up within an attempt; attempts and ranks are added.
    ranks = [_sample(0, energy_j=10.0), _sample(1, energy_j=30.0), _sample(0, rank=1, energy_j=5.0)]
    assert energy_j([*ranks, _sample(0, attempt=1, energy_j=7.0)]) == 30 + 5 + 7


def test_a_pipe_and_an_endless_file_are_told_and_nobody_waits_for_them(paths: RunPaths) -> None:
    append_samples(paths, [_sample(1)])
    os.mkfifo(paths.telemetry_file(0, 1))
    paths.telemetry_file(0, 2).symlink_to("/dev/zero")
    for read in (newest_samples, read_telemetry, partial(newest_of_ranks, most_ranks=8)):
        faults = Faults()
        assert [each.rank for each in read(paths, faults=faults)] == [0]
        assert len(faults) == 2
        assert "pipe" in faults[0]
        assert "device" in faults[1]


_ODD = (
    '{"cpus": NaN, "rss_bytes": -5, "cpus_allowed": 1e999, "major_faults": "3", "energy_j": 1.7e308, '
    '"disk_read_bytes": [1]}',
    '{"xid": [[1], {}, "79", true, 48], "throttle": [1, ["hw_thermal"], "hw_thermal"], "power_w": -Infinity}',
)


def test_figures_that_no_counter_tells_are_left_out(paths: RunPaths) -> None:
    line = f'{{"time": 1, "elapsed_s": 1, "host": {_ODD[0]}, "device": {_ODD[1]}}}\n'
    append_texts(paths.telemetry_file(0, 0), [line])
    (sample,) = read_telemetry(paths)
    assert sample.host == Host()
    assert sample.device == Device(xid=(48,), throttle=("hw_thermal",))


def test_of_a_file_without_end_so_much_is_read(paths: RunPaths) -> None:
    append_texts(paths.telemetry_file(0, 0), ['{"time": 1, "elapsed_s": 1}\n' * (3 * MAX_LINES)])
    assert len(read_telemetry(paths)) == 2 * MAX_LINES
