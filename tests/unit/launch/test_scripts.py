"""The batch scripts, exactly (tests/golden/submission), and read back into the shape that made them.

HPC_TRAINER_UPDATE_GOLDEN=1 writes the golden files anew: read the difference before keeping it.
"""

from __future__ import annotations

import functools
import os
import shlex
import string
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_trainer.launch.submit import array_script_of, freeze_code
from hpc_trainer.launch.submitit_bridge import array_script, slurm_parameters, worker_command
from hpc_trainer.runs.spec import RunSpec, Shape
from tests.unit.launch.grids import make_plan
from tests.unit.runs.builders import make_spec

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "submission"
UUID = "0123456789abcdef0123456789abcdef"
CASES: dict[str, tuple[tuple[str, ...], int, dict[str, Any]]] = {
    "cpu_x1": (("cluster=slurm", "hardware=cpu_x1"), 1, {}),
    "gpu_x8": (("cluster=slurm", "hardware=gpu_x8"), 50, {"hardware__time_limit_min": 1440}),
    "gpu_x16": (
        ("cluster=slurm", "hardware=gpu_x16"),
        4,
        {
            "cluster__account": "lab-7",
            "cluster__array_parallelism": 2,
            "cluster__setup": ["module load cuda/12.4", 'source "$HOME/my env/bin/activate"'],
            "cluster__srun_args": ["--cpu-bind=cores", "--mpi=none"],
            "hardware__gpu_type": "a100",
            "hardware__partition": "gpu,gpu-long",
            "hardware__qos": "high",
            "hardware__constraint": "nvlink&[rack1|rack2]",
            "hardware__exclude": "gpu[001-004,007]",
        },
    ),
    "testbed_x4": (("cluster=testbed", "hardware=testbed_x4"), 2, {}),
}


@functools.cache
def _specs(name: str) -> list[RunSpec]:
    overrides, count, changes = CASES[name]
    return [make_spec(*overrides, seed=seed, cluster__python="python3", **changes) for seed in range(count)]


def _script(name: str) -> str:
    plan = make_plan(Path("/shared/runs/golden"), _specs(name))
    (array,) = plan.arrays
    return array_script_of(plan, array, UUID) + "\n"


@pytest.mark.parametrize("name", CASES)
def test_the_script_is_the_golden_one(name: str) -> None:
    path, script = GOLDEN / f"{name}.sh", _script(name)
    if os.environ.get("HPC_TRAINER_UPDATE_GOLDEN") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(script)
    assert script == path.read_text()


def test_there_is_no_golden_script_without_a_case() -> None:
    assert sorted(path.stem for path in GOLDEN.iterdir()) == sorted(CASES)


@pytest.mark.parametrize("name", CASES)
def test_bash_understands_the_script(name: str) -> None:
    subprocess.run(["bash", "-n"], input=_script(name), text=True, check=True)


# --- P6: every script parses back to what made it ---


def sbatch_flags(script: str) -> dict[str, str]:
    """The #SBATCH lines as sbatch reads them: up to the first line that is neither a comment nor empty."""
    flags: dict[str, str] = {}
    for line in script.splitlines():
        if line.startswith("#SBATCH "):
            (word,) = shlex.split(line.removeprefix("#SBATCH "))
            key, _, value = word.removeprefix("--").partition("=")
            assert key not in flags, f"{key} is given twice"
            flags[key] = value
        elif line and not line.startswith("#"):
            break
    return flags


def _gigabytes(text: str | None) -> float | None:
    assert text is None or text.endswith("M")
    return None if text is None else int(text[:-1]) / 1024


def shape_from(flags: dict[str, str]) -> Shape:
    """The shape that sbatch would give."""
    gpu_type, _, gpus = flags.get("gpus-per-node", "0").rpartition(":")
    signal, lead_s = flags["signal"].split("@")
    assert signal == "USR2"
    return Shape(
        num_nodes=int(flags["nodes"]),
        tasks_per_node=int(flags["ntasks-per-node"]),
        gpus_per_node=int(gpus),
        cpus_per_task=int(flags["cpus-per-task"]),
        mem_gb_per_node=_gigabytes(flags.get("mem")),
        mem_gb_per_gpu=_gigabytes(flags.get("mem-per-gpu")),
        mem_gb_per_cpu=_gigabytes(flags.get("mem-per-cpu")),
        gpu_type=gpu_type or None,
        partition=flags.get("partition"),
        qos=flags.get("qos"),
        constraint=flags.get("constraint"),
        exclude=flags.get("exclude"),
        account=flags.get("account"),
        time_limit_min=int(flags["time"]),
        signal_lead_s=int(lead_s),
    )


@pytest.mark.parametrize("name", CASES)
def test_the_script_reads_back_as_its_shape(name: str) -> None:
    specs = _specs(name)
    flags = sbatch_flags(_script(name))
    assert shape_from(flags) == specs[0].shape
    parallel = min(len(specs), specs[0].config["cluster"]["array_parallelism"])
    assert flags["array"] == f"0-{len(specs) - 1}%{parallel}"
    assert (flags["comment"], flags["job-name"], flags["open-mode"]) == (UUID, "golden", "append")
    assert "requeue" in flags
    assert "wckey" not in flags
    assert flags["output"] == "/shared/runs/golden/slurm/%A_%a.out"


def command_of(script: str) -> list[str]:
    """The words of the srun line."""
    lines = [line for line in script.splitlines() if line.startswith("srun ")]
    assert lines == [script.rstrip("\n").splitlines()[-1]], "srun is the script's last command: its code is the job's"
    return shlex.split(lines[0])


