"""Ways to start the ranks, on a real Slurm: torchrun on each node, a container without Slurm's commands, no variables.

The container is Apptainer (testbed/apptainer.py). Where it cannot be fetched or cannot start, and on a Slurm in a
chroot, a script takes the words of `apptainer exec`, and runs its command with a PATH without Slurm's commands.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_trainer.runtime.cores import cores_of
from tests.slurm.driver import Driver
from tests.slurm.testbed.apptainer import check_container, ensure_apptainer, make_image
from tests.slurm.testbed.cluster import SlurmCluster
from tests.slurm.testbed.spec import BedError

TWO_NODES = (
    "experiment=digits", "model=mlp", "hardware=testbed_x4", "hardware.num_nodes=2", "hardware.gpus_per_node=2",
    "train.grad_accum_steps=2", "train.eval_every_steps=0", "checkpoint.every_steps=100000",
    "monitor.log_every_steps=10", "monitor.heartbeat_every_s=0.1",
)  # fmt: skip
ONE = (
    "experiment=digits", "model=mlp", "hardware=testbed_x1", "train.eval_every_steps=0", "train.grad_accum_steps=2",
    "checkpoint.every_steps=100000", "monitor.log_every_steps=10", "monitor.heartbeat_every_s=0.1",
)  # fmt: skip


@pytest.fixture
def driver(slurm: SlurmCluster, tmp_path: Path) -> Driver:
    return Driver(slurm, tmp_path)


_APPTAINER = """#!/bin/bash
# apptainer exec OPTION... IMAGE COMMAND..., without Slurm
[ "$1" = exec ] || exit 2; shift
while [ "${1:0:2}" = -- ]; do [ "$1" != --bind ] || shift; shift; done
export PATH=/no/slurm/here APPTAINER_CONTAINER=$1; shift
unset SLURM_CONF
exec "$@"
"""


def _container_program(tmp_path: Path, slurm: SlurmCluster, image: Path, binds: list[str]) -> Path:
    """Return the folder of the program `apptainer`: the real one, which refuses to run in a chroot, or the script."""
    if not slurm.spec.chrooted:
        try:
            folder = ensure_apptainer()
            check_container(folder / "apptainer", image, binds)
            return folder
        except BedError as error:
            print(f"a script stands in: {error}")
    folder = tmp_path / "programs"
    folder.mkdir()
    (folder / "apptainer").write_text(_APPTAINER)
    (folder / "apptainer").chmod(0o755)
    return folder


@pytest.fixture
def in_container(tmp_path: Path, slurm: SlurmCluster) -> list[str]:
    """Overrides of a run in a container without Slurm's commands, whose job has no variables of the shell that submits.

    The container sees neither /tmp nor the home folder, only what is bound.
    """
    image = tmp_path / "torch image"
    binds = make_image(image)
    folder = _container_program(tmp_path, slurm, image, binds)
    return [
        "cluster.environment.container=apptainer", f"cluster.environment.image='{image}'",
        f"cluster.environment.binds={json.dumps(binds)}", "cluster.environment.container_args=[--contain,--no-home]",
        "cluster.environment.inherit=false", f"cluster.python={sys.executable}",
        f"cluster.setup=['export PATH={folder}:$PATH OMP_DISPLAY_ENV=FALSE']",
    ]  # fmt: skip


def test_a_run_in_a_container_without_slurm_is_requeued_by_the_batch_script(
    driver: Driver, in_container: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(driver.slurm.env, "NCCL_OF_THE_SHELL", "1")
    words = (*ONE, "train.num_steps=1500", *in_container, "hardware.partition=preempt", "sweep_name=inside")
    job_id = f"{driver.submit(*words)['arrays'][0]['job_id']}_0"
    preemptor = driver.preempt_at("inside", 20, job_id)
    driver.wait_for_states("inside", "REQUEUED")
    # The first record says what is tried, the last one what was done.
    tried, end = driver.attempts("inside", "end")
    assert tried["action"] == "requeue"
    assert (end["signal"], end["action"]) == ("SIGTERM", "requeue by the batch script")
    driver.slurm.wait_for(lambda: driver.slurm.job(job_id)["Restarts"] == "1", 60, "the requeue")
    driver.slurm.run("scancel", str(preemptor))
    driver.start_again(job_id)
    (run,) = driver.wait_for_states("inside", "COMPLETED", timeout_s=600).values()
    assert (run["attempt"], run["job_id"]) == (2, job_id)
    assert [record["step"] for record in driver.attempts("inside", "resume")] == [0, end["saved_step"]]
    assert "Exited with exit code 75" in (driver.runs / "inside/slurm" / f"{job_id}.out").read_text()

    (path,) = (driver.runs / "inside").glob("*/logs/attempt-001.environment.json")
    record = json.loads(path.read_text())
    image = record["environment"]["image_file"]
    assert image["bytes"] > 0, "as the batch script sees it: the container does not"
    assert record["system"]["container"] == f"apptainer {image['path']}"
    assert record["variables"]["OMP_DISPLAY_ENV"] == "FALSE", "what a line of the script sets reaches the ranks"
    assert "NCCL_OF_THE_SHELL" not in record["variables"]


@pytest.mark.long
def test_the_batch_script_submits_a_successor_of_a_run_in_a_container(driver: Driver, in_container: list[str]) -> None:
    answer = driver.submit(*ONE, "train.num_steps=1500", *in_container, "sweep_name=inside")
    job_id = f"{answer['arrays'][0]['job_id']}_0"
    driver.wait_for_step("inside", 20)
    driver.slurm.run("scontrol", "update", f"jobid={job_id}", "requeue=0")
    driver.slurm.run("scancel", "--signal=USR2", job_id)
    driver.slurm.wait_for(lambda: driver.only_run("inside")["job_id"] != job_id, 60, "a successor of the job")
    (run,) = driver.wait_for_states("inside", "COMPLETED", "FAILED").values()
    assert (run["state"], run["attempt"]) == ("COMPLETED", 2), driver.all_logs()
    end = driver.attempts("inside", "end")[1]
    assert [record["step"] for record in driver.attempts("inside", "resume")] == [0, end["saved_step"]]
    assert driver.slurm.run("squeue", "-h").stdout == "", "one successor"


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_ranks_in_a_container_that_hides_all_variables_compute_the_same_bits_as_outside(
    driver: Driver, in_container: list[str], launcher: str
) -> None:
    """--containall implies --cleanenv and a process namespace of its own."""
    words = (*TWO_NODES, "train.num_steps=200", f"hardware.launcher={launcher}")
    closed = [word.replace("[--contain,", "[--containall,") for word in in_container]
    job_id = (
        f"{driver.submit(*words, *closed, 'hardware.partition=preempt', 'sweep_name=inside')['arrays'][0]['job_id']}_0"
    )
    preemptor = driver.preempt_at("inside", 20, job_id)
    driver.wait_for_states("inside", "REQUEUED")
    driver.slurm.run("scancel", str(preemptor))
    driver.start_again(job_id)
    driver.submit(*words, "sweep_name=outside")
    (run,) = driver.wait_for_states("inside", "COMPLETED").values()
    assert (run["attempt"], run["job_id"]) == (2, job_id)
    driver.wait_for_states("outside", "COMPLETED")
    assert driver.final_state("inside") == driver.final_state("outside")
    assert driver.losses("inside") == driver.losses("outside")


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_ranks_of_a_site_that_exports_and_binds_nothing_have_their_variables_and_cores(
    driver: Driver, launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Play a site that adds --export=NONE to each sbatch; the test Slurm has TaskPlugin=task/none."""
    path = driver.slurm.env["PATH"]
    (tmp_path / "site").mkdir()
    sbatch = tmp_path / "site" / "sbatch"
    sbatch.write_text(f'#!/bin/bash\nexec {shutil.which("sbatch", path=path)} --export=NONE "$@"\n')
    sbatch.chmod(0o755)
    monkeypatch.setitem(driver.slurm.env, "PATH", f"{sbatch.parent}:{path}")
    for name, value in (("SBATCH_EXPORT", "NONE"), ("SLURM_EXPORT_ENV", "NONE"), ("NCCL_OF_THE_SHELL", "1")):
        monkeypatch.setitem(driver.slurm.env, name, value)
    cores = os.sched_getaffinity(0)
    share = len(cores) // 2
    words = (*ONE, "train.num_steps=1500", "hardware.gpus_per_node=2", f"hardware.cpus_per_gpu={share}",
             f"hardware.launcher={launcher}", f"cluster.python={sys.executable}",
             "cluster.setup=['export OMP_DISPLAY_ENV=FALSE']", "sweep_name=bare")  # fmt: skip
    driver.submit(*words)
    driver.wait_for_step("bare", 10)
    job_id = driver.only_run("bare")["job_id"]
    assert driver.slurm.job(job_id)["NumCPUs"] == str(2 * share)
    bound = _allowed_cores(driver.attempts("bare", "start")[0]["pid"], job_id)
    if 2 * share == len(cores):  # the whole allocation: else other jobs may be at work on these cores
        assert len(bound) == 2
        assert set.union(*bound) == cores
        assert set.intersection(*bound) == set()
    else:
        assert bound == [cores]
    (run,) = driver.wait_for_states("bare", "COMPLETED", "FAILED").values()
    assert (run["state"], run["attempt"]) == ("COMPLETED", 1), driver.all_logs()
    (record,) = (driver.runs / "bare").glob("*/logs/attempt-000.environment.json")
    variables = json.loads(record.read_text())["variables"]
    assert variables["OMP_DISPLAY_ENV"] == "FALSE", "a variable of the script's lines reaches the ranks"
    assert "NCCL_OF_THE_SHELL" not in variables


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_ranks_that_slurm_binds_keep_their_cores_and_torchrun_shares_those_of_its_task(
    slurm_variant: Callable[[str], SlurmCluster], launcher: str, tmp_path: Path
) -> None:
    driver = Driver(slurm_variant("affinity"), tmp_path)
    cores = os.sched_getaffinity(0)
    words = (*ONE, "train.num_steps=1500", "hardware.gpus_per_node=2", f"hardware.cpus_per_gpu={len(cores) // 2}",
             f"hardware.launcher={launcher}", "sweep_name=bound")  # fmt: skip
    driver.submit(*words)
    driver.wait_for_step("bound", 10)
    job_id = driver.only_run("bound")["job_id"]
    bound = _allowed_cores(driver.attempts("bound", "start")[0]["pid"], job_id)
    assert len(bound) == 2
    assert set.intersection(*bound) == set()
    assert set.union(*bound) == cores
    (run,) = driver.wait_for_states("bound", "COMPLETED", "FAILED").values()
    assert (run["state"], run["attempt"]) == ("COMPLETED", 1), driver.all_logs()
    told = [path.read_text() for path in (driver.runs / "bound").glob("*/logs/attempt-000.rank-*.log")]
    assert any("bound to cores" in text for text in told) == (launcher == "torchrun")


