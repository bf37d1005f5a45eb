"""`hpc-trainer init` writes a project that works at once, and overwrites nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.integration.conftest import LocalDriver


@pytest.fixture
def project(local: LocalDriver) -> Path:
    done = local.run("init", "my-lab")
    assert "Next: cd my-lab && " in done.stdout
    return local.folder / "my-lab"


def inside(local: LocalDriver, project: Path) -> LocalDriver:
    return LocalDriver(project, local.started)


def test_a_new_project_plans_and_trains(local: LocalDriver, project: Path) -> None:
    here = inside(local, project)
    planned = here.json("plan", "experiment=my_lab", "hardware=here", "optim.lr=1e-3,1e-2", "sweep_name=grid")
    assert len(planned["runs"]) == 2
    few = ("train.num_steps=40", "schedule.warmup_steps=2", "train.eval_every_steps=20")
    trained = here.json("train", "experiment=my_lab", *few)
    assert trained["state"] == "COMPLETED"
    assert trained["metrics"]["eval_accuracy"] > 0.5
    own = here.json("train", "experiment=my_lab_own_loop", "train.num_steps=40", "hardware=cpu_x1")
    assert own["state"] == "COMPLETED"


@pytest.mark.long
@pytest.mark.timeout(1200)  # 50 s of CPU
def test_the_tests_of_a_new_project_pass(local: LocalDriver, project: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=project, env={key: value for key, value in local.env.items() if key != "HPC_TRAINER_RUNS"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_the_job_file_submits_its_grid(local: LocalDriver, project: Path, tmp_path: Path) -> None:
    script = project / "jobs" / "submit.sh"
    assert os.access(script, os.X_OK)
    called = tmp_path / "bin" / "hpc-trainer"
    called.parent.mkdir()
    called.write_text(f'#!/bin/sh\necho "$(pwd) $*" >> {tmp_path}/calls\n')
    called.chmod(0o755)
    env = {**os.environ, "PATH": f"{called.parent}:{os.environ['PATH']}"}
    for words, hardware in ((["--wait"], "hardware=here"), (["hardware=gpu_x1", "--canary", "2"], "hardware=gpu_x1")):
        (tmp_path / "calls").unlink(missing_ok=True)
        subprocess.run([str(script), *words], env=env, cwd=tmp_path, check=True)
        plan, submit = (tmp_path / "calls").read_text().splitlines()
        assert plan.startswith(f"{project} plan experiment=my_lab optim.lr=")
        assert plan.endswith(f" {hardware}"), "the plan is of what is submitted"
        assert submit.split() == [*plan.replace(" plan ", " submit ").removesuffix(f" {words[0]}").split(), *words]


@pytest.mark.long
def test_nothing_is_overwritten(local: LocalDriver, project: Path) -> None:
    before = {path: path.read_bytes() for path in project.rglob("*") if path.is_file()}
    (project / "README.md").write_text("mine")
    done = local.run("init", "my-lab", check=False)
    assert done.returncode == 2
    assert "init overwrites nothing" in done.stderr
    (local.folder / "taken").write_text("mine")
    assert "taken is a file" in local.run("init", "taken", check=False).stderr
    assert {path: path.read_bytes() for path in before} == {**before, project / "README.md": b"mine"}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "better"), [("3d", "my_3d"), ("torch", "my_torch"), ("a b", "a_b"), ("class", "my_class")]
)
def test_a_name_that_is_no_package_is_refused(name: str, better: str, local: LocalDriver) -> None:
    done = local.run("init", name, check=False)
    assert done.returncode == 2
    assert f"Use {better}." in done.stderr
    assert not (local.folder / name).exists()


@pytest.mark.long
def test_the_current_folder_becomes_a_project_with_translated_files(local: LocalDriver) -> None:
    folder = local.folder / "lab"
    folder.mkdir()
    (folder / "go.py").write_text("ex = AutoExecutor('logs')\nex.update_parameters(timeout_min=30, mem_gb=4)\n")
    here = inside(local, folder)
    told = here.json("init", ".", "--from-submitit", "go.py")
    assert {"conf/hardware/go.yaml", "conf/cluster/go.yaml"} <= {*told["project"]["files"]}
    assert yaml.safe_load((folder / "conf/hardware/go.yaml").read_text())["time_limit_min"] == 30
    assert len(here.json("plan", "experiment=lab", "hardware=go", "sweep_name=s")["runs"]) == 1
