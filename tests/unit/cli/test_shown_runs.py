"""What `status`, `results` and `cancel` print of runs that are over: nothing old as if it were new."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_trainer.cli.grid_verbs import run_retry
from hpc_trainer.cli.report_verbs import run_report
from hpc_trainer.cli.results_verbs import run_results
from hpc_trainer.cli.run_verbs import run_cancel, run_status, status_json
from hpc_trainer.cli.show_verbs import run_show
from hpc_trainer.cli.why_verbs import run_why
from hpc_trainer.errors import RunStateError
from hpc_trainer.operate.report.write import PageOptions
from hpc_trainer.record.files import append_lines, write_json
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.run_figures import metrics_now
from hpc_trainer.record.states import CANCEL, RunState
from hpc_trainer.record.status import read_status
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm


@pytest.fixture
def sweep(tmp_path: Path, fake_slurm: FakeSlurm) -> SweepOnDisk:
    """Two runs; the first was cancelled at step 128, after a heartbeat at step 100."""
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(2, "cluster=slurm"))
    sweep.submit()
    fake_slurm.answer("squeue", "500_1|PENDING||Priority|x\n")
    fake_slurm.answer("sacct", "")
    sweep.start(resumed=0)
    sweep.beat(step=100, eval_accuracy=0.5, loss=2.0, lr=0.1)
    sweep.mark(CANCEL)
    sweep.end(state=RunState.CANCELLED, cause="cancelled", saved_step=128)
    return sweep


@pytest.fixture
def one_run(tmp_path: Path, fake_slurm: FakeSlurm) -> SweepOnDisk:
    """It has begun, and Slurm knows nothing of it."""
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(1, "cluster=slurm"))
    sweep.submit()
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "")
    sweep.start(resumed=0)
    return sweep


def _shown(sweep: SweepOnDisk, capsys: pytest.CaptureFixture[str]) -> str:
    run_status("sweep", sweep.paths.folder.parent, watch=False, as_json=False)
    return next(line for line in capsys.readouterr().out.splitlines() if line.startswith(sweep.specs[0].run_id))


def test_a_stopped_run_shows_its_newest_metrics_and_their_step(
    sweep: SweepOnDisk, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluations = [{"step": step, "eval_accuracy": step / 1000, "time": 1.0} for step in (100, 120, 140)]
    append_lines(sweep.run().metrics, [*evaluations[:2], {"step": 125, "loss": 1.0, "lr": 0.1}, evaluations[2]])
    assert "eval_accuracy=0.12 (of step 120)" in _shown(sweep, capsys)
    told = status_json(read_status(sweep.paths))["runs"][0]
    assert (told["metrics"], told["metrics_step"]) == ({"eval_accuracy": 0.12, "loss": 1.0, "lr": 0.1}, 120)


def test_what_was_only_seen_after_the_step_that_a_run_goes_back_to_is_not_shown(sweep: SweepOnDisk) -> None:
    sweep.beat(step=150, eval_accuracy=0.9, loss=0.5)
    append_lines(sweep.run().metrics, [{"step": 120, "loss": 0.7}, {"step": 150, "eval_accuracy": 0.9, "loss": 0.5}])
    told = status_json(read_status(sweep.paths))["runs"][0]
    assert (told["metrics"], told["metrics_step"]) == ({"loss": 0.7}, 120)


def test_a_look_at_many_runs_reads_no_metrics_of_theirs(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    sweep = SweepOnDisk(tmp_path / "many", make_specs(201, "cluster=slurm"))
    sweep.submit()
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "")
    sweep.start(resumed=0)
    sweep.beat(step=100, loss=2.0)
    sweep.end(state=RunState.PREEMPTED, cause="preempted", saved_step=128)
    append_lines(sweep.run().metrics, [{"step": 120, "loss": 0.7}])
    status = read_status(sweep.paths)
    assert metrics_now(status, status.runs)[status.runs[0].run_id] == ({"loss": 2.0}, None)
    assert metrics_now(status, status.runs[:200])[status.runs[0].run_id] == ({"loss": 0.7}, 120)


def test_metrics_of_the_step_that_a_stopped_run_is_at_need_no_step(
    sweep: SweepOnDisk, capsys: pytest.CaptureFixture[str]
) -> None:
    append_lines(sweep.run().metrics, [{"step": 128, "eval_accuracy": 0.75}])
    assert "eval_accuracy=0.75  " in f"{_shown(sweep, capsys)}  "
    assert "of step" not in _shown(sweep, capsys)


def test_an_evaluation_long_before_the_end_is_found(sweep: SweepOnDisk, capsys: pytest.CaptureFixture[str]) -> None:
    losses = [{"step": 3, "loss": 1.0, "lr": 0.1, "grad_norm": 0.5}] * 400
    append_lines(sweep.run().metrics, [{"step": 2, "eval_accuracy": 0.25}, *losses])
    assert "eval_accuracy=0.25 (of step 2)" in _shown(sweep, capsys)


def test_a_run_without_evaluations_shows_the_newest_loss(
    one_run: SweepOnDisk, capsys: pytest.CaptureFixture[str]
) -> None:
    one_run.beat(step=100, loss=2.0)
    one_run.end(state=RunState.PREEMPTED, cause="preempted", saved_step=128)
    append_lines(
        one_run.run().metrics, [{"step": 100, "loss": 2.0}, {"step": 110, "loss": 1.5}, {"step": 130, "loss": 1.0}]
    )
    assert "loss=1.5 (of step 110)" in _shown(one_run, capsys)


def test_a_run_at_work_that_is_silent_shows_for_how_long(
    one_run: SweepOnDisk, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_slurm.answer("squeue", "500_0|RUNNING|n1|None|x\n")
    one_run.beat(step=100, age_s=5)
    assert "ago" not in _shown(one_run, capsys)
    one_run.beat(step=100, age_s=150)
    assert _shown(one_run, capsys).endswith("last sign of life 2m30s ago")


def test_a_run_that_has_come_back_is_not_as_silent_as_its_attempt_before(
    one_run: SweepOnDisk, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    one_run.beat(step=100, age_s=500)
    one_run.end(state=RunState.REQUEUED, cause="preempted", saved_step=100, age_s=400)
    fake_slurm.answer("squeue", "500_0|RUNNING|n1|None|x\n")
    one_run.start(attempt=1, resumed=100, age_s=3)
    assert "last sign of life" not in _shown(one_run, capsys)


@pytest.mark.usefixtures("no_slurm")
def test_every_verb_shows_runs_in_the_order_of_the_grid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A grid that has grown: the third run was submitted last, and is the best, and the second began last."""
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(3, "cluster=local"))
    for index, accuracy in enumerate((0.5, 0.7, 0.9)):
        sweep.start(index, executor="local", age_s=(100.0, 50.0, 70.0)[index])
        sweep.end(index, state=RunState.COMPLETED, cause="done")
        sweep.done(index, eval_accuracy=accuracy)
    ids = [spec.run_id for spec in sweep.specs]
    grid = [ids[0], ids[2], ids[1]]
    write_json(sweep.paths.sweep, {"run_ids": grid})
    folder = sweep.paths.folder.parent

    def shown(text: str) -> list[str]:
        places = {
            run_id: [line.split()[0] for line in text.splitlines() if line.split()].index(run_id) for run_id in ids
        }
        return sorted(ids, key=lambda run_id: places[run_id])

    run_status("sweep", folder, watch=False, as_json=False)
    assert shown(capsys.readouterr().out) == grid
    run_results("sweep", folder, sort=None, as_json=False)
    out = capsys.readouterr().out
    assert shown(out) == grid
    assert f"Best eval_accuracy: 0.9 ({ids[2]})" in out
    run_results("sweep", folder, sort="eval_accuracy", as_json=False)
    assert shown(capsys.readouterr().out) == ids[::-1], "asked for, best first"
    run_results("sweep", folder, sort="seed", as_json=False)
    assert f"Best eval_accuracy: 0.9 ({ids[2]})" in capsys.readouterr().out, "no seed is best"
    run_report(["sweep"], folder, PageOptions(plain=True), as_json=True)
    assert [run["run_id"] for run in json.loads(capsys.readouterr().out)["runs"]] == grid
    write_json(sweep.paths.sweep, {"run_ids": ids[1:2]})
    assert [*read_status(sweep.paths).specs] == ids, "a submit of some of the runs moves none"


