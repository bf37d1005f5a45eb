"""A further submit says which files are no longer what its runs were submitted with, and can run them anew."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

import hpc_trainer
from hpc_trainer.cli import main as cli
from hpc_trainer.errors import ConfigError, RunStateError
from hpc_trainer.launch.grids import Submitted
from hpc_trainer.launch.plan import SweepPlan
from hpc_trainer.operate.results import result_table
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.states import DONE
from hpc_trainer.record.status import read_status
from tests.unit.launch.frozen_code.projects import git, make_checkout, write_files
from tests.unit.slurm.fake_slurm import FakeSlurm

GRID = (
    "cluster=slurm", "experiment=digits", "model=custom", "model._target_=my_lab.net.Net", "seed=0,1",
    "sweep_name=mine",
)  # fmt: skip
TRUST = ["my_lab"]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = make_checkout(tmp_path / "project")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HPC_TRAINER_RUNS", str(tmp_path / "runs"))
    return folder


@pytest.fixture
def sweep(tmp_path: Path) -> SweepPaths:
    return SweepPaths(tmp_path / "runs" / "mine")


def _submit(*more: str, fresh: bool = False) -> Submitted:
    return hpc_trainer.submit(*GRID, *more, trust=TRUST, fresh=fresh)


def _plan(*more: str) -> SweepPlan:
    return hpc_trainer.plan(*GRID, *more, trust=TRUST)


def _finish(sweep: SweepPaths, fake_slurm: FakeSlurm, run_ids: Sequence[str] | None = None) -> list[str]:
    """All runs, or these, have ended well."""
    fake_slurm.clear_queue()
    chosen = list(read_status(sweep).specs) if run_ids is None else list(run_ids)
    for run_id in chosen:
        run = sweep.run(run_id)
        run.folder.mkdir(exist_ok=True, mode=0o700)
        run.result.write_text('{"step": 200, "metrics": {"eval_accuracy": 0.5}}\n')
        run.marker(DONE).write_text("{}\n")
    return chosen


def test_what_changed_is_named_and_what_did_not_is_silent(
    project: Path, sweep: SweepPaths, fake_slurm: FakeSlurm
) -> None:
    done = _submit()
    _finish(sweep, fake_slurm)
    again = _submit()
    assert (again.num_submitted, again.plan.changed, again.plan.notes) == (0, (), ())
    write_files(project, {"my_lab/net.py": "class Net: changed = True\n", "my_lab/new.py": ""})
    (project / "setup.py").unlink()
    (change,) = _submit().plan.changed
    assert (change.num_runs, change.code) == (2, done.plan.code)
    assert change.files == ("project/my_lab/net.py", "project/setup.py"), "a new file is not one that they had"
    assert _plan().changed == (change,)


def test_runs_in_the_queue_keep_their_code_and_it_is_said(
    project: Path, sweep: SweepPaths, fake_slurm: FakeSlurm
) -> None:
    _submit()
    write_files(project, {"my_lab/net.py": "class Net: changed = True\n"})
    grown = _submit("seed=0,1,2")
    assert grown.num_submitted == 1
    assert [(each.num_runs, each.files) for each in grown.plan.changed] == [(2, ("project/my_lab/net.py",))]
    _finish(sweep, fake_slurm)
    assert [each.num_runs for each in _submit("seed=0,1,2").plan.changed] == [2], "the third one has the new code"


def test_a_commit_a_move_and_another_choice_of_files_are_no_change(
    project: Path, sweep: SweepPaths, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_files(project, {"my_lab/net.py": "class Net: uncommitted = True\n"})
    _submit()
    _finish(sweep, fake_slurm)
    git(project, "commit", "-a", "-q", "-m", "Second")
    for words in ([], ["snapshot.exclude=[setup.py]"], ["snapshot=copy"], ["snapshot=off"]):
        assert _plan(*words).changed == (), words
    moved = tmp_path / "elsewhere"
    shutil.copytree(project, moved)
    monkeypatch.chdir(moved)
    assert _plan().changed == ()
    write_files(moved, {"my_lab/net.py": "class Net: of_the_copy = True\n"})
    assert [each.files for each in _plan().changed] == [("project/my_lab/net.py",)], "the code that would run now"
    assert [each.files for each in _plan("snapshot=off").changed] == [("project/my_lab/net.py",)]


def test_what_nobody_can_know_is_said(project: Path, sweep: SweepPaths, fake_slurm: FakeSlurm) -> None:
    _submit("snapshot=off")
    _finish(sweep, fake_slurm)
    (note,) = _submit().plan.notes
    assert note == "It is unknown whether the code of 2 run(s) has changed since: snapshot=off froze nothing."
    _submit("seed=2,3")
    _finish(sweep, fake_slurm)
    write_files(project, {"my_lab/net.py": "class Net: changed = True\n"})
    plan = _plan("seed=0,1,2,3")
    assert [each.num_runs for each in plan.changed] == [2], "what is known of the others is told all the same"
    assert plan.notes == (note,)
    (archive,) = sweep.code.glob("*.zip")
    archive.unlink()
    (note,) = _plan("seed=2,3").notes
    assert note.startswith(f"It is unknown whether the code of 2 run(s) has changed since: {archive} cannot be read")


@pytest.mark.usefixtures("project")
def test_a_look_at_code_that_cannot_be_frozen_is_no_error(
    project: Path, sweep: SweepPaths, fake_slurm: FakeSlurm
) -> None:
    _submit()
    _finish(sweep, fake_slurm)
    write_files(project, {"my_lab/large.py": "#" * 2000})
    (note,) = _submit("snapshot.max_mb=0.001").plan.notes
    assert note.startswith("It is unknown whether the code of 2 run(s) has changed since: the code to freeze in")


def test_fresh_runs_them_anew_with_the_code_of_now(project: Path, sweep: SweepPaths, fake_slurm: FakeSlurm) -> None:
    _submit()
    with pytest.raises(RunStateError, match=r"is PENDING\. Cancel it first: hpc-trainer cancel Net-"):
        _submit(fresh=True)
    run_ids = _finish(sweep, fake_slurm)
    write_files(project, {"my_lab/net.py": "class Net: changed = True\n"})
    planned = hpc_trainer.plan(*GRID, trust=TRUST, fresh=True)
    assert (planned.num_to_submit, planned.changed) == (2, ())
    assert all(sweep.run(run_id).marker(DONE).exists() for run_id in run_ids), "a plan writes nothing"
    done = _submit(fresh=True)
    assert (done.num_submitted, done.plan.changed) == (2, ())
    assert [len(list(sweep.folder.glob(f"{run_id}.old-*/DONE"))) for run_id in run_ids] == [1, 1]
    assert not any(sweep.run(run_id).folder.exists() for run_id in run_ids)
    assert set(read_status(sweep).counts) == {"PENDING"}
    _finish(sweep, fake_slurm)
    assert _submit().plan.changed == ()


@pytest.mark.usefixtures("project")
def test_fresh_that_was_killed_before_it_submitted_is_given_again(
    sweep: SweepPaths, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    _submit()
    run_ids = _finish(sweep, fake_slurm)
    with monkeypatch.context() as killed:
        killed.setattr("hpc_trainer.launch.grids.submit_plan", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            _submit(fresh=True)
    monkeypatch.setattr("hpc_trainer.record.slurm_answers._LAG_S", -1.0)  # their jobs ended long ago
    assert not any(sweep.run(run_id).folder.exists() for run_id in run_ids)
    assert _submit().num_submitted == 0
    assert _submit(fresh=True).num_submitted == 2


def test_what_the_cluster_refuses_sets_nothing_aside(project: Path, sweep: SweepPaths, fake_slurm: FakeSlurm) -> None:
    _submit()
    run_ids = _finish(sweep, fake_slurm)
    with pytest.raises(ConfigError, match=r"budget\.max_jobs=1"):
        _submit("budget.max_jobs=1", fresh=True)
    assert all(sweep.run(run_id).marker(DONE).exists() for run_id in run_ids)


def test_results_have_the_code_where_it_varies(project: Path, sweep: SweepPaths, fake_slurm: FakeSlurm) -> None:
    first = _submit().plan.code
    _finish(sweep, fake_slurm)
    assert all("code" not in row for row in result_table(read_status(sweep)).rows)
    write_files(project, {"my_lab/net.py": "class Net: changed = True\n"})
    second = _submit("seed=2,3").plan.code
    _finish(sweep, fake_slurm)
    assert first is not None
    assert second is not None
    assert [row["code"] for row in result_table(read_status(sweep)).rows] == [first[:12]] * 2 + [second[:12]] * 2


def test_the_command_line_says_it_in_two_lines(
    project: Path, sweep: SweepPaths, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def said(*words: str) -> str:
        monkeypatch.setattr("sys.argv", ["hpc-trainer", "submit", *GRID, "--trust", "my_lab", *words])
        with pytest.raises(SystemExit) as left:
            cli.main()
        assert left.value.code in (0, None)
        return capsys.readouterr().out

    said()
    _finish(sweep, fake_slurm)
    names = ["a", "b", "net", "__init__"]
    assert "Changed since" not in said()
    write_files(
        project,
        {f"my_lab/{name}.py": "class Net: changed = True\n" for name in names} | {"setup.py": "changed = True\n"},
    )
    lines = said().splitlines()
    told = next(index for index, line in enumerate(lines) if line.startswith("Changed since"))
    assert lines[told : told + 2] == [
        "Changed since 2 of these runs were submitted: project/my_lab/__init__.py, project/my_lab/net.py, "
        "project/setup.py. These runs keep the code that they were submitted with.",
        f"To run them anew: hpc-trainer submit --fresh {' '.join(GRID)} --trust my_lab",
    ]
    (change,) = json.loads(said("--json"))["changed_code"]
    assert (change["runs"], len(change["files"]), len(change["code"])) == (2, 3, 64)
    assert "Changed since" not in said("--fresh")