def _allowed_cores(pid: int, job_id: str) -> list[set[int]]:
    """Return the different sets of cores that the ranks of a job may use, by Cpus_allowed_list of each process.

    Args:
        pid: process of rank 0.
        job_id: the job.
    """
    own = Path(f"/proc/{pid}/cmdline").read_bytes()
    of_job = f"SLURM_ARRAY_JOB_ID={job_id.partition('_')[0]}".encode()
    sets = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environ = (folder / "environ").read_bytes().split(b"\0")
            if (
                of_job in environ
                and any(word.startswith((b"LOCAL_RANK=", b"SLURM_LOCALID=")) for word in environ)
                and (folder / "cmdline").read_bytes() == own
            ):
                (line,) = (line for line in (folder / "status").read_text().splitlines() if "Cpus_allowed_list" in line)
                sets.append(set(cores_of(line.split(":")[1])))
    return [one for index, one in enumerate(sets) if one not in sets[:index]]


@pytest.mark.long
def test_a_cancelled_run_in_a_container_never_comes_back(driver: Driver, in_container: list[str]) -> None:
    words = (*ONE, "train.num_steps=100000", *in_container, "sweep_name=cancelled")
    driver.submit(*words)
    driver.wait_for_step("cancelled", 10)
    job_id = driver.only_run("cancelled")["job_id"]
    driver.slurm.run("scancel", job_id)
    driver.slurm.wait_for(lambda: driver.slurm.run("squeue", "-h").stdout == "", 60, "an empty queue")
    time.sleep(5)
    assert driver.slurm.run("squeue", "-h").stdout == ""
    assert driver.slurm.job_state(job_id) == "CANCELLED"
    (run,) = driver.wait_for_states("cancelled", "CANCELLED").values()
    assert run["state"] == "CANCELLED"