def test_cancel_says_what_it_cancelled_and_what_goes_on(
    tmp_path: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(4, "cluster=slurm"))
    sweep.submit()
    sweep.start(0)
    sweep.done(0, eval_loss=1.0)
    rows = ("500_1|RUNNING|n1|None|x", "500_2|RUNNING|n1|None|x", "500_3|PENDING||Priority|x")
    fake_slurm.answer("squeue", "".join(f"{row}\n" for row in rows))
    fake_slurm.answer("sacct", "")
    fake_slurm.print("scancel", "")
    sweep.start(1)
    sweep.start(2)
    ids = [spec.run_id for spec in sweep.specs]

    def told(*names: str) -> list[str]:
        run_cancel([*names], None, sweep.paths.folder.parent, save=False, as_json=False)
        return capsys.readouterr().out.splitlines()[:-1]

    assert told("sweep", ids[1]) == [
        f"cancelled {ids[1]}",
        "Cancelled 1 of the 4 runs of sweep; its other runs continue: 1 PENDING, 1 RUNNING.",
    ]
    assert told("sweep", ids[0], ids[2], ids[3]) == [
        f"cancelled {ids[2]}", f"cancelled {ids[3]}",
        "Cancelled 2 of the 4 runs of sweep; 1 had ended before; none of its other runs waits or works.",
    ]  # fmt: skip
    assert told("sweep")[-1:] == ["Cancelled the sweep sweep: 2 run(s); 2 had ended before."]
    with pytest.raises(RunStateError, match="no run of sweep is named 'nope'"):
        told("sweep", "nope")
    for names in (["mlp"], ["sweep", "mlp"], [ids[0], "mlp-"]):  # no sweep's name, and the beginning of all
        with pytest.raises(RunStateError, match=rf"mlp-? matches 4 runs of sweep: {ids[0]}, .*or name the sweep\."):
            told(*names)


