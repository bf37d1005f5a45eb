"""The cluster of clients itself: what the other tests take for granted about it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slurm.testbed import bed
from tests.slurm.testbed.cluster import SlurmCluster
from tests.slurm.testbed.mounts import CLIENTS, name_of
from tests.slurm.testbed.processes import is_alive
from tests.slurm.testbed.spec import NODES, SharedFolder, Spec

On = Callable[[str], SlurmCluster]


def _devices(slurm: SlurmCluster) -> set[str]:
    return {slurm.run_on(client, "stat", "-c", "%d", slurm.spec.mountpoint).stdout for client in CLIENTS}


def test_each_node_and_the_login_shell_have_a_mount_of_their_own(on: On, tmp_path: Path) -> None:
    slurm = on("nfs3")
    assert len(_devices(slurm)) == len(CLIENTS)
    seen_by_jobs = set()
    for node in NODES:
        job = slurm.submit(f"srun stat -c %d {slurm.spec.mountpoint}", f"--nodelist={node}", cwd=tmp_path)
        assert slurm.wait_for_state(job, "COMPLETED", "FAILED") == "COMPLETED"
        seen_by_jobs.add((tmp_path / f"slurm-{job}.out").read_text())
    assert len(seen_by_jobs) == len(NODES)
    assert seen_by_jobs < _devices(slurm), "jobs see their node's mount"


@pytest.mark.long
def test_a_name_that_was_missing_stays_missing_until_the_folder_is_looked_at(on: On, tmp_path: Path) -> None:
    slurm = on("nfs3")
    folder = slurm.spec.mountpoint / tmp_path.name
    folder.mkdir()
    assert not (folder / "new").exists()
    slurm.run_on("n1", "sh", "-c", f"echo hello > {folder}/new")
    assert (slurm.spec.backing / tmp_path.name / "new").read_text() == "hello\n", "the server has it"
    assert slurm.run_on("n2", "cat", folder / "new").stdout == "hello\n", "so has a client that did not ask before"
    assert not (folder / "new").exists(), "the login shell's client still knows that there is none"
    assert list(folder.iterdir()) == [folder / "new"]
    slurm.wait_for((folder / "new").exists, slurm.cache_age_s + 5, "the new file at the login shell")


@pytest.mark.long
def test_a_node_comes_back_with_its_mount(on: On) -> None:
    slurm = on("nfs3")
    before = slurm.daemons()
    slurm.cut_power("n2")
    assert not is_alive(before["mount-n2"])
    os.kill(before["slurmd-n3"], 9)
    os.kill(before["mount-n4"], 9)
    slurm.wait_for(lambda: bed.missing_daemons(slurm.spec) >= {"slurmd-n3", "mount-n4"}, 10, "their end")
    slurm.tidy()
    after = slurm.daemons()
    assert set(after) == set(before)
    assert after["mount-n3"] == before["mount-n3"], "only its slurmd had ended"
    assert len(_devices(slurm)) == len(CLIENTS)
    listed = slurm.run("srun", "-N4", "stat", "-f", "-c", "%T", slurm.spec.mountpoint).stdout.split()
    assert len(set(listed)) == 1
    assert len(listed) == len(NODES)


@pytest.mark.long
def test_clocks_of_nodes_are_apart_and_waits_keep_their_length(tmp_path: Path) -> None:
    spec = Spec(folder=tmp_path / "bed", share=SharedFolder("local", node_clocks_s=(45, -60, 90, -90)))
    bed.up(spec, print)
    program = "import time, torch; a = time.monotonic(); time.sleep(0.5); print(time.time(), time.monotonic() - a)"
    (tmp_path / "clock.py").write_text(program)
    try:
        slurm = SlurmCluster.attach(spec)
        begin = time.time()
        script = f"date +%s.%N\nsbatch --output=/dev/null --wrap=true\nsrun {sys.executable} clock.py"
        for node, ahead in (("n1", 45), ("n4", -90)):
            job = slurm.submit(script, f"--nodelist={node}", cwd=tmp_path)
            assert slurm.wait_for_state(job, "COMPLETED", "FAILED", timeout_s=60) == "COMPLETED"
            batch, *_, told = (tmp_path / f"slurm-{job}.out").read_text().splitlines()
            now, slept = map(float, told.split())
            assert begin <= float(batch) - ahead <= now - ahead <= time.time()
            assert 0.5 <= slept < 5
    finally:
        bed.down(spec)


@pytest.mark.long
def test_down_leaves_no_mount_and_no_process(tmp_path: Path) -> None:
    spec = Spec(folder=tmp_path / "bed", share=SharedFolder("local"))
    bed.up(spec, print)
    try:
        slurm = SlurmCluster.attach(spec)
        job = slurm.submit(f"cd {spec.mountpoint}; exec 3>held; srun sleep 600", "--nodes=2", cwd=tmp_path)
        slurm.wait_for((spec.backing / "held").exists, 30, f"job {job}")
        daemons = slurm.daemons()
        pids = [*daemons.values(), *slurm.job_processes()]
        assert {name_of(client) for client in CLIENTS} < set(daemons)
    finally:
        bed.down(spec)
    assert [pid for pid in pids if is_alive(pid)] == []
    assert str(spec.folder) not in Path("/proc/self/mounts").read_text()
    assert not spec.folder.exists()
