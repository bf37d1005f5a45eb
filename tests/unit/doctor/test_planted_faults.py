"""`hpc-trainer doctor` names each planted fault by what it is, and nothing on a machine without one.

Faults are real where they can be made: mounts, limits, a network without a loopback, a played file system.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.cli.main import main
from hpc_trainer.doctor.cluster import Cluster
from hpc_trainer.doctor.findings import Finding, Status
from hpc_trainer.doctor.folder import folder_findings
from hpc_trainer.doctor.machine import machine_findings
from tests.shared_folder.clients import CALM, Share, missing
from tests.unit.slurm.fake_slurm import FakeSlurm, fake_slurm, no_slurm

__all__ = ["fake_slurm", "no_slurm"]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
needs_fuse = pytest.mark.skipif(bool(missing()), reason="no played file system here")
CONFIG = (
    "Configuration data as of {now}\nClusterName = bed\nSLURM_VERSION = 22.05.8\nPropagateResourceLimits = {limits}\n"
)
NODE = "NodeName={name} Arch={arch} CPUTot=8 Gres={gres} NodeAddr=n NodeHostName={name} State=IDLE\n"


def problems(findings: Iterator[Finding]) -> dict[str, Finding]:
    """Findings that are not fine, by the name of their check."""
    return {each.check: each for each in findings if each.status is not Status.ok}


def the_only(findings: Iterator[Finding], check: str, *words: str) -> Finding:
    """Return the only finding that is not fine; it is of this check, has these words, a reason and a fix."""
    found = problems(findings)
    assert [*found] == [check], found
    finding = found[check]
    text = f"{finding.what} {finding.why} {finding.fix}"
    assert [word for word in words if word not in text] == []
    assert finding.why
    assert finding.fix
    return finding


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Write files into a folder that comes first on Python's path."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def write(name: str, text: str) -> Path:
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


def distribution(name: str, version: str) -> tuple[str, str]:
    """File and text of the metadata of an installed distribution."""
    folder = f"{name.replace('-', '_')}-{version}.dist-info"
    return f"{folder}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a tmpfs with some options."""
    folders = []

    def mount(options: str) -> Path:
        folder = tmp_path / "mounted"
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
        folders.append(folder)
        return folder

    yield mount
    for folder in folders:
        subprocess.run(["umount", str(folder)], check=True)


# --- this machine ---


def test_nothing_is_wrong_with_this_machine() -> None:
    assert problems(machine_findings()) == {}


