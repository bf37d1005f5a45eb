"""What a rank uses of its node: of real processes, and of control groups as they are in files."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpc_trainer.observe.host_counters import AddedPower, HostCounters, HostEnergy, Notes

_BUSY = "import time\nblock = bytearray(64 << 20)\nwhile time.process_time() < 0.3: pass\n"


def test_children_and_their_children_count_and_what_ended_stays() -> None:
    counters = HostCounters(Notes(), has_energy=False)
    begin = time.monotonic()
    before = counters.read(begin)
    assert before.cpus is None
    inner = f"{_BUSY}print('busy', flush=True)\ninput()"
    code = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {inner!r}]).returncode)"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "busy\n"
        during = counters.read(time.monotonic())
        child.communicate("\n")
    now = time.monotonic()
    after = counters.read(now)
    assert before.rss_bytes is not None
    assert during.rss_bytes is not None
    assert after.rss_bytes is not None
    assert during.rss_bytes - before.rss_bytes > 64 << 20
    assert after.rss_bytes < during.rss_bytes
    assert during.cpus is not None
    assert after.cpus is not None
    assert during.cpus * (now - begin) > 0.25  # 0.3 s of a core, in ticks of 10 ms
    assert after.cpus >= 0
    assert before.cpus_allowed is not None
    assert before.cpus_allowed >= 1
    assert before.memory_limit is not None
    assert before.memory_available is not None
    assert 0 < before.memory_available <= before.memory_limit


def test_bytes_that_the_rank_wrote(tmp_path: Path) -> None:
    counters = HostCounters(Notes(), has_energy=False)
    with (tmp_path / "file").open("wb") as file:
        file.write(bytes(1 << 20))
    used = counters.read(0.0)
    assert used.disk_write_bytes is not None
    assert used.disk_write_bytes >= 1 << 20


def _groups(root: Path, lines: str, **files: str) -> None:
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "self" / "cgroup").write_text(lines)
    for name, text in files.items():
        place = root / "sys" / "fs" / "cgroup" / name.replace("__", "/").replace("_dot_", ".")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)


def test_the_smallest_limit_of_version_2_counts(tmp_path: Path) -> None:
    _groups(
        tmp_path, "0::/slurm/job_7/step_0\n",
        slurm__job_7__memory_dot_max="4000000\n", slurm__job_7__memory_dot_current="3000000\n",
        slurm__job_7__memory_dot_stat="anon 1\ninactive_file 500000\n", slurm__job_7__step_0__memory_dot_max="max\n",
        slurm__job_7__cpu_dot_max="150000 100000\n", slurm__cpu_dot_max="max 100000\n",
    )  # fmt: skip
    used = HostCounters(Notes(), has_energy=False, root=tmp_path).read(0.0)
    assert (used.memory_limit, used.memory_available) == (4_000_000, 1_500_000)
    assert used.cpus_allowed is not None
    assert used.cpus_allowed <= 1.5


def test_the_limit_of_version_1_counts(tmp_path: Path) -> None:
    _groups(
        tmp_path, "4:memory:/slurm/uid_1/job_7\n3:cpu,cpuacct:/slurm\n",
        memory__slurm__uid_1__job_7__memory_dot_limit_in_bytes="5000000\n",
        memory__slurm__uid_1__job_7__memory_dot_usage_in_bytes="1000000\n",
        memory__slurm__uid_1__job_7__memory_dot_stat="total_inactive_file 0\n",
        memory__memory_dot_limit_in_bytes="9223372036854771712\n",
        cpu__slurm__cpu_dot_cfs_quota_us="50000\n", cpu__slurm__cpu_dot_cfs_period_us="100000\n",
    )  # fmt: skip
    used = HostCounters(Notes(), has_energy=False, root=tmp_path).read(0.0)
    assert (used.memory_limit, used.memory_available) == (5_000_000, 4_000_000)
    assert used.cpus_allowed == 0.5


def test_a_group_without_limit_is_the_node(tmp_path: Path) -> None:
    _groups(tmp_path, "0::/\n", memory_dot_max="max\n", cpu_dot_max="max 100000\n")
    used = HostCounters(Notes(), has_energy=False, root=tmp_path).read(0.0)
    real = HostCounters(Notes(), has_energy=False, root=tmp_path / "nothing").read(0.0)
    assert used.memory_limit == real.memory_limit is not None


# --- energy ---


def _zone(root: Path, name: str, what: str, uj: int) -> Path:
    folder = root / "sys" / "class" / "powercap" / name
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{what}\n")
    (folder / "energy_uj").write_text(str(uj))
    (folder / "max_energy_range_uj").write_text("1000000000\n")
    return folder


def test_rapl_counts_packages_and_memory_and_begins_anew(tmp_path: Path) -> None:
    package = _zone(tmp_path, "intel-rapl:0", "package-0", 999_000_000)
    _zone(tmp_path, "intel-rapl:0:0", "core", 5)
    memory = _zone(tmp_path, "intel-rapl:0:1", "dram", 10)
    notes = Notes()
    energy = HostEnergy(notes, tmp_path)
    assert energy.read(100.0) == 0.0
    (package / "energy_uj").write_text("49000000")  # 50 J on, past the range
    (tmp_path / "sys/class/powercap/intel-rapl:0:0/energy_uj").write_text("900000000")  # in the package already
    (memory / "energy_uj").write_text("10000010")
    assert energy.read(110.0) == pytest.approx(60.0)
    assert energy.read(110.0) == pytest.approx(60.0), "nothing was used since"
    assert not notes.subjects


def test_rapl_for_root_only_is_told_once_and_the_meter_is_taken(tmp_path: Path) -> None:
    zone = _zone(tmp_path, "intel-rapl:0", "package-0", 5)
    (zone / "energy_uj").unlink()
    (zone / "energy_uj").mkdir()  # root reads what others may not: a folder is refused to all
    meter = tmp_path / "sys" / "class" / "hwmon" / "hwmon3"
    meter.mkdir(parents=True)
    (meter / "name").write_text("power_meter\n")
    (meter / "power1_average").write_text("300000000\n")
    notes = Notes()
    energy = HostEnergy(notes, tmp_path)
    assert energy.read(0.0) == 0.0
    (meter / "power1_average").write_text("500000000\n")
    assert energy.read(10.0) == 4000.0
    assert notes.subjects == {"energy"}


def test_a_node_without_meters_is_silent(tmp_path: Path) -> None:
    notes = Notes()
    assert HostEnergy(notes, tmp_path).read(1.0) is None
    assert not notes.subjects


def test_a_clock_that_goes_back_adds_no_energy() -> None:
    added = AddedPower()
    assert [added.add(at, 100.0) for at in (0.0, 10.0, 5.0, 6.0)] == [0.0, 1000.0, 1000.0, 1100.0]