@pytest.mark.usefixtures("no_slurm")
def test_each_verb_names_the_next_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(2, "cluster=local"))
    folder = Path("runs")
    for index in (0, 1):
        sweep.start(index, executor="local")
    sweep.end(0, state=RunState.COMPLETED, cause="done")
    sweep.done(0, eval_accuracy=0.5)
    sweep.end(1, state=RunState.FAILED, cause="exception")

    def last(verb: Callable[[], None]) -> str:
        verb()
        return capsys.readouterr().out.splitlines()[-1]

    def report() -> None:
        run_report(["sweep"], folder, PageOptions(plain=True), as_json=False)

    failed = f"Next: hpc-trainer why {sweep.specs[1].run_id}"
    assert last(lambda: run_results("sweep", folder, sort=None, as_json=False)) == failed
    assert last(report) == failed
    sweep.end(1, state=RunState.COMPLETED, cause="done")
    sweep.done(1, eval_accuracy=0.5)
    assert last(lambda: run_why(["sweep"], None, folder, as_json=False)) == "Next: hpc-trainer results sweep"
    run_cancel(["sweep"], None, folder, save=False, as_json=False)
    assert capsys.readouterr().out.startswith("Nothing to cancel in sweep: 2 run(s) had ended before.")
    with pytest.raises(RunStateError, match=f"sweep is a sweep: name one of its runs, as {sweep.specs[0].run_id}"):
        run_show("sweep", None, folder, every_key=False, as_json=False)
    run_show(sweep.specs[0].run_id, None, folder, every_key=False, as_json=False)
    assert f"Folder: {sweep.run(0).folder}" in capsys.readouterr().out


