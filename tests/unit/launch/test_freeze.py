"""A command line -> frozen runs: where they live, what is merged, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_trainer.errors import ConfigError
from hpc_trainer.launch.freeze import freeze_grid


@pytest.mark.usefixtures("no_slurm")
def test_a_grid_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPC_TRAINER_RUNS", str(tmp_path))
    grid = freeze_grid(["seed=1,2,1", "optim.lr=0.1,0.10"])
    assert [spec.config["seed"] for spec in grid.specs] == [1, 2]
    assert grid.num_duplicates == 4
    assert grid.sweep.folder == tmp_path / "train"
    assert grid.specs[0].axes == {"seed": "1", "optim.lr": "0.1"}


@pytest.mark.usefixtures("no_slurm")
def test_where_a_sweep_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert freeze_grid([]).sweep.folder == tmp_path / "runs" / "train"
    monkeypatch.setenv("HPC_TRAINER_RUNS", str(tmp_path / "env"))
    assert freeze_grid(["experiment=digits"]).sweep.folder == tmp_path / "env" / "digits"
    named = freeze_grid(["experiment=digits", "sweep_name=mine", f"paths.runs_dir={tmp_path}/given"])
    assert named.sweep.folder == tmp_path / "given" / "mine"


@pytest.mark.usefixtures("no_slurm")
def test_all_problems_of_all_points_are_told_once() -> None:
    with pytest.raises(ConfigError) as caught:
        freeze_grid(["train.num_steps=0,1", "optim.lr=-1,0.1", "schedule.warmup_steps=0"])
    assert sorted(str(caught.value).splitlines()) == [
        "optim.lr=-1 must be greater than 0 and finite.",
        "train.num_steps=0 must be at least 1. Use 1.",
    ]


@pytest.mark.usefixtures("no_slurm")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["experiment=digits,gpt_bytes"],
            r"belong to one sweep, and these name digits, gpt_bytes\. Add sweep_name=NAME",
        ),
        (["cluster=slurm,local"], "cluster is one for a whole grid"),
    ],
)
def test_a_grid_has_one_place_and_one_cluster(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        freeze_grid(overrides)


@pytest.mark.usefixtures("no_slurm")
def test_a_folder_name_cannot_smuggle_lines_into_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPC_TRAINER_RUNS", f"{tmp_path}/a\ntouch pwned")
    with pytest.raises(ConfigError, match="control characters"):
        freeze_grid(["cluster=slurm"])


@pytest.mark.usefixtures("no_slurm")
def test_trust_is_frozen_with_the_run() -> None:
    overrides = ["model=custom", "model._target_=my_lab.nets.Net"]
    with pytest.raises(ConfigError, match="--trust my_lab"):
        freeze_grid(overrides)
    assert freeze_grid(overrides, trust=["my_lab"]).specs[0].config["trust"] == ["my_lab"]


def test_a_configuration_cannot_trust_itself(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "evil.yaml").write_text("# @package _global_\ntrust: [evil_module]\n")
    with pytest.raises(ConfigError, match="--trust evil_module"):
        freeze_grid(["cluster=local", "experiment=evil"], config_dirs=[tmp_path])
    with pytest.raises(ConfigError, match="cannot be set by a configuration"):
        freeze_grid(["cluster=local", "trust=[os]"])


def test_a_backslash_in_the_folder_of_sweeps_is_refused() -> None:
    with pytest.raises(ConfigError, match="backslash"):
        freeze_grid(["cluster=local", "paths.runs_dir='/tmp/back\\\\x'"])