@pytest.mark.parametrize("name", CASES)
def test_srun_starts_the_worker_with_the_sweep_and_the_array(name: str) -> None:
    words = command_of(_script(name))
    worker = words[words.index("python3") :]
    assert worker == [
        "python3",
        "-u",
        "-m",
        "hpc_trainer.worker",
        "--sweep-dir",
        "/shared/runs/golden",
        "--array",
        UUID,
    ]
    assert "--kill-on-bad-exit=1" in words
    assert "--open-mode=append" in words
    assert [word for word in _specs(name)[0].config["cluster"]["srun_args"] if word not in words] == []


WORD = st.text(alphabet=string.ascii_letters + string.digits + ".,:@%+&|*()[]/_-", min_size=1, max_size=12)
GB = st.integers(1, 4096).map(float) | st.sampled_from([0.5, 1.5, 62.5])


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    gpus = draw(st.integers(0, 16))
    memory = draw(st.sampled_from([None, "mem_gb_per_node", "mem_gb_per_cpu", *(["mem_gb_per_gpu"] if gpus else [])]))
    keys = ("mem_gb_per_node", "mem_gb_per_gpu", "mem_gb_per_cpu")
    minutes = draw(st.integers(1, 20_000))
    return Shape(
        num_nodes=draw(st.integers(1, 64)),
        tasks_per_node=gpus or draw(st.integers(1, 16)),
        gpus_per_node=gpus,
        cpus_per_task=draw(st.integers(1, 64)),
        **{key: draw(GB) if key == memory else None for key in keys},
        gpu_type=draw(st.none() | st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)) if gpus else None,
        **{key: draw(st.none() | WORD) for key in ("partition", "qos", "constraint", "exclude", "account")},
        time_limit_min=minutes,
        signal_lead_s=draw(st.integers(1, minutes * 60 - 1)),
    )


@settings(derandomize=True, max_examples=150, deadline=None)
@given(shapes(), st.integers(1, 1000), st.integers(1, 300))
def test_any_shape_reads_back_from_its_script(shape: Shape, count: int, parallel: int) -> None:
    cluster = {"array_parallelism": parallel, "setup": [], "srun_args": []}
    folder = Path("/x/slurm")
    parameters = slurm_parameters(shape, cluster, folder=folder, job_name="sweep", comment=UUID)
    flags = sbatch_flags(array_script(folder, parameters, "true", count))
    assert shape_from(flags) == shape
    assert flags["array"] == f"0-{count - 1}%{min(count, parallel)}"
    assert len([key for key in flags if key.startswith("mem")]) <= 1


# --- what a person writes stays a value ---

HOSTILE = [
    "/runs/my sweeps/x",
    "/runs/it's",
    '/runs/a"b',
    "/runs/$(touch pwned)",
    "/runs/`id`",
    "/runs/a;b&c",
    "/runs/#x",
]


@pytest.mark.parametrize("folder", HOSTILE)
def test_an_awkward_folder_stays_one_word(tmp_path: Path, folder: str) -> None:
    plan = make_plan(Path(folder), _specs("cpu_x1"))
    script = array_script_of(plan, plan.arrays[0], UUID)
    assert sbatch_flags(script)["output"] == f"{folder}/slurm/%A_%a.out"
    words = command_of(script + "\n")
    assert words[words.index("--sweep-dir") + 1] == folder
    # And bash agrees: srun gets the words, and nothing else runs.
    (tmp_path / "srun").write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    (tmp_path / "srun").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_CPUS_PER_TASK": "1"}
    done = subprocess.run(
        ["bash", "-s"], input=script, text=True, env=environ, cwd=tmp_path, check=True, capture_output=True
    )
    assert done.stdout.splitlines() == words[1:]
    assert [path.name for path in tmp_path.iterdir()] == ["srun"]


@pytest.mark.parametrize("argument", ["--x=a b", "--x='y'", "--comment=$(touch pwned)", "; touch pwned", '--x="$HOME"'])
def test_awkward_srun_arguments_stay_words(argument: str) -> None:
    spec = make_spec("cluster=slurm", cluster__srun_args=[argument])
    plan = make_plan(Path("/runs/x"), [spec])
    assert argument in command_of(array_script_of(plan, plan.arrays[0], UUID) + "\n")


def test_directives_in_setup_lines_come_too_late_for_sbatch() -> None:
    spec = make_spec("cluster=slurm", cluster__setup=["#SBATCH --partition=other", "echo hello"])
    plan = make_plan(Path("/runs/x"), [spec])
    script = array_script_of(plan, plan.arrays[0], UUID)
    assert "partition" not in sbatch_flags(script)
    assert script.index("echo hello") < script.index("\nsrun ")


@pytest.mark.parametrize("folder", HOSTILE)
def test_srun_starts_the_worker_from_the_frozen_code(folder: str) -> None:
    plan = make_plan(Path(folder), _specs("gpu_x8"))
    code = freeze_code(plan)
    assert code is not None, "these tests run from a checkout"
    script = array_script_of(plan, plan.arrays[0], UUID, code)
    words = command_of(script + "\n")
    assert words[words.index("python3") :] == [
        "python3", "-u", f"{folder}/code/{code.digest[:12]}.zip", "--sweep-dir", folder, "--array", UUID,
    ]  # fmt: skip
    without = array_script_of(plan, plan.arrays[0], UUID)
    assert script.splitlines()[:-1] == without.splitlines()[:-1], "all else is as in the golden script"


def test_the_workers_command_quotes_what_it_is_given() -> None:
    command = worker_command(Path("/a b/$x"), ["--run", "it's"], python="apptainer exec img.sif python3")
    assert shlex.split(command) == [
        "apptainer", "exec", "img.sif", "python3", "-u", "-m", "hpc_trainer.worker", "--sweep-dir", "/a b/$x",
        "--run", "it's",
    ]  # fmt: skip