@pytest.mark.long
def test_a_whole_node_is_the_runs_alone_with_all_its_memory(driver: Driver) -> None:
    words = (*ONE, "train.num_steps=100000", "hardware.whole_node=true", "sweep_name=whole")
    driver.submit(*words, "hardware.mem_gb_per_gpu=null", "hardware.mem_gb_per_node=null")
    job_id = driver.only_run("whole")["job_id"]
    driver.slurm.wait_for(lambda: driver.slurm.job_state(job_id) == "RUNNING", 90, "the start")
    job = driver.slurm.job(job_id)
    node = driver.slurm.run("scontrol", "-o", "show", "node", job["NodeList"]).stdout
    facts = dict(word.partition("=")[::2] for word in node.split() if "=" in word)
    assert (job["OverSubscribe"], job["NumCPUs"]) == ("NO", facts["CPUTot"])
    assert facts["AllocMem"] == facts["RealMemory"]


@pytest.mark.long
def test_a_failed_rank_of_torchrun_ends_all_with_its_code(driver: Driver) -> None:
    words = (*TWO_NODES, "train.num_steps=100000", "hardware.launcher=torchrun", "sweep_name=killed")
    driver.submit(*words)
    driver.wait_for_step("killed", 10)
    job_id = driver.only_run("killed")["job_id"]
    pid = driver.attempts("killed", "start")[0]["pid"]
    driver.slurm.run("kill", "-KILL", str(pid))
    at_work = ("RUNNING", "COMPLETING")
    driver.slurm.wait_for(lambda: driver.slurm.job_state(job_id) not in at_work, 120, "the end of the job")
    assert driver.slurm.job_state(job_id) == "PENDING", "as with srun, ranks that lost a peer bring the run back"
    assert len(driver.attempts("killed", "start")) == 1, "torchrun restarts nothing"


