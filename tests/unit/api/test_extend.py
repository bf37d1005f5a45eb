"""A grid of more steps finds the runs of fewer that are done, and goes on from them where the schedule lets it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

import hpc_trainer
from hpc_trainer.cli import main as cli
from hpc_trainer.errors import ConfigError
from hpc_trainer.launch.grids import Submitted
from hpc_trainer.record.checkpoint_folders import step_name
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.spec import read_specs
from hpc_trainer.record.states import DONE
from tests.unit.slurm.fake_slurm import FakeSlurm

GRID = ("cluster=slurm", "experiment=digits", "schedule=constant", "seed=0,1", "sweep_name=mine", "snapshot=off")

_ROUNDS = ["parallel=post_local_sgd", "hardware=cpu_x2", "parallel.sync_every_steps=4"]


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepPaths:
    monkeypatch.setenv("HPC_TRAINER_RUNS", str(tmp_path / "runs"))
    return SweepPaths(tmp_path / "runs" / "mine")


def _done(sweep: SweepPaths, fake_slurm: FakeSlurm, run_ids: Sequence[str], *steps: int) -> None:
    """These runs are complete, and have kept checkpoints of these steps."""
    fake_slurm.clear_queue()
    for run_id in run_ids:
        run = sweep.run(run_id)
        run.folder.mkdir(mode=0o700)
        for step in steps:
            (run.checkpoints / step_name(step)).mkdir(parents=True)
        run.result.write_text(f'{{"step": {max(steps)}, "metrics": {{}}}}\n')
        run.marker(DONE).write_text("{}\n")


def _ids(done: Submitted) -> list[str]:
    return [spec.run_id for spec in done.plan.grid.specs]


def test_a_constant_rate_goes_on_from_the_end(sweep: SweepPaths, fake_slurm: FakeSlurm) -> None:
    short = _ids(hpc_trainer.submit(*GRID, "train.num_steps=100"))
    assert hpc_trainer.plan(*GRID, "train.num_steps=300").twins == (), "they are not done"
    _done(sweep, fake_slurm, short, 50, 100)
    twins = hpc_trainer.plan(*GRID, "train.num_steps=300").twins
    assert [(each.twin, each.step, each.why) for each in twins] == [(run_id, 100, None) for run_id in short]
    assert hpc_trainer.plan(*GRID, "train.num_steps=60").twins == (), "a shorter one goes on from nothing"
    assert hpc_trainer.plan(*GRID, "train.num_steps=300", "optim.lr=0.1").twins == (), "another training"

    longer = hpc_trainer.submit(*GRID, "train.num_steps=300", extend=True)
    assert longer.num_submitted == 2
    stored = read_specs(sweep)
    for run_id, twin in zip(_ids(longer), short, strict=True):
        config = stored[run_id].typed()
        assert config.checkpoint.resume_from == str(sweep.run(twin).checkpoints / "step-00000100")
        assert (config.train.num_steps, stored[run_id].num_steps) == (300, 300)
        assert run_id.rsplit("-", 1)[0] == twin.rsplit("-", 1)[0]
    assert hpc_trainer.submit(*GRID, "train.num_steps=300", extend=True).num_submitted == 0, "safe to repeat"
    there = hpc_trainer.plan(*GRID, "train.num_steps=300").twins
    assert [(each.twin, each.is_extended) for each in there] == [(run_id, True) for run_id in _ids(longer)]


def test_what_was_extended_is_extended_again(sweep: SweepPaths, fake_slurm: FakeSlurm) -> None:
    _done(sweep, fake_slurm, _ids(hpc_trainer.submit(*GRID, "train.num_steps=100")), 100)
    second = _ids(hpc_trainer.submit(*GRID, "train.num_steps=200", extend=True))
    twins = hpc_trainer.plan(*GRID, "train.num_steps=400").twins
    assert [each.step for each in twins] == [100, 100], "the second ones are not done"
    _done(sweep, fake_slurm, second, 200)
    twins = hpc_trainer.plan(*GRID, "train.num_steps=400").twins
    assert [(each.twin, each.step) for each in twins] == [(run_id, 200) for run_id in second]


@pytest.mark.parametrize(
    ("words", "kept", "step", "why"),
    [
        (
            ["schedule=cosine", "schedule.warmup_steps=0"],
            [50, 100],
            None,
            "schedule=cosine: step 2 has the learning rate",
        ),
        (["schedule=cosine", "schedule.warmup_steps=60"], [50, 100], 50, None),
        (["schedule=wsd", "schedule.decay_steps=20"], [50, 100], 50, None),
        (["schedule=wsd", "schedule.decay_steps=20"], [100], None, "schedule=wsd: step 81 has the learning rate"),
        (["schedule=step", "schedule.every_steps=30"], [100], 100, None),
        (["schedule=step", "schedule.warmup_steps=0"], [100], None, "schedule=step: step 34 has the learning rate"),
        (["schedule=one_cycle"], [100], None, "schedule=one_cycle: step 12 has the learning rate"),
        (["train.early_stop.patience=3", "train.eval_every_steps=10"], [50], None, "it stopped early, at step 50"),
        (_ROUNDS, [100], None, "with parallel.sync its last step ended"),
    ],
)
def test_where_the_schedule_lets_it(
    words: list[str], kept: list[int], step: int | None, why: str | None, sweep: SweepPaths, fake_slurm: FakeSlurm
) -> None:
    grid = [each for each in GRID if not (each.startswith("schedule=") and words[0].startswith("schedule="))]
    _done(sweep, fake_slurm, _ids(hpc_trainer.submit(*grid, *words, "train.num_steps=100")), *kept)
    longer = (*grid, *words, "train.num_steps=300")
    (twin, _) = hpc_trainer.plan(*longer).twins
    assert twin.step == step
    if why is None:
        assert hpc_trainer.plan(*longer, extend=True).num_to_submit == 2
        return
    assert str(twin.why).startswith(why)
    with pytest.raises(ConfigError, match="2 of these runs cannot continue where their shorter twins ended"):
        hpc_trainer.submit(*longer, extend=True)


def test_a_run_of_one_step_is_a_twin(sweep: SweepPaths, fake_slurm: FakeSlurm) -> None:
    grid = (*GRID, "schedule.warmup_steps=0")
    short = _ids(hpc_trainer.submit(*grid, "train.num_steps=1"))
    _done(sweep, fake_slurm, short, 1)
    assert [twin.twin for twin in hpc_trainer.plan(*grid, "train.num_steps=2").twins] == short


def test_a_longer_run_of_another_training_hides_no_twin(sweep: SweepPaths, fake_slurm: FakeSlurm) -> None:
    short = _ids(hpc_trainer.submit(*GRID, "train.num_steps=100"))
    _done(sweep, fake_slurm, short, 100)
    other = _ids(hpc_trainer.submit(*GRID, "train.num_steps=200", "optim.weight_decay=0.3"))
    _done(sweep, fake_slurm, other, 200)
    assert {each[:-10] for each in other} == {each[:-10] for each in short}, "one label"
    assert [each.twin for each in hpc_trainer.plan(*GRID, "train.num_steps=300").twins] == short


def test_the_first_of_many_that_cannot_go_on_are_named(sweep: SweepPaths, fake_slurm: FakeSlurm) -> None:
    grid = [each for each in GRID if not each.startswith(("schedule=", "seed="))] + [
        "schedule=cosine",
        "seed=0,1,2,3,4",
    ]
    _done(sweep, fake_slurm, _ids(hpc_trainer.submit(*grid, "train.num_steps=100")), 100)
    with pytest.raises(ConfigError) as error:
        hpc_trainer.submit(*grid, "train.num_steps=300", extend=True)
    first, *named, more, _ = str(error.value).splitlines()
    assert first.startswith("5 of these runs cannot continue")
    assert (len(named), more) == (3, "  and 2 more")


def test_nothing_to_extend_is_an_error(sweep: SweepPaths, fake_slurm: FakeSlurm) -> None:
    with pytest.raises(ConfigError, match="no new run of this grid has a shorter twin in the sweep mine"):
        hpc_trainer.submit(*GRID, extend=True)
    assert not sweep.folder.exists()
    assert fake_slurm.calls("sbatch") == []


def test_the_command_line_offers_it(
    sweep: SweepPaths, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*words: str) -> str:
        monkeypatch.setattr("sys.argv", ["hpc-trainer", *words])
        with pytest.raises(SystemExit) as left:
            cli.main()
        assert left.value.code in (0, None)
        return capsys.readouterr().out

    short = _ids(hpc_trainer.submit(*GRID, "train.num_steps=100"))
    _done(sweep, fake_slurm, short, 100)
    longer = [*GRID, "train.num_steps=300"]
    out = said("plan", *longer)
    offer = f"To continue from there: hpc-trainer submit --extend {' '.join(longer)}"
    assert f"2 of these runs have a shorter, completed twin ({short[0]}, step 100)" in " ".join(out.split())
    assert offer in out.splitlines()
    assert [each["twin"] for each in json.loads(said("plan", *longer, "--json"))["shorter_twins"]] == short
    assert "Next: hpc-trainer submit --extend" in said("plan", "--extend", *longer)
    assert "Submitted 2 run(s)" in said("submit", "--extend", *longer)
    assert "2 of these runs already exist as extended runs" in said("plan", *longer)