def test_a_foreign_plugin_of_hydra_is_named_and_not_run(plant: Callable[..., Path], tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    plugin = plant("hydra_plugins/helpful.py", f"open({str(ran)!r}, 'w')")
    the_only(machine_findings(), "hydra plugins", str(plugin), "runs as you")
    assert not ran.exists()


@pytest.mark.parametrize(
    ("name", "version", "status", "word"),
    [
        ("hostlist", "1.4.10", Status.warning, "python-hostlist"),
        ("pynvml", "11.5.3", Status.warning, "nvidia-ml-py"),
        ("hydra-core", "1.4.0rc3", Status.broken, "<1.4"),
        ("hydra-core", "1.3.0", Status.broken, ">=1.3.6"),
        ("omegaconf", "2.4.0", Status.broken, "without a warning"),
    ],
)
def test_a_wrong_package_is_named(
    name: str, version: str, status: Status, word: str, plant: Callable[..., Path]
) -> None:
    plant(*distribution(name, version))
    found = [each for each in machine_findings() if each.check == "packages" and each.status is not Status.ok]
    assert found[0].status is status
    assert f"{name} {version} is installed" in found[0].what
    assert word in f"{found[0].what} {found[0].why} {found[0].fix}"


def test_a_second_torch_is_named(plant: Callable[..., Path], tmp_path: Path) -> None:
    plant(*distribution("torch", "2.99.0"))
    the_only(machine_findings(), "packages", "torch is installed 2 times", "2.99.0 in", str(tmp_path / "site"))


def test_a_torch_of_another_architecture_is_named(plant: Callable[..., Path]) -> None:
    other = "aarch64" if platform.machine() == "x86_64" else "x86_64"
    plant("torch/__init__.py", "raise SystemExit('it was imported')")
    plant("torch/version.py", "__version__ = '2.9.1+cu128'\ncuda: str | None = '12.8'\nhip = None\n")
    plant(*distribution("torch", "2.9.1"))
    plant("torch-2.9.1.dist-info/WHEEL", f"Wheel-Version: 1.0\nTag: cp311-cp311-manylinux_2_28_{other}\n")
    found = problems(machine_findings())["torch"]
    assert found.status is Status.broken
    assert f"built for {other}" in found.what


@pytest.mark.parametrize(("cuda", "is_broken"), [("13.0", True), ("12.8", False)])
def test_a_torch_that_needs_a_newer_driver_is_named(
    cuda: str, is_broken: bool, plant: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant("torch/__init__.py", "")
    plant("torch/version.py", f"__version__ = '2.9.1'\ncuda: str | None = {cuda!r}\nhip = None\n")
    told = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n"
    (tmp_path / "version").write_text(told)
    monkeypatch.setattr("hpc_trainer.runtime.machine._NVIDIA", tmp_path)
    found = problems(machine_findings())
    assert ("torch" in found) is is_broken
    if is_broken:
        assert "needs NVIDIA driver 580 or newer, and this machine has 550.54.15" in found["torch"].what


@pytest.mark.parametrize(
    ("library", "package", "files"),
    [
        (
            "libnvJitLink.so.12",
            ("nvidia-nvjitlink-cu12", "12.8.93"),
            ("libnvJitLink.so.12.1.105", "libnvJitLink.so.12.8.93"),
        ),
        ("libcudart.so.13", ("nvidia-cuda-runtime", "13.0.48"), ("libcudart.so.13.0.3", "libcudart.so.13.1.2")),
        ("libnccl.so.2", ("nvidia-nccl-cu12", "2.27.3"), ("libnccl.so.2.18.1", "libnccl.so.2.27.3")),
    ],
)
def test_an_older_library_of_cuda_that_hides_torchs_is_named(
    library: str, package: tuple[str, str], files: tuple[str, str], plant: Callable[..., Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    plant(*distribution(*package))
    folder = tmp_path / "cuda" / "lib64"
    folder.mkdir(parents=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nonexistent::{folder}")
    older, fitting = files
    (folder / older).touch()
    (folder / library).symlink_to(older)
    the_only(machine_findings(), "libraries", older, package[1], str(folder), "module unload")
    (folder / library).unlink()
    (folder / fitting).touch()
    (folder / library).symlink_to(fitting)
    assert problems(machine_findings()) == {}


def test_a_folder_for_temporary_files_that_does_not_exist_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "gone"))
    the_only(machine_findings(), "temporary files", str(tmp_path / "gone"), "mktemp", "unset TMPDIR")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert problems(machine_findings()) == {}


def test_a_low_limit_is_named() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        finding = the_only(machine_findings(), "limits", "256 open files", "ulimit -S -n")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert finding.status is Status.warning


@needs_root
def test_a_machine_without_a_loopback_is_named() -> None:
    code = (
        "from hpc_trainer.doctor.machine import machine_findings\n"
        "print(*(f'{each.status.value} {each.check}: {each.what}' for each in machine_findings()), sep='\\n')"
    )
    done = subprocess.run(["unshare", "--net", sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [line[:14] for line in done.stdout.splitlines() if not line.startswith("ok ")] == ["broken ports: "]


# --- the folder of sweeps ---


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the played file server, a process beside others, time on a busy machine."""
    monkeypatch.setattr("hpc_trainer.doctor.folder._SILENCE_S", 60.0)


def folder(runs_dir: Path, purge_days: int | None = None) -> Iterator[Finding]:
    return folder_findings(runs_dir, purge_days)


def test_nothing_is_wrong_with_a_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    assert problems(folder(tmp_path / "a" / "runs")) == {}
    assert [*tmp_path.iterdir()] == []


def test_an_open_umask_is_named(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        the_only(folder(tmp_path), "umask", "0777", "umask 022")
    finally:
        os.umask(before)


def test_a_folder_that_everybody_may_rename_is_named(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "open" / "runs").mkdir(mode=0o755)
    assert the_only(folder(tmp_path / "open" / "runs"), "permissions", "chmod o-w").status is Status.broken


@needs_root
def test_a_full_disk_is_named(mounted: Callable[[str], Path]) -> None:
    place = mounted("size=512k,mode=0755")
    found = problems(folder(place))
    assert found["runs folder"].status is Status.broken
    assert "No space left on device" in found["runs folder"].what
    assert found["room"].status is Status.broken
    assert [*place.iterdir()] == []


@needs_root
def test_a_disk_without_inodes_is_named(mounted: Callable[[str], Path]) -> None:
    place = mounted("size=20g,nr_inodes=60,mode=0755")
    assert the_only(folder(place), "room", " files are left").status is Status.broken


@needs_root
def test_a_disk_with_room_for_nothing_breaks_no_promise(mounted: Callable[[str], Path]) -> None:
    place = mounted("size=64k,nr_inodes=4,mode=0755")  # room for the folder of the probe, and for little in it
    assert sorted(problems(folder(place))) == ["room", "runs folder"]


def test_a_link_to_nowhere_in_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "scratch").symlink_to(tmp_path / "unmounted")
    the_only(folder(tmp_path / "scratch" / "runs"), "runs folder", "No such file or directory", "HPC_TRAINER_RUNS")


@needs_root
def test_a_folder_that_is_read_only_is_named(mounted: Callable[[str], Path]) -> None:
    the_only(folder(mounted("ro,size=20g,mode=0755")), "runs folder", "Read-only file system", "HPC_TRAINER_RUNS")


@needs_root
def test_a_full_home_is_named(mounted: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = mounted("size=512k,mode=0755")
    monkeypatch.setenv("HOME", str(place))
    finding = the_only(folder(tmp_path / "runs"), "home", str(place), "0.0 GiB", "HF_HOME", "XDG_CACHE_HOME")
    assert finding.status is Status.warning
    subprocess.run(["mount", "-o", "remount,size=20g", str(place)], check=True)
    assert problems(folder(tmp_path / "runs")) == {}
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    the_only(folder(tmp_path / "runs"), "home", "does not exist")


@needs_root
def test_a_home_in_which_nothing_can_be_written_is_named(
    mounted: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plant a home directory like root's on NFS (root_squash), or like one that the site mounts read-only."""
    monkeypatch.setenv("HOME", str(mounted("ro,size=20g,mode=0755")))
    finding = the_only(folder(tmp_path / "runs"), "home", "Read-only file system", "HF_HOME")
    assert finding.status is Status.warning


@needs_root
def test_a_home_on_the_disk_of_the_sweeps_is_told_once(
    mounted: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = mounted("size=512k,mode=0755")
    monkeypatch.setenv("HOME", str(place))
    assert "home" not in problems(folder(place / "runs"))


@needs_fuse
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("kind", ["lustre", pytest.param("nfs60", marks=pytest.mark.long)])
def test_locks_that_a_file_system_refuses_are_named(kind: str, tmp_path: Path) -> None:
    settings = {**CALM, "locks": "refused", "lock_errno": 38}
    with Share(tmp_path / "share", kind, settings=settings) as share:
        found = [each for each in folder(share.client("login").mountpoint) if each.status is not Status.ok]
    assert [(each.check, each.status, each.what) for each in found] == [
        ("file system", Status.warning, "flock is refused (ENOSYS)"),
        ("file system", Status.warning, "fcntl is refused (ENOSYS)"),
    ]


@needs_fuse
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("kind", ["nfs4", *(pytest.param(name, marks=pytest.mark.long) for name in ("nfs3", "nfs60"))])
def test_nothing_is_wrong_with_nfs(kind: str, tmp_path: Path) -> None:
    with Share(tmp_path / "share", kind, settings=CALM) as share:
        assert problems(folder(share.client("login").mountpoint)) == {}


@needs_fuse
@pytest.mark.usefixtures("patient")
def test_a_server_whose_clock_is_wrong_is_named(tmp_path: Path) -> None:
    with Share(tmp_path / "share", "nfs4", settings=CALM, clock_s=300.0) as share:
        finding = the_only(folder(share.client("login").mountpoint), "clock", "300 s ahead", "NTP")
    assert finding.status is Status.broken


@needs_fuse
@pytest.mark.long
def test_a_lock_that_is_never_answered_ends_in_time(tmp_path: Path) -> None:
    with Share(tmp_path / "share", "nfs4", settings={**CALM, "locks": "hang"}) as share:
        begin = time.monotonic()
        found = problems(folder(share.client("login").mountpoint))
        assert time.monotonic() - begin < 60.0  # 5 s where a core is free
    assert found["runs folder"].status is Status.broken
    assert "(at: flock)" in found["runs folder"].what


@pytest.mark.long
def test_files_that_the_site_will_delete_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fake_slurm: FakeSlurm
) -> None:
    words = ["submit", "cluster=slurm", "sweep_name=old", "cluster.purge_days=90", f"paths.runs_dir='{tmp_path}/runs'"]
    assert run(words, monkeypatch, capsys)[0] == 0
    specs = tmp_path / "runs" / "old" / "specs.jsonl"
    assert problems(folder(tmp_path / "runs")) == {}
    os.utime(specs, (time.time() - 86 * 86_400,) * 2)
    finding = the_only(folder(tmp_path / "runs"), "purge", str(specs), "in 4 days", "1 runs of sweep old", "retry old")
    assert finding.status is Status.warning
    os.utime(specs, (time.time() - 40 * 86_400,) * 2)  # doctor has read the file: that is a use of it
    assert problems(folder(tmp_path / "runs")) == {}
    os.utime(specs, (time.time() - 40 * 86_400,) * 2)
    assert problems(folder(tmp_path / "runs", purge_days=30))["purge"].status is Status.broken


# --- the cluster ---


def run(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Play a command line; return the exit code and what it printed."""
    monkeypatch.setattr(sys, "argv", ["hpc-trainer", *words])
    code: object = 0
    try:
        main()
    except SystemExit as error:
        code = error.code
    return int(str(code or 0)), capsys.readouterr().out


@pytest.fixture
def slurm(fake_slurm: FakeSlurm) -> Callable[..., FakeSlurm]:
    """Slurm with nodes of these architectures and GPUs."""

    def play(*nodes: tuple[str, str], limits: str = "NONE", ahead_s: float = 0.0) -> FakeSlurm:
        config = CONFIG.format(now=int(time.time() + ahead_s), limits=limits)
        listed = "".join(NODE.format(name=f"n{i}", arch=arch, gres=gres) for i, (arch, gres) in enumerate(nodes))
        fake_slurm.print("scontrol", config + listed)  # each reader takes what it knows
        return fake_slurm

    return play


def test_nothing_is_wrong_with_a_healthy_cluster(slurm: Callable[..., FakeSlurm]) -> None:
    fake = slurm((platform.machine(), "(null)"), (platform.machine(), "(null)"))
    assert problems(Cluster().findings()) == {}
    assert fake.calls() == ["scontrol show config", "scontrol -o show nodes"]


def test_a_missing_sbatch_is_named(slurm: Callable[..., FakeSlurm]) -> None:
    fake = slurm((platform.machine(), "(null)"))
    (fake.bin / "sbatch").unlink()
    finding = the_only(Cluster().findings(), "slurm", "sbatch is not on PATH", "submits runs", str(fake.bin))
    assert finding.status is Status.broken


def test_a_scontrol_that_prints_something_else_is_named(fake_slurm: FakeSlurm) -> None:
    fake_slurm.print("scontrol", "\x00\ufffd scontrol 0.9 of another program\n")
    finding = the_only(Cluster().findings(), "slurm", "ClusterName", "of another program", "type -a scontrol")
    assert finding.status is Status.broken
    assert "\x00" not in finding.what


def test_nodes_that_slurm_hides_are_not_called_fine(slurm: Callable[..., FakeSlurm]) -> None:
    slurm()
    (finding,) = (each for each in Cluster().findings() if each.check == "architecture")
    assert (finding.status, finding.what) == (Status.ok, "Slurm shows this user no nodes, so theirs is unknown")


def test_variables_of_sbatch_in_the_shell_are_named(
    slurm: Callable[..., FakeSlurm], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm((platform.machine(), "(null)"))
    monkeypatch.setenv("SBATCH_EXPORT", "NONE")
    monkeypatch.setenv("SBATCH_REQUEUE", "1")
    assert problems(Cluster().findings()) == {}, "no run lacks anything without these"
    monkeypatch.setenv("SBATCH_ACCOUNT", "abc")
    monkeypatch.setenv("SBATCH_RESERVATION", "course")
    the_only(
        Cluster().findings(), "sbatch", "SBATCH_ACCOUNT=abc, SBATCH_RESERVATION=course", "cluster.account: abc",
        "cluster.sbatch.reservation: course",
    )  # fmt: skip
    own = tmp_path / "hpc_trainer" / "config.yaml"
    own.parent.mkdir()
    own.write_text("cluster.account: xyz\ncluster.sbatch.reservation: null\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert problems(Cluster().findings()) == {}
    monkeypatch.setenv("SLURM_JOB_ID", "1")  # of a surrounding job
    own.unlink()
    assert problems(Cluster().findings()) == {}


def test_a_variable_that_sends_jobs_to_other_clusters_is_named(
    slurm: Callable[..., FakeSlurm], monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm((platform.machine(), "(null)"))
    for clusters in ("bed", "BED"):
        monkeypatch.setenv("SLURM_CLUSTERS", clusters)
        assert problems(Cluster().findings()) == {}, "the cluster that answers"
    for clusters in ("bed,other", "all", "other"):
        monkeypatch.setenv("SLURM_CLUSTERS", clusters)
        finding = the_only(Cluster().findings(), "slurm", f"SLURM_CLUSTERS={clusters}", "export SLURM_CLUSTERS=bed")
        assert finding.status is Status.warning


def test_no_slurm_at_all_is_fine(no_slurm: None) -> None:
    (finding,) = Cluster().findings()
    assert finding.status is Status.ok
    assert "cluster=local" in finding.what


def test_nodes_of_another_architecture_are_named(
    slurm: Callable[..., FakeSlurm], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm(("riscv64", "(null)"), ("riscv64", "(null)"))
    the_only(Cluster().findings(), "architecture", "2 of 2 nodes are riscv64", "cluster.python")
    slurm(("riscv64", "(null)"), (platform.machine(), "(null)"))
    assert problems(Cluster().findings())["architecture"].status is Status.warning
    own = tmp_path / "hpc_trainer" / "config.yaml"
    own.parent.mkdir()
    own.write_text("cluster.python: /site/riscv/bin/python\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert problems(Cluster().findings()) == {}


def test_a_torch_for_cpus_on_a_cluster_of_gpus_is_named(
    slurm: Callable[..., FakeSlurm], plant: Callable[..., Path]
) -> None:
    plant("torch/__init__.py", "")
    plant("torch/version.py", "__version__ = '2.9.1+cpu'\ncuda: str | None = None\nhip: str | None = None\n")
    slurm((platform.machine(), "gpu:a100:4(S:0-1)"))
    the_only(Cluster().findings(), "torch", "built for CPU only, and 1 nodes have GPUs")


def test_a_controller_whose_clock_is_wrong_is_named(slurm: Callable[..., FakeSlurm]) -> None:
    slurm((platform.machine(), "(null)"), ahead_s=-600)
    the_only(Cluster().findings(), "clock", "s behind of this machine")


def test_a_limit_of_cpu_time_that_jobs_would_get_is_named(slurm: Callable[..., FakeSlurm]) -> None:
    slurm((platform.machine(), "(null)"), limits="ALL")
    assert problems(Cluster().findings()) == {}
    before = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (80_000, before[1]))
    try:
        the_only(Cluster().findings(), "limits", "80,000 s of CPU", "SIGXCPU")
        slurm((platform.machine(), "(null)"), limits="NONE")
        assert problems(Cluster().findings()) == {}
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, before)


# --- the command ---


def test_the_command_says_what_is_broken_within_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fake_slurm: FakeSlurm
) -> None:
    fake_slurm.hang("scontrol")
    code, said = run(["doctor", "--runs-dir", str(tmp_path), "--json"], monkeypatch, capsys)
    told: dict[str, Any] = json.loads(said)
    assert code == 1
    assert [(each["check"], each["status"]) for each in told["findings"] if each["status"] != "ok"] == [
        ("slurm", "broken")
    ]
    assert told["seconds"] < 60.0  # 5 s where a core is free
    assert told["slurm_calls"] == len(fake_slurm.calls()) <= 4


def test_a_fine_machine_is_told_in_a_line_for_each_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_slurm: None
) -> None:
    code, said = run(["doctor", "--runs-dir", str(tmp_path)], monkeypatch, capsys)
    *lines, last = said.splitlines()
    assert code == 0
    assert [line for line in lines if not line.startswith("OK ")] == []
    assert f"0 broken, 0 to look at, {len(lines)} fine" in last


def test_settings_that_cannot_be_read_are_named_beside_all_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_slurm: None
) -> None:
    own = tmp_path / "hpc_trainer" / "config.yaml"
    own.parent.mkdir()
    own.write_text("cluster: [\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HPC_TRAINER_RUNS", raising=False)
    code, said = run(["doctor", "--json"], monkeypatch, capsys)
    told: dict[str, Any] = json.loads(said)
    assert code == 1
    (finding,) = (each for each in told["findings"] if each["status"] != "ok")
    assert finding["check"] == "settings"
    assert str(own) in finding["what"]
    assert len(told["findings"]) > 10


def test_a_current_folder_that_was_removed_is_named(tmp_path: Path) -> None:
    for words in ("doctor", "plan experiment=digits"):
        script = f"mkdir gone; cd gone; rmdir ../gone; exec {sys.executable} -m hpc_trainer {words}"
        done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        assert "The current folder was removed" in done.stderr


def test_nothing_imports_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from hpc_trainer.doctor.verbs import examine\n"
        f"examine(Path({str(tmp_path)!r})); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
