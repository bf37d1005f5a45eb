"""The benchmark for GPUs runs whole on a CPU, and reckons with what it was given."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.gpu import EXPERIMENTS, _losses, _overrides, rates, read_options

JOB = Path(__file__).parents[3] / "jobs" / "bench_gpu.sh"


def _run(*words: str, job: Path = JOB, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH"))}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        [job, *words], env={**kept, "PATH": path, **env}, capture_output=True, text=True, timeout=200, check=False
    )


@pytest.mark.long
def test_a_run_and_its_twin_train_the_same_and_make_a_table(tmp_path: Path) -> None:
    words = ("--small", "--only", "gpt", "--rounds", "1", "--steps", "10")
    copy = tmp_path / "slurm_script"  # as Slurm starts it
    copy.write_bytes(JOB.read_bytes())
    copy.chmod(0o700)
    done = _run(*words, job=copy, SLURM_SUBMIT_DIR=str(JOB.parents[1]))
    assert done.returncode == 0, (done.stdout, done.stderr)
    for who in ("hpc_trainer", "by hand"):
        assert re.search(rf"\| gpt2_124m, {who} \| [\d,.]+ tokens/s .*\| 1 x 1 \|", done.stdout), done.stdout
    assert "480,000 tokens/s; ratio 0.99" in done.stdout
    assert "- product 512 x 512 x 512 in bf16: " in done.stdout
    # fp32 weights, the same samples, kernels and order: the same bits, whoever wrote the loop.
    found = re.search(r"loss after the last step ([\d.]+), by hand ([\d.]+)", done.stdout)
    assert found is not None
    assert found[1] == found[2]
    assert f"`python -m tests.benchmarks.gpu {' '.join(words)}`" in done.stdout


def test_a_copy_that_cannot_find_the_repository_says_where_to_stand(tmp_path: Path) -> None:
    copy = tmp_path / "slurm_script"
    copy.write_bytes(JOB.read_bytes())
    copy.chmod(0o700)
    done = _run(job=copy, SLURM_SUBMIT_DIR=str(tmp_path))
    assert done.returncode == 2
    assert "is not the repository" in done.stderr


def test_windows_without_the_cold_ones_and_without_evaluations() -> None:
    lines = [
        {"step": 10, "time": 100.0, "loss": 3.0},  # compiled
        {"step": 20, "time": 102.0, "loss": 3.0},
        {"step": 30, "time": 104.0, "loss": 3.0},
        {"step": 40, "time": 109.0, "loss": 3.0},
        {"step": 40, "time": 200.0, "eval_loss": 3.0},
    ]
    assert rates(lines, per_step=8) == [40.0, 16.0]


def test_another_training_is_no_twin() -> None:
    ours = [{"loss": 9.0}, {"loss": 2.0}, {"eval_loss": 7.0}]
    assert _losses(EXPERIMENTS["gpt"], ours, [{"loss": 2.05}]) == (2.0, 2.05)
    with pytest.raises(SystemExit, match="not the same training"):
        _losses(EXPERIMENTS["gpt"], ours, [{"loss": 2.2}])


@pytest.mark.parametrize(
    ("words", "steps", "compiled"),
    [([], 250, True), (["--small"], 30, False), (["--small", "--compile"], 30, True), (["--steps=7"], 7, True)],
)
def test_what_is_not_given(words: list[str], steps: int, compiled: bool) -> None:
    options = read_options(words)
    assert (options.steps, options.compile, options.rounds, options.overrides) == (steps, compiled, 3, [])


def test_what_is_tried_comes_last() -> None:
    options = read_options(["--small", "--rounds=2", "train.max_grad_norm=2", "model.embed_dim=16"])
    words = _overrides(EXPERIMENTS["gpt"], options, Path("runs"))
    assert words[-2:] == ["train.max_grad_norm=2", "model.embed_dim=16"]
    assert {"seed=0,1", "train.num_steps=50", "hardware=cpu_x1", "train.compile=false"} <= set(words)


@pytest.mark.parametrize("words", [["--rounds=0"], ["--steps=0"], ["--only=vit"]])
def test_what_cannot_be_is_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read_options(words)
    assert caught.value.code == 2
