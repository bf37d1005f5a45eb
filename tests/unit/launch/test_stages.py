"""A file of stages: one command line becomes a sweep for each stage, planned as a whole and cancelled by one name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_trainer.cli.run_verbs import run_cancel, run_status
from hpc_trainer.errors import ConfigError
from hpc_trainer.launch.freeze import freeze_grid
from hpc_trainer.launch.stages import Chain, freeze_chain, plan_chain, submit_chain
from hpc_trainer.record.chain import stages_of
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from tests.unit.slurm.fake_slurm import FakeSlurm

STAGES = """
    - name: pretrain
      hardware: cpu_x1
      overrides: [experiment=digits, model=mlp, "seed=0,1"]
    - name: finetune
      hardware: cpu_x2
      overrides: [experiment=digits, model=mlp, "init_from=best:pretrain"]
    - name: evaluate
      overrides: [after=finetune, "train.command='ls {after.finetune.checkpoint} {after.finetune.run}'"]
"""


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HPC_TRAINER_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "conf"


def _chain(conf: Path, *words: str, stages: str = STAGES, more: str = "") -> Chain | None:
    (conf / "sweep").mkdir(parents=True, exist_ok=True)
    text = f"# @package _global_\nsnapshot:\n  mode: 'off'\nsweep:\n{more}  stages:{stages}"
    (conf / "sweep" / "three.yaml").write_text(text)
    return freeze_chain(["grid=three", *words], config_dirs=[conf])


def test_stages_are_sweeps_that_follow_each_other(conf: Path, fake_slurm: FakeSlurm) -> None:
    chain = _chain(conf, "sweep_name=mine", "pretrain:seed=5,6,7")
    assert chain is not None
    assert [len(stage.grid.specs) for stage in chain.stages] == [3, 1, 1]
    assert [(stage.name, stage.grid.sweep.name, stage.follows) for stage in chain.stages] == [
        ("pretrain", "mine-pretrain", []), ("finetune", "mine-finetune", ["pretrain"]),
        ("evaluate", "mine-evaluate", ["finetune"]),
    ]  # fmt: skip


def test_one_command_submits_all_and_one_cancels_all(
    conf: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    chain = _chain(conf)
    assert chain is not None
    assert not any(plan.problems for plan in plan_chain(chain))
    runs = conf.parent / "runs"
    assert not runs.exists(), "a plan writes nothing"
    done = submit_chain(chain)
    assert [each.num_submitted for each in done] == [2, 1, 1]
    submits = [call for call in fake_slurm.calls() if call.startswith("sbatch ") and "--test-only" not in call]
    assert ["afterany:101_0:101_1" in submits[1], "afterany:102_0" in submits[2]] == [True, True]
    again = _chain(conf)
    assert again is not None
    assert [each.num_submitted for each in submit_chain(again)] == [0, 0, 0]
    assert [sweep.name for sweep in stages_of(runs, "three")] == ["three-pretrain", "three-finetune", "three-evaluate"]
    run_status("three", runs, watch=False, as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert [stage["counts"] for stage in shown["stages"]] == [{"PENDING": 2}, {"PENDING": 1}, {"PENDING": 1}]
    run_cancel(["three"], None, runs, save=False, as_json=True)
    cancelled = json.loads(capsys.readouterr().out)["stages"]
    assert [len(stage["cancelled"]) for stage in cancelled] == [2, 1, 1]
    states = {run.state for sweep in stages_of(runs, "three") for run in read_status(sweep).runs}
    assert states == {RunState.CANCELLED}


@pytest.mark.parametrize(
    ("stages", "more", "words", "said"),
    [
        ("\n    - overrides: [seed=0]\n", "", (), "stage 1 of sweep.stages has no name"),
        ("\n    - name: a b\n", "", (), "Use a-b"),
        ("\n    - name: a\n    - name: a\n", "", (), "two stages are named a"),
        ("\n    - name: a\n      overrides: [after=b]\n    - name: b\n", "", (), "follows earlier stages only"),
        ("\n    - name: a\n      overrides: [after=a]\n", "", (), "stage a: after=a: a stage follows earlier"),
        ("\n    - name: a\n    - name: b\n      overrides: [after=ax]\n", "", (), "there is no sweep ax"),
        (
            "\n    - name: a\n",
            "  axes: {seed: [0, 1]}\n  exclude: [seed > 0]\n",
            (),
            "sweep.stages and sweep.axes describe two different things",
        ),
        ("\n    - name: pretrain\n", "", ("pretain:seed=1",), "Did you mean pretrain?"),
        ("\n    - name: a\n      overrides: [optim.lr=x]\n", "", (), "stage a: "),
        ("\n    - name: a\n      overrides: [search=random]\n", "", (), "stage a: a stage cannot be a search."),
    ],
)
def test_wrong_stages_are_refused(
    conf: Path, fake_slurm: FakeSlurm, stages: str, more: str, words: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        _chain(conf, *words, stages=stages, more=more)
    assert said in str(caught.value)


def test_other_verbs_refuse_a_chain_and_other_grids_are_none(conf: Path, fake_slurm: FakeSlurm) -> None:
    assert _chain(conf) is not None
    assert freeze_chain(["experiment=digits", "seed=0,1"]) is None
    assert freeze_chain(["experiment=digits", "grid=digits_grid"]) is None
    with pytest.raises(ConfigError, match="chain of several grids"):
        freeze_grid(["grid=three"], config_dirs=[conf])
