"""The test bed itself: what the other tests take for granted about their Slurm."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slurm.testbed import bed, daemons
from tests.slurm.testbed.cluster import SlurmCluster
from tests.slurm.testbed.processes import is_alive
from tests.slurm.testbed.spec import HOST_RELEASE, NODES, PackagesMissingError, Spec


def test_four_idle_nodes_have_four_gpus_each(slurm: SlurmCluster) -> None:
    lines = slurm.run("sinfo", "-h", "-N", "-p", "main", "-o", "%N %t %G %c").stdout.splitlines()
    assert lines == [f"{node} idle gpu:a100:4 8" for node in NODES]


def test_srun_starts_two_tasks_on_each_of_two_nodes(slurm: SlurmCluster, tmp_path: Path) -> None:
    command = "srun bash -c 'echo \"$SLURM_PROCID $SLURMD_NODENAME\"'"
    job = slurm.submit(command, "--nodes=2", "--ntasks-per-node=2", cwd=tmp_path)
    assert slurm.wait_for_state(job, "COMPLETED", "FAILED") == "COMPLETED"
    ranks = (tmp_path / f"slurm-{job}.out").read_text().splitlines()
    assert sorted(ranks) == ["0 n1", "1 n1", "2 n2", "3 n2"]


def test_jobs_run_this_python_in_the_callers_folder(slurm: SlurmCluster, tmp_path: Path) -> None:
    program = "import os, sys; print(sys.prefix, os.getcwd())"
    done = slurm.run("srun", "-N1", sys.executable, "-c", program, cwd=tmp_path)
    assert done.stdout.split() == [sys.prefix, str(tmp_path)]


def test_each_gres_job_sees_its_own_gpus(slurm: SlurmCluster) -> None:
    show = ("bash", "-c", "echo $CUDA_VISIBLE_DEVICES")
    done = slurm.run("srun", "-N2", "--ntasks-per-node=1", "--gres=gpu:a100:2", *show)
    assert done.stdout.splitlines() == ["0,1", "0,1"]
    assert slurm.run("srun", "-N1", *show).stdout.strip() == ""


@pytest.mark.long
def test_a_preempted_job_is_requeued_and_comes_back(slurm: SlurmCluster, tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    job = slurm.submit(
        'echo "${SLURM_RESTART_COUNT:-0}" >>starts; [ -n "$SLURM_RESTART_COUNT" ] || srun sleep 99',
        "--partition=preempt0",
        "--nodes=4",
        "--requeue",
        cwd=tmp_path,
    )
    slurm.wait_for(starts.exists, 20, "the first start")
    preemptor = slurm.preempt(NODES)
    slurm.wait_for_state(preemptor, "RUNNING")
    slurm.wait_for_state(job, "PENDING")
    assert slurm.job(job)["Restarts"] == "1"
    slurm.run("scancel", str(preemptor))
    slurm.start_now(job)
    assert slurm.wait_for_state(job, "COMPLETED", "FAILED") == "COMPLETED"
    assert starts.read_text().split() == ["0", "1"]


def test_accounting_knows_a_finished_job(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = slurm.submit("exit 3", cwd=tmp_path)
    fields = ("sacct", "-X", "-n", "-P", "-j", str(job), "-o", "State,ExitCode,Account")
    slurm.wait_for(lambda: slurm.run(*fields).stdout.strip() == "FAILED|3:0|research", 20, "accounting")


def test_everything_listens_on_loopback_only(slurm: SlurmCluster) -> None:
    listening = slurm.listening()
    outside = [item for item in listening if not ipaddress.ip_address(item[1]).is_loopback]
    assert outside == []
    # mariadbd and munged have no port at all.
    expected = {"slurmctld", "slurmdbd", *(f"slurmd-{node}" for node in NODES)}
    assert {name for name, _, _ in listening} == expected


def test_up_twice_leaves_the_running_cluster_alone(slurm: SlurmCluster) -> None:
    before = slurm.daemons()
    assert bed.up(slurm.spec, print) is False
    assert slurm.daemons() == before


def test_the_printed_environment_reaches_the_cluster(slurm: SlurmCluster) -> None:
    project = Path(__file__).resolve().parents[2]
    words = f"{sys.executable} -m tests.slurm.testbed env --dir {slurm.spec.folder}"
    show = 'command -v sinfo && sinfo -h -N -p main -o %N && echo "$HPC_TRAINER_CONFIG_DIR"'
    script = f'eval "$({words} --release {slurm.release})" && {show}'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, cwd=project)
    assert done.stdout.split() == [str(slurm.spec.bin / "sinfo"), *NODES, slurm.env["HPC_TRAINER_CONFIG_DIR"]]
    script = f"export HPC_TRAINER_CONFIG_DIR=/site/conf && {script}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, cwd=project)
    assert done.stdout.split()[-1] == f"{slurm.env['HPC_TRAINER_CONFIG_DIR']}:/site/conf", "a site's own stays"


@pytest.mark.long
def test_a_dead_slurmd_and_a_drained_node_come_back(slurm: SlurmCluster) -> None:
    os.kill(slurm.daemons()["slurmd-n3"], 9)
    slurm.run("scontrol", "update", "nodename=n2", "state=drain", "reason=test")
    slurm.run("scontrol", "update", "nodename=n4", "state=down", "reason=test")
    slurm.tidy()
    assert bed.missing_daemons(slurm.spec) == set()
    assert slurm.run("srun", "-N4", "hostname").returncode == 0


@pytest.mark.long
@pytest.mark.parametrize("variant", ["noaccounting"])
def test_without_accounting_sacct_refuses(slurm_variant: Callable[[str], SlurmCluster], variant: str) -> None:
    cluster = slurm_variant(variant)
    done = cluster.run("sacct", check=False)
    assert done.returncode == 1
    assert "accounting storage is disabled" in done.stderr.lower()


STUBBORN = """
trap '' TERM
srun bash -c 'trap "" TERM; env -i setsid sleep 98761 & setsid sleep 98761 & sleep 98761' &
sleep 98761
"""


def _job_processes(spec: Spec) -> set[str]:
    """Of this cluster: slurmstepd keeps its node's log open; no other test's job sleeps for so long."""
    shown = subprocess.run(["ps", "-eo", "pid,stat,args"], capture_output=True, text=True, check=True)
    lines = (line.split(None, 2) for line in shown.stdout.splitlines())
    return {
        pid
        for pid, state, args in lines
        if "Z" not in state and ("sleep 98761" in args or ("slurmstepd" in args and _has_open(pid, spec.folder)))
    }


def _has_open(pid: str, folder: Path) -> bool:
    with contextlib.suppress(OSError):  # it ended meanwhile
        return any(entry.readlink().is_relative_to(folder) for entry in Path(f"/proc/{pid}/fd").iterdir())
    return False


@pytest.mark.long
def test_down_leaves_no_process_and_no_file(slurm: SlurmCluster, tmp_path: Path) -> None:
    spec = Spec(release=slurm.release, folder=tmp_path / "bed")
    bed.up(spec, print)
    try:
        SlurmCluster.attach(spec).submit(STUBBORN, "--nodes=2", cwd=tmp_path)
        # Two slurmstepd with four of each node's processes, and the batch shell's.
        slurm.wait_for(lambda: len(_job_processes(spec)) >= 10, 20, "the stubborn processes")
        pids = list(SlurmCluster.attach(spec).daemons().values())
    finally:
        bed.down(spec)
    assert _job_processes(spec) == set()
    assert not any(is_alive(pid) for pid in pids)
    assert not spec.folder.exists()
    assert str(spec.folder) not in Path("/proc/self/mounts").read_text()


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemons, "_SYSTEM_PATH", "/nowhere")
    with pytest.raises(PackagesMissingError, match=r"apt-get install .*munge.* slurmctld"):
        daemons.require_packages(Spec(release=HOST_RELEASE))