@pytest.mark.usefixtures("no_slurm")
def test_retry_where_nothing_failed_says_what_there_is_and_what_helps(tmp_path: Path) -> None:
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(2, "cluster=local"))
    for index in (0, 1):
        sweep.start(index, executor="local")
        sweep.end(index, state=RunState.COMPLETED, cause="done")
        sweep.done(index, eval_accuracy=0.5)
    folder = sweep.paths.folder.parent
    fresh = "To train completed runs anew, add --fresh to their `hpc-trainer submit`."
    with pytest.raises(RunStateError) as error:
        run_retry(["sweep"], None, folder, as_json=False)
    assert str(error.value) == (
        f"nothing to retry: no run of sweep has failed or was interrupted (2 COMPLETED). {fresh}"
    )
    run_id = sweep.specs[0].run_id
    with pytest.raises(RunStateError) as error:
        run_retry([run_id], None, folder, as_json=False)
    assert str(error.value) == f"nothing to retry: {run_id} is COMPLETED. {fresh}"


def test_a_sweep_that_was_cancelled_by_name_comes_back_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_slurm: None
) -> None:
    class AskedError(Exception):
        pass

    def asked(sweep: SweepPaths, run_ids: list[str], *, take_back: bool, changes: list[str]) -> None:
        raise AskedError(*run_ids, take_back)

    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(3, "cluster=local"))
    folder, run_ids = sweep.paths.folder.parent, [spec.run_id for spec in sweep.specs]
    for index in range(3):
        sweep.start(index, executor="local")
        sweep.end(index, state=RunState.PREEMPTED, cause="stopped")
    monkeypatch.setattr("hpc_trainer.cli.grid_verbs.retry", asked)
    run_cancel(["sweep", run_ids[0]], None, folder, save=False, as_json=False)
    with pytest.raises(AskedError) as found:
        run_retry(["sweep"], None, folder, as_json=False)
    assert found.value.args == (run_ids[1], run_ids[2], False), "a run that was cancelled by its own name stays so"
    run_cancel(["sweep"], None, folder, save=False, as_json=False)
    with pytest.raises(AskedError) as found:
        run_retry(["sweep"], None, folder, as_json=False)
    assert found.value.args == (run_ids[1], run_ids[2], True)
    for index in (1, 2):
        sweep.run(index).marker("CANCEL").unlink()
        sweep.end(index, state=RunState.COMPLETED, cause="done")
        sweep.done(index)
    with pytest.raises(RunStateError, match=f"name it: hpc-trainer retry {run_ids[0]}"):
        run_retry(["sweep"], None, folder, as_json=False)
    with pytest.raises(AskedError) as found:
        run_retry([run_ids[0]], None, folder, as_json=False)
    assert found.value.args == (run_ids[0], True)


@pytest.mark.usefixtures("no_slurm")
def test_a_sweep_whose_submit_came_to_nothing_names_no_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs" / "sweep").mkdir(parents=True)
    told = (
        f"{tmp_path}/runs/sweep has no runs: its `hpc-trainer submit` was refused or killed before it wrote one. "
        "Repeat the same submit. For sweeps in another folder add --runs-dir FOLDER, or once: "
        "export HPC_TRAINER_RUNS=FOLDER"
    )
    run_status("sweep", tmp_path / "runs", watch=False, as_json=False)
    assert capsys.readouterr().out.splitlines() == ["Sweep sweep: no runs.", told]
    run_results("sweep", tmp_path / "runs", sort=None, as_json=False)
    assert capsys.readouterr().out.splitlines()[-1] == told