@pytest.mark.long
def test_torchrun_on_two_nodes_trains_and_resumes_as_srun_does(driver: Driver) -> None:
    words = (*TWO_NODES, "train.num_steps=400")
    by_torchrun = (*words, "hardware.launcher=torchrun")
    answer = driver.submit(*by_torchrun, "sweep_name=torchrun", "hardware.partition=preempt")
    job_id = f"{answer['arrays'][0]['job_id']}_0"
    preemptor = driver.preempt_at("torchrun", 20, job_id)
    driver.wait_for_states("torchrun", "REQUEUED")
    (end,) = driver.attempts("torchrun", "end")
    assert (end["cause"], end["action"]) == ("preempted", "requeue")
    assert 0 < end["saved_step"] < 400
    driver.slurm.run("scancel", str(preemptor))
    driver.start_again(job_id)
    driver.submit(*words, "sweep_name=srun")

    (run,) = driver.wait_for_states("torchrun", "COMPLETED").values()
    assert (run["attempt"], run["job_id"]) == (2, job_id), "one requeue, and torchrun restarts nothing"
    driver.wait_for_states("srun", "COMPLETED")
    assert driver.final_state("torchrun") == driver.final_state("srun")
    assert driver.losses("torchrun") == driver.losses("srun")
    (folder,) = (path.parent for path in (driver.runs / "torchrun").glob("*/result.json"))
    assert json.loads((folder / "result.json").read_text())["world_size"] == 4
    assert len(list((folder / "logs").glob("attempt-001.rank-*.log"))) == 4
    (attempt, _) = driver.attempts("torchrun", "start")
    assert attempt["executor"] == "slurm"
    # From 24.05 on Slurm still has this job marked as preempted (GRACE_PREEMPT), as any job that requeued itself within
    # its grace, and requeues it once more at its end: that start finds the run complete.
    ends = ("COMPLETED", "PENDING")
    driver.slurm.wait_for(lambda: driver.slurm.job_state(job_id) in ends, 90, "the end of the job")
    if driver.slurm.job_state(job_id) == "PENDING":
        driver.start_again(job_id)
    driver.slurm.wait_for_state(job_id, "COMPLETED", timeout_s=120)
    assert len(driver.attempts("torchrun", "start")) == 2, "a run that is complete is not begun again"


