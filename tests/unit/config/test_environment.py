"""cluster.environment: what is refused, with what to type instead; and staging by a real bash and tar."""

from __future__ import annotations

import ast
import dataclasses
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from hpc_trainer.config.environment import (
    INSIDE,
    STAGE,
    STAGE_KEY,
    STAGED,
    changes_python,
    environment_of,
    environment_problems,
    runs_dir_problem,
    setup_of,
    start_of,
)
from hpc_trainer.config.load import plain_value
from hpc_trainer.config.rules.cluster_rules import cluster_problems
from hpc_trainer.config.schema.cluster import (
    ClusterConfig,
    Container,
    EnvironmentConfig,
    Executor,
    GpuLibraries,
    HardwareConfig,
    Launcher,
)
from hpc_trainer.launch.freeze import freeze
from hpc_trainer.slurm.shape import shape_of
from tests.unit.record.builders import make_config

RUNS = Path("/lab/runs")


def problems(
    python: str | None = None, executor: Executor = Executor.slurm, gpus_per_node: int = 0, **keys: Any
) -> list[str]:
    cluster = ClusterConfig(executor=executor, python=python, environment=EnvironmentConfig(**keys))
    return list(environment_problems(cluster, HardwareConfig(gpus_per_node=gpus_per_node)))


GOOD: list[dict[str, Any]] = [
    {},
    {"modules": ["cuda/12.4", "gcc"], "purge_modules": True, "venv": "/lab/my env"},
    {"uv": "/lab/project"},
    {"conda": "train", "conda_root": "/lab/miniforge3"},
    {"conda": "/lab/envs/train", "modules": ["miniforge"]},
    {"container": Container.apptainer, "image": "docker://pytorch/pytorch", "binds": ["/a", "/b:/c", "/d:/e:ro"]},
    {"container": Container.apptainer, "image": "/lab/my image.sif", "venv": "/lab/on-top"},
    {"container": Container.pyxis, "image": "nvcr.io#nvidia/pytorch:25.09-py3", "container_args": ["--no-container-x"]},
    {"container": Container.edf, "image": "./torch.toml"},
    {"container": Container.uenv, "image": "pytorch/v2.6.0:v1", "view": "default"},
    {"stage": "/lab/train.tar", "venv": "/lab/env"},
    {"stage": "/lab/train.tar.gz"},
]


@pytest.mark.parametrize("keys", GOOD, ids=str)
def test_what_makes_sense_is_taken(keys: dict[str, Any]) -> None:
    assert problems(**keys) == []


BAD: list[tuple[dict[str, Any], str]] = [
    ({"venv": "/a", "conda": "b"}, "Keep one, for example: cluster.environment.conda=null."),
    ({"venv": "env"}, f"Use cluster.environment.venv={Path('env').absolute()}."),
    ({"venv": "~/env"}, "Use cluster.environment.venv='${oc.env:HOME}/env'."),
    ({"uv": "$HOME/project"}, "Use cluster.environment.uv='${oc.env:HOME}/project'."),
    ({"modules": ["cuda 12"]}, "Use cuda12."),
    ({"modules": ["--purge"]}, "or a leading -"),
    ({"conda": "a b"}, "Use ab."),
    ({"container": Container.pyxis}, "Use cluster.environment.image=/shared/images/torch.sqsh"),
    ({"container": Container.apptainer, "image": "-x"}, "or a leading -"),
    ({"container": Container.apptainer, "image": "a", "conda": "train"}, "cluster.python=/opt/conda/envs/train/bin/py"),
    ({"container": Container.apptainer, "image": "a", "stage": "/lab/a.tar"}, "Use cluster.environment.stage=null."),
    ({"container": Container.apptainer, "image": "a", "gpus_per_node": 4}, "cluster.environment.gpus=nv"),
    ({"container": Container.apptainer, "image": "a", "binds": ["/a,/b"]}, "each entry is one FOLDER"),
    ({"container": Container.apptainer, "image": "a", "binds": ["data"]}, "an absolute path"),
    ({"container": Container.apptainer, "image": "a", "container_args": ["shell"]}, "each entry is one option"),
    ({"container": Container.uenv, "image": "a", "executor": Executor.local}, "container=uenv_run"),
    ({"container": Container.pyxis, "image": "a", "executor": Executor.local}, "container=apptainer"),
    ({"stage": "/lab/a.tar", "python": "python3"}, "Use cluster.python=null."),
    ({"stage": "/lab/a.tar", "executor": Executor.local}, "Use cluster.environment.stage=null."),
]


@pytest.mark.parametrize(("keys", "says"), BAD, ids=str)
def test_what_makes_no_sense_is_refused_with_the_nearest_choice(keys: dict[str, Any], says: str) -> None:
    (problem,) = problems(**keys)
    assert says in problem


