"""Grid -> arrays: what is submitted, and what is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_trainer.errors import ConfigError
from hpc_trainer.launch.plan import build_plan, freeze_grid, specs_to_write
from hpc_trainer.runs.states import RunState
from tests.unit.launch.grids import make_grid, make_plan
from tests.unit.runs.builders import make_spec, make_specs

SLURM = ("cluster=slurm",)


def test_runs_of_one_shape_become_one_array(tmp_path: Path) -> None:
    small = [make_spec(*SLURM, seed=seed) for seed in range(3)]
    large = [make_spec(*SLURM, "hardware=gpu_x16", seed=seed) for seed in range(2)]
    plan = make_plan(tmp_path, [small[0], large[0], small[1], large[1], small[2]])
    assert [(array.hardware, array.specs) for array in plan.arrays] == [
        ("cpu_x1", tuple(small)),
        ("gpu_x16", tuple(large)),
    ]
    assert plan.num_to_submit == 5
    assert plan.gpu_hours_max == 2 * 16.0
    assert set(plan.states.values()) == {RunState.NEW}


@pytest.mark.parametrize(
    "changes",
    [{"hardware__time_limit_min": 7}, {"hardware__partition": "x"}, {"cluster__account": "x"},
     {"cluster__setup": ["x"]}, {"cluster__srun_args": ["-x"]}, {"cluster__python": "x"},
     {"cluster__signal_lead_s": 9}],
)  # fmt: skip
def test_what_differs_in_the_script_is_another_array(tmp_path: Path, changes: dict[str, object]) -> None:
    specs = [make_spec(*SLURM, seed=0), make_spec(*SLURM, seed=1, **changes)]
    assert len(make_plan(tmp_path, specs).arrays) == 2


def test_what_the_worker_reads_from_the_spec_shares_an_array(tmp_path: Path) -> None:
    specs = [make_spec(*SLURM, seed=0), make_spec(*SLURM, seed=1, cluster__env={"A": "1"}, optim__lr=0.5)]
    assert len(make_plan(tmp_path, specs).arrays) == 1


SUBMITTED = {RunState.NEW, RunState.PREEMPTED, RunState.TIMEOUT, RunState.NODE_FAIL}


@pytest.mark.parametrize("state", RunState)
def test_which_states_are_submitted(tmp_path: Path, state: RunState) -> None:
    (spec,) = make_specs(1, *SLURM)
    grid = make_grid(tmp_path, [spec])
    assert build_plan(grid, {spec.run_id: state}).num_to_submit == (state in SUBMITTED)
    again = build_plan(grid, {spec.run_id: state}, retry_failed=True)
    assert again.num_to_submit == (state in SUBMITTED | {RunState.FAILED, RunState.OUT_OF_MEMORY})


def test_runs_that_left_the_grid_are_named_and_left_alone(tmp_path: Path) -> None:
    specs = make_specs(3, *SLURM)
    states = {spec.run_id: RunState.PENDING for spec in specs}
    plan = build_plan(make_grid(tmp_path, specs[:1]), states)
    assert plan.no_longer_in_grid == tuple(spec.run_id for spec in specs[1:])
    assert plan.arrays == ()


def test_specs_are_written_once_and_again_when_they_ask_for_something_else(tmp_path: Path) -> None:
    specs = make_specs(2, *SLURM)
    plan = make_plan(tmp_path, specs)
    assert specs_to_write(plan, {}) == specs
    assert specs_to_write(plan, {spec.run_id: spec for spec in specs}) == []
    longer = [make_spec(*SLURM, seed=seed, hardware__time_limit_min=600) for seed in range(2)]
    assert specs_to_write(make_plan(tmp_path, longer), {spec.run_id: spec for spec in specs}) == longer


# --- from the command line ---


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
    with pytest.raises(ConfigError, match="no control characters, backslash or percent sign"):
        freeze_grid(["cluster=local", "paths.runs_dir='/tmp/back\\\\x'"])