@pytest.mark.long
def test_a_packed_environment_runs_on_the_disk_of_each_node_and_its_digest_is_recorded(
    driver: Driver, tmp_path: Path
) -> None:
    env = tmp_path / "env"
    venv.create(env, symlinks=True)
    (site,) = env.glob("lib/python*/site-packages")
    packages = [entry for entry in sys.path if entry.endswith("site-packages")]
    (site / "rest.pth").write_text("\n".join(packages))  # torch alone has a gigabyte
    packed = json.loads(driver.run("pack", str(env), "--import", "omegaconf", "--json").stdout)
    driver.submit(*TWO_NODES, "train.num_steps=20", "sweep_name=staged",
                  f"cluster.environment.stage={packed['archive']}")  # fmt: skip
    (run,) = driver.wait_for_states("staged", "COMPLETED", "FAILED").values()
    assert run["state"] == "COMPLETED", driver.all_logs()
    (record,) = (driver.runs / "staged").glob("*/logs/attempt-000.environment.json")
    facts = json.loads(record.read_text())["environment"]["stage"]
    assert (facts["path"], facts["sha256"]) == (packed["archive"], packed["sha256"])
    assert Path(facts["copy"]).parent.name == f"hpc_trainer-{os.getuid()}"
    assert record.read_text().count(facts["copy"]) > 1, "the Python of the rank is the copy's"


@pytest.mark.long
def test_a_list_of_hardware_runs_once_under_torchrun(driver: Driver) -> None:
    """The first item needs a node that is drained; the second has it, with ranks that torchrun starts."""
    held = "testbed_x4,testbed_x1"
    words = ("experiment=digits", "model=mlp", f"hardware=first:{held}", "hardware.launcher=torchrun",
             "parallel.elastic=true", "train.num_steps=40", "train.eval_every_steps=0",
             "hardware.partition=main", "sweep_name=list")  # fmt: skip
    for node in ("n2", "n3", "n4"):
        driver.slurm.run("scontrol", "update", f"nodename={node}", "state=drain", "reason=test")
    driver.submit(*words)
    (run,) = driver.wait_for_states("list", "COMPLETED", "FAILED").values()
    assert run["state"] == "COMPLETED", driver.all_logs()
    assert len(driver.attempts("list", "start")) == 1
    driver.slurm.wait_for(lambda: driver.slurm.run("squeue", "-h").stdout == "", 60, "the other job is cancelled")
    (result,) = (driver.runs / "list").glob("*/result.json")
    assert json.loads(result.read_text())["world_size"] == 1