def test_a_container_that_gets_no_gpus_needs_no_libraries_of_a_driver() -> None:
    keys = {"container": Container.apptainer, "image": "a"}
    assert problems(**keys) == []
    section = plain_value(ClusterConfig(environment=EnvironmentConfig(**keys, gpus=GpuLibraries.rocm)))
    assert "--rocm" in start_of(section, RUNS, has_gpus=True).words
    assert "--rocm" not in start_of(section, RUNS, has_gpus=False).words


def test_a_container_that_hides_variables_gets_those_that_tell_a_rank_its_number() -> None:
    given = {
        "SLURM_PROCID": "3", "SLURMD_NODENAME": "n1", "SUBMITIT_EXECUTOR": "slurm", "HPC_TRAINER_JOB_START": "1",
        "CUDA_VISIBLE_DEVICES": "0,1", "SLURM_JOB_COMMENT": "costs $5", "NCCL_DEBUG": "INFO",
        "PATH": os.environ["PATH"],
    }  # fmt: skip
    words = ["bash", "-c", INSIDE, "inside", sys.executable, "-c", "import os; print(dict(os.environ))"]
    done = subprocess.run(words, env=given, capture_output=True, text=True, check=True)
    seen = ast.literal_eval(done.stdout)
    told = {name for name in given if name not in ("SLURM_JOB_COMMENT", "NCCL_DEBUG", "PATH")}
    for prefix in ("APPTAINERENV_", "SINGULARITYENV_"):
        passed = {name.removeprefix(prefix): value for name, value in seen.items() if name.startswith(prefix)}
        assert passed == {name: given[name] for name in told}, "a GPU variable that is not set would hide all GPUs"
    assert {name: seen[name] for name in given} == given


@pytest.mark.parametrize("folder", ["/lab/a:b", "/lab/a,b"])
def test_a_folder_of_sweeps_that_divides_a_bind_is_refused(folder: str) -> None:
    inside = EnvironmentConfig(container=Container.apptainer, image="a")
    assert "Use another paths.runs_dir" in next(runs_dir_problem(inside, folder))
    assert list(runs_dir_problem(EnvironmentConfig(), folder)) == []
    assert list(runs_dir_problem(inside, "/lab/runs")) == []


def test_a_frozen_configuration_of_an_older_version_starts_as_it_did() -> None:
    cluster = plain_value(ClusterConfig(setup=["ulimit -c 0"], python="python3 -X dev"))
    del cluster["environment"]
    assert environment_of(cluster) == EnvironmentConfig()
    assert setup_of(cluster) == (["ulimit -c 0"], 0)
    assert not changes_python(cluster)
    start = start_of(cluster, RUNS, has_gpus=True)
    assert (start.lines, start.facts, start.srun_args, start.sbatch) == ((), (), (), {})
    assert start.words == ("python3", "-X", "dev")
    assert start_of({**cluster, "python": None}, RUNS, has_gpus=True).words == (sys.executable,)


def test_the_lines_of_the_environment_come_before_those_of_setup() -> None:
    environment = EnvironmentConfig(modules=["cuda/12.4"], venv="/lab/env")
    cluster = plain_value(ClusterConfig(setup=["ulimit -c 0"], environment=environment))
    lines, of_environment = setup_of(cluster)
    assert lines[1:] == ["module load cuda/12.4", "source /lab/env/bin/activate", "ulimit -c 0"]
    assert of_environment == 3
    assert changes_python(cluster)


# --- launchers ---


@pytest.mark.parametrize(
    ("cluster", "command", "says"),
    [
        ("slurm", None, None),
        ("local", None, "Use hardware.launcher=srun, or cluster=slurm."),
        ("slurm", "python train.py", "for a torchrun in the command train.command_per=node"),
    ],
)
def test_torchrun_starts_workers_on_nodes_of_slurm(cluster: str, command: str | None, says: str | None) -> None:
    config = make_config(f"cluster={cluster}", hardware__launcher=Launcher.torchrun, train__command=command)
    found = [problem for problem in cluster_problems(config) if "hardware.launcher" in problem]
    assert len(found) == (says is not None)
    assert says is None or says in found[0]


def test_with_torchrun_a_node_has_one_task_with_the_cores_of_all_its_ranks() -> None:
    config = make_config("cluster=slurm", "hardware=gpu_x16")
    by_srun = shape_of(config)
    config.hardware.launcher = Launcher.torchrun
    by_torchrun = shape_of(config)
    assert (by_torchrun.num_nodes, by_torchrun.tasks_per_node, by_torchrun.ranks_per_task) == (2, 1, 8)
    assert by_torchrun.cpus_per_task == 8 * by_srun.cpus_per_task
    assert (by_torchrun.world_size, by_torchrun.ranks_per_node) == (by_srun.world_size, by_srun.ranks_per_node)
    assert by_torchrun.gpu_hours == by_srun.gpu_hours


@pytest.mark.parametrize("section", ["hardware", "cluster"])
def test_no_key_of_these_makes_another_run(section: str) -> None:
    before = make_config("cluster=slurm")
    after = make_config("cluster=slurm")
    if section == "hardware":
        after.hardware = dataclasses.replace(
            after.hardware, launcher=Launcher.torchrun, bind_cores=False, whole_node=True
        )
    else:
        after.cluster.environment = EnvironmentConfig(modules=["cuda"], stage="/lab/a.tar", inherit=False)
    assert freeze(before, axes={}, overrides=()).run_id == freeze(after, axes={}, overrides=()).run_id


