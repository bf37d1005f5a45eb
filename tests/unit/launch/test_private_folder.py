"""A folder of sweeps that the compute nodes cannot see is refused by plan, with how that is known; no other one is."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.errors import ConfigError, SilentError
from hpc_trainer.launch.grids import find_private_folder, find_unmounted, plan_grid, submit_grid
from hpc_trainer.slurm.commands import parse_node_hosts
from tests.unit.launch.grids import make_grid
from tests.unit.record.builders import make_specs
from tests.unit.slurm.fake_slurm import FakeSlurm

_HERE = socket.gethostname().partition(".")[0]
_OTHERS = {"gpu001": "gpu001", "gpu002": "gpu002", "gpu003": "gpu003", "gpu004": "gpu004"}
_MOUNTS = """\
21 1 8:1 / / rw - ext4 /dev/root rw
22 21 0:1 / /dev/shm rw - tmpfs tmpfs rw
23 21 0:2 / /home rw - nfs4 server:/home rw
24 21 0:3 / /data rw - xfs /dev/sdb rw
25 21 0:4 / /box rw - overlay overlay rw
"""
_NODES = """\
NodeName=n1 Arch=x86_64 CoresPerSocket=4 NodeAddr=127.0.0.1 NodeHostName=host.site.org Port=17001 Version=22.05.8
NodeName=n2 State=DOWN NodeAddr=n2 NodeHostName=n2
"""


@pytest.fixture(autouse=True)
def _mounts(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_text
    monkeypatch.setattr(
        "hpc_trainer.record.files.Path.read_text",
        lambda path, **options: _MOUNTS if str(path) == "/proc/self/mountinfo" else read(path, **options),
    )
    for name in ("SCRATCH", "WORK", "PROJECT"):
        monkeypatch.delenv(name, raising=False)


def _find(folder: str, hosts: dict[str, str]) -> str | None:
    return find_private_folder(Path(folder), ask=lambda: hosts, exports=Path("/none"))


@pytest.mark.parametrize(
    ("folder", "what"),
    [
        ("/tmp/me/runs", "a folder for temporary files of"), ("/dev/shm/runs", "memory of"),
        ("/box/runs", "a container's own layer on"),
    ],
)  # fmt: skip
def test_what_only_this_machine_sees_is_refused_with_how_that_is_known(folder: str, what: str) -> None:
    problem = _find(folder, _OTHERS)
    assert problem is not None
    for words in (f"paths.runs_dir={folder}", f"{what} {_HERE}", "/proc/self/mountinfo", "gpu001, gpu002, gpu003 and 1",
                  "export HPC_TRAINER_RUNS="):  # fmt: skip
        assert words in problem


def test_the_nearest_shared_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", "/home/scratch")
    monkeypatch.setattr("hpc_trainer.launch.grids.Path.is_dir", lambda path: True)
    assert "paths.runs_dir=/home/scratch/runs" in str(_find("/tmp/runs", _OTHERS))


@pytest.mark.parametrize(
    ("folder", "hosts"),
    [
        ("/home/me/runs", _OTHERS), ("/data/runs", _OTHERS), ("/srv/runs", _OTHERS), ("/tmpfiles/runs", _OTHERS),
        ("/tmp/runs", {}), ("/tmp/runs", {"n1": _HERE, "n2": _HERE}), ("/tmp/runs", {**_OTHERS, "me": _HERE}),
        ("/tmp/runs", {"n1": f"{_HERE}.site.org"}),
    ],
)  # fmt: skip
def test_what_nodes_may_see_is_left_alone(folder: str, hosts: dict[str, str]) -> None:
    assert _find(folder, hosts) is None


def test_a_slurm_that_does_not_say_is_no_evidence() -> None:
    def silent() -> dict[str, str]:
        raise SilentError("scontrol did not answer")

    assert find_private_folder(Path("/tmp/runs"), ask=silent) is None


def test_what_this_machine_exports_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = {"/proc/self/mountinfo": _MOUNTS, "/etc/exports": "# all\n\n#/tmp/other *(rw)\n  \n/tmp/shared *(rw)\n"}
    monkeypatch.setattr("hpc_trainer.record.files.Path.read_text", lambda path, **options: read[str(path)])
    assert find_private_folder(Path("/tmp/shared/runs"), ask=lambda: _OTHERS) is None
    assert find_private_folder(Path("/tmp/other"), ask=lambda: _OTHERS) is not None


@pytest.fixture
def fstab(tmp_path: Path) -> Path:
    path = tmp_path / "fstab"
    path.write_text(
        "# <file system> <mount point> <type> <options>\n\n/dev/root / ext4 defaults 0 1\n/dev/sda2 none swap sw 0 0\n"
        "server:/home /home nfs4 rw 0 0\nserver:/scratch /hpc/scratch nfs4 rw,_netdev 0 0\n"
        "//nas/lab /lab\\040data cifs ro\nLABEL=usb /media/usb vfat noauto,user 0 0\nbroken line\n"
    )
    return path


@pytest.mark.parametrize("folder", ["/hpc/scratch", "/hpc/scratch/me/runs", "/lab data/runs"])
def test_a_folder_whose_file_system_is_not_mounted_is_refused(folder: str, fstab: Path) -> None:
    problem = find_unmounted(Path(folder), fstab=fstab)
    assert problem is not None
    point = "/lab data" if "lab" in folder else "/hpc/scratch"
    for words in (f"paths.runs_dir={folder}: ", f"a file system for {point} (", f"Mount it: mount {point}."):
        assert words in problem


@pytest.mark.parametrize(
    "folder", ["/home/me/runs", "/data/runs", "/hpc/scratch2/runs", "/hpc/runs", "/media/usb/runs", "/srv/runs"]
)
def test_a_folder_that_is_mounted_or_in_no_list_is_left_alone(folder: str, fstab: Path) -> None:
    assert find_unmounted(Path(folder), fstab=fstab) is None
    assert find_unmounted(Path("/hpc/scratch/runs"), fstab=fstab.with_name("none")) is None


def test_an_unmounted_folder_that_is_in_use_stays_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fstab").write_text(f"server:/scratch {tmp_path}/scratch nfs4 rw 0 0\n")
    monkeypatch.setattr(find_unmounted, "__kwdefaults__", {"fstab": tmp_path / "fstab"})
    runs = tmp_path / "scratch" / "runs"
    runs.mkdir(parents=True)
    grid = make_grid(runs / "sweep", make_specs(1, "cluster=local"), Executor.local)
    (problem,) = plan_grid(grid).problems
    assert "nothing is mounted there now" in problem
    with pytest.raises(ConfigError, match="nothing is mounted there now"):
        submit_grid(grid)
    assert list(runs.iterdir()) == []
    (runs / "earlier").mkdir()
    assert list(plan_grid(grid).problems) == []


def test_nodes_and_their_machines_are_read() -> None:
    assert parse_node_hosts(_NODES) == {"n1": "host.site.org", "n2": "n2"}
    assert parse_node_hosts("No nodes in the system\n") == {}


def test_plan_and_submit_refuse_before_anything_is_written(
    fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_slurm.print("scontrol", "NodeName=gpu1 NodeAddr=gpu1 NodeHostName=gpu1\n")
    monkeypatch.setattr("hpc_trainer.launch.grids.mount_of", lambda folder: ("/tmp", "tmpfs", "rw"))
    grid = make_grid(tmp_path / "runs" / "sweep", make_specs(1, "cluster=slurm"))
    assert any("they do not see it" in problem for problem in plan_grid(grid).problems)
    with pytest.raises(ConfigError, match="they do not see it"):
        submit_grid(grid)
    assert not (tmp_path / "runs").exists()
