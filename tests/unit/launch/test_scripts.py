"""The batch scripts, exactly (tests/golden/submission): one for each shipped hardware profile, and two for a site.

HPC_TRAINER_UPDATE_GOLDEN=1 writes the golden files anew: read the difference before keeping it.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.config.compose.completion import choices_in
from hpc_trainer.config.environment import setup_of
from hpc_trainer.config.schema.cluster import Container, GpuLibraries, GpuRequest, Launcher
from hpc_trainer.launch.batch_job import worker_command
from hpc_trainer.launch.submit import array_script_of
from hpc_trainer.record.spec import RunSpec
from hpc_trainer.runtime.start import START
from tests.unit.launch.grids import make_plan
from tests.unit.launch.scripts import read_script
from tests.unit.record.builders import make_spec

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = ROOT / "tests" / "golden" / "submission"
# A part of a node differs from the whole node in one line, so the whole nodes stand for both.
PROFILES = [
    name
    for name in choices_in("hardware", [ROOT / "conf"])
    if "@_here_" not in (ROOT / "conf" / "hardware" / f"{name}.yaml").read_text()
]
UUID = "0123456789abcdef0123456789abcdef"
# Overrides, number of runs, and what is changed by hand.
Case = tuple[tuple[str, ...], int, dict[str, Any]]
_ENV = "cluster__environment__"
# One script for each way to the software of the ranks (docs/environment.md), on hardware with GPUs.
ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "env_venv": {
        f"{_ENV}modules": ["gcc/12.2", "cuda/12.4"], f"{_ENV}purge_modules": True, f"{_ENV}venv": "/lab/my envs/train",
        f"{_ENV}inherit": False, "cluster__setup": ["ulimit -c 0"],
    },
    "env_uv": {f"{_ENV}uv": "/lab/project"},
    "env_conda": {f"{_ENV}conda": "train", f"{_ENV}conda_root": "/lab/miniforge3"},
    "env_conda_of_module": {f"{_ENV}modules": ["miniforge"], f"{_ENV}conda": "/lab/envs/it's"},
    "env_apptainer": {
        f"{_ENV}modules": ["apptainer"], f"{_ENV}container": Container.apptainer, f"{_ENV}image": "/lab/torch 2.sif",
        f"{_ENV}gpus": GpuLibraries.nv, f"{_ENV}binds": ["/scratch", "/lab/data:/data:ro"],
        f"{_ENV}container_args": ["--cleanenv"],
    },
    "env_singularity": {
        f"{_ENV}container": Container.singularity, f"{_ENV}image": "/lab/rocm.sif", f"{_ENV}venv": "/lab/on-top",
        f"{_ENV}gpus": GpuLibraries.rocm,
    },
    "env_pyxis": {
        f"{_ENV}container": Container.pyxis, f"{_ENV}image": "nvcr.io#nvidia/pytorch:25.09-py3",
        f"{_ENV}binds": ["/scratch", "/lab/data:/data:ro"], f"{_ENV}container_args": ["--no-container-mount-home"],
    },
    "env_edf": {f"{_ENV}container": Container.edf, f"{_ENV}image": "torch"},
    "env_uenv": {
        f"{_ENV}container": Container.uenv, f"{_ENV}image": "pytorch/v2.6.0:v1", f"{_ENV}view": "default",
        f"{_ENV}venv": "/lab/on-top",
    },
    "env_uenv_run": {
        f"{_ENV}container": Container.uenv_run, f"{_ENV}image": "pytorch/v2.6.0:v1", f"{_ENV}view": "default",
    },
    "env_stage": {f"{_ENV}stage": "/lab/train.tar", f"{_ENV}venv": "/lab/envs/train"},
}  # fmt: skip
SITE: dict[str, Any] = {
    "cluster__account": "lab-7",
    "cluster__array_parallelism": 2,
    "cluster__setup": ["module load cuda/12.4", 'source "$HOME/my env/bin/activate"'],
    "cluster__srun_args": ["--cpu-bind=cores", "--mpi=none"],
    "hardware__gpu_type": "a100",
    "hardware__partition": "gpu,gpu-long",
    "hardware__qos": "high",
    "hardware__constraint": "nvlink&[rack1|rack2]",
    "hardware__exclude": "gpu[001-004,007]",
}
CASES: dict[str, Case] = {
    **{name: (("cluster=slurm", f"hardware={name}"), 50, {}) for name in PROFILES if "/" not in name},
    **{name: ((f"hardware={name}", "cluster.executor=slurm"), 2, {}) for name in PROFILES if "/" in name},
    "site": (("cluster=slurm", "hardware=gpu_x16"), 4, SITE),
    **{name: (("cluster=slurm", "hardware=gpu_x8"), 4, changes) for name, changes in ENVIRONMENTS.items()},
    "torchrun": (("cluster=slurm", "hardware=gpu_x16"), 4, {"hardware__launcher": Launcher.torchrun}),
    "whole_node": (
        ("cluster=slurm", "hardware=gpu_x8"),
        4,
        {"hardware__whole_node": True, "hardware__mem_gb_per_gpu": None},
    ),
    "site_gres": (("cluster=slurm", "hardware=gpu_x16"), 4, {**SITE, "hardware__gpu_request": GpuRequest.gres}),
}


@functools.cache
def _specs(name: str) -> list[RunSpec]:
    overrides, count, changes = CASES[name]
    python = None if name in ENVIRONMENTS else "python3"
    return [make_spec(*overrides, seed=seed, cluster__python=python, **changes) for seed in range(count)]


def _script(name: str) -> str:
    plan = make_plan(Path("/shared/runs/golden"), _specs(name))
    (array,) = plan.arrays
    return array_script_of(plan, array, UUID) + "\n"


@pytest.mark.parametrize("name", CASES)
def test_the_script_is_the_golden_one(name: str) -> None:
    # The Python that submits starts what must run outside a container.
    path, script = GOLDEN / f"{name}.sh", _script(name).replace(shlex.quote(sys.executable), "/login/python")
    if os.environ.get("HPC_TRAINER_UPDATE_GOLDEN") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(script)
    assert script == path.read_text()


def test_there_is_no_golden_script_without_a_case() -> None:
    found = (path.relative_to(GOLDEN).with_suffix("") for path in GOLDEN.rglob("*.sh"))
    assert sorted(path.as_posix() for path in found) == sorted(CASES)


@pytest.mark.parametrize("name", CASES)
def test_bash_understands_the_script(name: str) -> None:
    subprocess.run(["bash", "-n"], input=_script(name), text=True, check=True)


# --- P6: every script parses back to what made it ---


@pytest.mark.parametrize("name", CASES)
def test_the_script_reads_back_as_its_spec(name: str) -> None:
    specs = _specs(name)
    cluster = specs[0].config["cluster"]
    found = read_script(_script(name))
    shape = specs[0].shape
    if shape.gpu_request == "none":  # the nodes have GPUs that no option names
        shape = dataclasses.replace(shape, gpus_per_node=0, gpu_request="gpus_per_node")
    assert found.shape == shape
    assert found.array == (len(specs), min(len(specs), cluster["array_parallelism"]))
    assert (found.flags["comment"], found.flags["job-name"]) == (UUID, "golden-01234567")
    assert found.folder == Path("/shared/runs/golden/slurm")
    assert found.sweep_dir == Path("/shared/runs/golden")
    assert found.setup == setup_of(cluster)[0]
    if name not in ENVIRONMENTS:
        assert (found.command[0], found.srun_args) == ("python3", cluster["srun_args"])


@pytest.mark.parametrize("name", CASES)
def test_at_most_one_memory_flag_and_one_gpu_flag_and_the_cores_of_srun(name: str) -> None:
    script, hardware = _script(name), _specs(name)[0].config["hardware"]
    memory = [hardware[f"mem_gb_per_{key}"] for key in ("node", "gpu", "cpu")]
    asked = 1 if name == "whole_node" else sum(value is not None for value in memory)
    assert script.count("#SBATCH --mem") == asked <= 1
    asked_by = hardware["gpu_request"] if hardware["gpus_per_node"] else "none"
    assert script.count("#SBATCH --gres=gpu:") == (asked_by == "gres")
    assert script.count("#SBATCH --gpus-per-node=") == (asked_by == "gpus_per_node")
    assert script.count("export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK\n") == 1


def test_both_ways_to_ask_for_gpus_differ_in_one_line() -> None:
    pairs = zip(_script("site").splitlines(), _script("site_gres").splitlines(), strict=True)
    assert [pair for pair in pairs if pair[0] != pair[1]] == [
        ("#SBATCH --gpus-per-node=a100:8", "#SBATCH --gres=gpu:a100:8"),
    ]


def command_of(script: str) -> list[str]:
    """The words of the srun line."""
    lines = [line for line in script.splitlines() if line.startswith("srun ")]
    assert len(lines) == 1
    last = script.rstrip("\n").splitlines()
    assert last[last.index(lines[0]) + 1] == "code=$?"
    assert last[-1] == "exit $code", "the ranks' code is the job's"
    return shlex.split(lines[0])


# --- what a person writes stays a value ---

HOSTILE = [
    "/runs/my sweeps/x",
    "/runs/it's",
    '/runs/a"b',
    "/runs/$(touch pwned)",
    "/runs/`id`",
    "/runs/a;b&c",
    "/runs/#x",
    "/runs/é 中",
    "/runs/-x --wrap=id",
]


@pytest.mark.parametrize("folder", HOSTILE)
def test_an_awkward_folder_stays_one_word(tmp_path: Path, folder: str) -> None:
    plan = make_plan(Path(folder, "sweep"), _specs("cpu_x1"))
    script = array_script_of(plan, plan.arrays[0], UUID)
    assert read_script(script).folder == Path(folder, "sweep", "slurm")
    words = command_of(script + "\n")
    assert words[words.index("--sweep-dir") + 1] == f"{folder}/sweep"
    # And bash agrees: srun gets the words, and nothing else runs.
    (tmp_path / "srun").write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    (tmp_path / "srun").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_CPUS_PER_TASK": "1", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        ["bash", "-s"], input=script, text=True, env=environ, cwd=tmp_path, check=True, capture_output=True
    )
    assert done.stdout.splitlines() == words[1:]
    assert [path.name for path in tmp_path.iterdir()] == ["srun"]


@pytest.mark.parametrize("argument", ["--x=a b", "--x='y'", "--comment=$(touch pwned)", "--x=; touch p", '--x="$HOME"'])
def test_awkward_srun_arguments_stay_words(argument: str) -> None:
    spec = make_spec("cluster=slurm", cluster__srun_args=[argument])
    plan = make_plan(Path("/runs/x"), [spec])
    assert argument in command_of(array_script_of(plan, plan.arrays[0], UUID) + "\n")


@pytest.mark.parametrize("folder", HOSTILE)
def test_srun_starts_the_worker_from_the_frozen_code(folder: str) -> None:
    sweep = f"{folder}/sweep"
    digest = "0123456789ab" + "c" * 52
    without = make_plan(Path(sweep), _specs("gpu_x8"))
    plan = dataclasses.replace(without, code=digest)
    script = array_script_of(plan, plan.arrays[0], UUID)
    words = command_of(script + "\n")
    assert words[words.index("python3") :] == [
        "python3", "-u", f"{sweep}/code/0123456789ab.zip", "--sweep-dir", sweep, "--array", UUID,
    ]  # fmt: skip
    installed = array_script_of(without, without.arrays[0], UUID)
    others = [[line for line in text.splitlines() if not line.startswith("srun ")] for text in (script, installed)]
    assert others[0] == others[1], "all else is as in the golden script"
    assert read_script(installed).command[1:3] == ["-u", "-c"]


def test_the_workers_command_quotes_what_it_is_given() -> None:
    command = worker_command(Path("/a b/$x"), ["--run", "it's"], ["apptainer", "exec", "img.sif", "python3"])
    assert command == (
        "apptainer", "exec", "img.sif", "python3", "-u", "-c", START, "hpc_trainer.worker", "--sweep-dir", "/a b/$x",
        "--run", "it's",
    )  # fmt: skip


# --- docs/environment.md ---


def _shown() -> list[str]:
    """The lines of scripts that the page shows."""
    lines = [line.strip() for line in (ROOT / "docs" / "environment.md").read_text().splitlines() if line[:4] == "    "]
    begins = ("srun ", "source ", "module ", "type ", "eval ", "conda activate", "#SBATCH")
    return [line for line in lines if line.startswith(begins)]


def test_the_page_of_environments_shows_lines_of_golden_scripts() -> None:
    golden = [line for name in (*ENVIRONMENTS, "torchrun") for line in (GOLDEN / f"{name}.sh").read_text().splitlines()]
    assert len(_shown()) > 15
    for shown in _shown():
        # Every script has what "..." stands for: our options of srun, and the arguments of Python.
        pattern = re.compile(".*".join(re.escape(part) for part in shown.split("...")))
        assert any(pattern.match(line) for line in golden), shown


def test_a_whole_node_is_asked_for_by_a_flag_without_a_value(tmp_path: Path) -> None:
    def script(is_whole: bool) -> list[str]:
        plan = make_plan(tmp_path, [make_spec("cluster=slurm", hardware__whole_node=is_whole)])
        return array_script_of(plan, plan.arrays[0]).splitlines()

    assert {line for line in script(True) if line not in script(False)} == {"#SBATCH --exclusive", "#SBATCH --mem=0"}