# --- staging: by bash and tar, as on a node ---


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A tar of an environment whose Python says where it runs from."""
    source = tmp_path / "env"
    (source / "bin").mkdir(parents=True)
    python = source / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    archive = tmp_path / "env.tar"
    subprocess.run(["tar", "-C", str(source), "-cf", str(archive), "."], check=True)
    return archive


def stage(archive: Path, *arguments: str, other: str = "", key: str = "1-2", **variables: str) -> subprocess.Popen[str]:
    environ = {"PATH": "/usr/bin:/bin", STAGE_KEY: key, **variables}
    words = ["bash", "-c", STAGE, "stage", str(archive), other, *arguments]
    return subprocess.Popen(words, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


SAYS = f"import os; print(os.environ['{STAGED}'], os.environ['PATH'].split(':')[0])"


def test_ranks_of_one_node_unpack_once_and_run_from_the_copy(packed: Path, tmp_path: Path) -> None:
    place = tmp_path / "disk"
    place.mkdir(mode=0o700)
    ranks = [stage(packed, "-c", SAYS, SLURM_TMPDIR=str(place)) for _ in range(4)]
    said = {rank.communicate()[0].strip() for rank in ranks}
    assert [rank.returncode for rank in ranks] == [0] * 4
    (copy,) = [path for path in (place / f"hpc_trainer-{os.getuid()}").iterdir() if path.is_dir()]
    assert said == {f"{copy} {copy}/bin"}
    packed.unlink()  # what is unpacked needs the archive no more
    assert stage(packed, "-c", SAYS, SLURM_TMPDIR=str(place)).communicate()[0].strip() in said


def test_a_copy_that_is_half_unpacked_is_unpacked_anew(packed: Path, tmp_path: Path) -> None:
    place = tmp_path / "disk"
    place.mkdir(mode=0o700)
    stage(packed, "-c", "0", SLURM_TMPDIR=str(place)).communicate()
    (complete,) = place.glob("*/*/.complete")
    complete.unlink()
    (complete.parent / "bin" / "python").write_text("half")
    done = stage(packed, "-c", SAYS, SLURM_TMPDIR=str(place))
    assert str(complete.parent) in done.communicate()[0]


def test_another_archive_gets_another_copy(packed: Path, tmp_path: Path) -> None:
    place = tmp_path / "disk"
    place.mkdir(mode=0o700)
    first, second = (stage(packed, "-c", SAYS, key=key, SLURM_TMPDIR=str(place)).communicate()[0] for key in "ab")
    assert first != second


def test_a_place_that_others_may_change_is_passed_over(packed: Path, tmp_path: Path) -> None:
    open_place, place = tmp_path / "open", tmp_path / "disk"
    for folder in (open_place, place):
        folder.mkdir(mode=0o700)
    theirs = open_place / f"hpc_trainer-{os.getuid()}"
    theirs.mkdir()
    theirs.chmod(0o777)
    done = stage(packed, "-c", SAYS, SLURM_TMPDIR=str(open_place), TMPDIR=str(place))
    assert str(place) in done.communicate()[0]
    assert list(theirs.iterdir()) == []


def test_without_a_usable_archive_the_environment_itself_is_used_or_the_error_is_clear(tmp_path: Path) -> None:
    place = tmp_path / "disk"
    place.mkdir(mode=0o700)
    broken = tmp_path / "env.tar"
    broken.write_text("no tar")
    with_other = stage(broken, "-c", "print('here')", other=sys.executable, SLURM_TMPDIR=str(place))
    assert with_other.communicate()[0].strip().endswith("here")
    without = stage(broken, "-c", "print('here')", SLURM_TMPDIR=str(place))
    assert f"no disk of this node takes {broken}" in without.communicate()[0]
    assert without.returncode == 78


def test_a_stop_signal_while_it_unpacks_reaches_the_rank(packed: Path, tmp_path: Path) -> None:
    place = tmp_path / "disk"
    place.mkdir(mode=0o700)
    lock_folder = place / f"hpc_trainer-{os.getuid()}"
    lock_folder.mkdir(mode=0o700)
    stage(packed, "-c", "0", SLURM_TMPDIR=str(place)).communicate()
    (lock,) = lock_folder.glob("*.lock")
    says = "import os; print(os.environ.get('HPC_TRAINER_STOPPED'))"
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        rank = stage(packed, "-c", says, SLURM_TMPDIR=str(place))
        deadline = time.monotonic() + 60
        while (rank.pid, "flock") not in [(each.ppid(), each.name()) for each in psutil.process_iter(["ppid", "name"])]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        rank.send_signal(signal.SIGUSR2)
    assert rank.communicate()[0].strip().endswith("SIGUSR2")
