"""What `plan --memory` asks of torch, once for each kind of training, and what it says of a GPU that is too small."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_trainer.errors import HpcTrainerError
from hpc_trainer.launch.freeze import freeze_grid
from hpc_trainer.launch.memory import Need, find_needs


def _need(gpu_type: str | None, gb: float, **more: object) -> Need:
    need = Need(run_id="r", axes={}, num_runs=1, gpu_type=gpu_type, parts={"weights": gb}, ways=("more GPUs",))
    return dataclasses.replace(need, **more)


@pytest.mark.parametrize(
    ("gpu_type", "gb", "says"),
    [
        ("a100", 30, None),
        ("a100", 60, "r needs about 67.5 GB a rank, and a100 has 40 or 80 GB: ask for the larger one"),
        ("a100", 79, "r needs about 88.4 GB a rank, and a100 has 40 or 80 GB. Try more GPUs."),
        ("a100_80gb", 60, None),
        ("a_new_one", 500, None),
        (None, 500, None),
    ],
)
def test_a_gpu_that_is_too_small(gpu_type: str | None, gb: float, says: str | None) -> None:
    warning = _need(gpu_type, gb).warning
    assert (warning or "").startswith(says or "")
    assert bool(warning) is bool(says)
    assert _need(gpu_type, gb, problem="unknown").warning is None


def test_kinds_are_asked_once(tmp_path: Path) -> None:
    words = ["experiment=digits", "cluster=local", "model=mlp,cnn", "seed=1,2", "optim.lr=1e-3,1e-4"]
    more = [f"paths.runs_dir={tmp_path}", "sweep_name=x", "model.dropout=0"]
    specs = freeze_grid([*words, *more]).specs
    needs = find_needs(specs)
    assert [(need.num_runs, need.problem) for need in needs] == [(4, None), (4, None)]
    assert {need.axes["model"] for need in needs} == {"mlp", "cnn"}
    for need in needs:
        assert need.parts["weights"] == need.parts["gradients"] > 0
        assert need.checkpoint_gb > 2.9 * need.parts["weights"]


def test_what_cannot_be_built_is_said(tmp_path: Path) -> None:
    words = ["experiment=digits", "cluster=local", "model=custom", "model._target_=torch.nn.Linear", "sweep_name=x"]
    (need,) = find_needs(freeze_grid([*words, f"paths.runs_dir={tmp_path}"]).specs)
    assert need.problem is not None
    assert need.problem.startswith("TypeError")


def test_own_loops_are_not_asked(tmp_path: Path) -> None:
    words = ["experiment=digits", "cluster=local", "train.main=mine.main", f"paths.runs_dir={tmp_path}", "sweep_name=x"]
    assert find_needs(freeze_grid(words, trust=["mine"]).specs) == []


def test_a_process_that_dies_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = freeze_grid(["experiment=digits", "cluster=local", f"paths.runs_dir={tmp_path}", "sweep_name=x"]).specs
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'no torch here' >&2\nexit 3\n")
    broken.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(HpcTrainerError, match="could not be estimated: no torch here"):
        find_needs(specs)


def test_the_verb(tmp_path: Path) -> None:
    words = ["experiment=resnet_synthetic", "cluster=local", f"paths.runs_dir={tmp_path}"]
    command = [sys.executable, "-m", "hpc_trainer", "plan", "--memory", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "ACTIVATIONS" in done.stdout
    assert list(tmp_path.iterdir()) == []
