"""Functions for notebooks, such as `hpc_trainer.results`, `status`, `retry` and `report`: with pandas and without."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hpc_trainer
from hpc_trainer.errors import ConfigError, RunStateError
from hpc_trainer.operate import notebook
from hpc_trainer.record.files import append_lines, write_json
from hpc_trainer.record.states import CANCEL, RunState
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm


@pytest.fixture
def sweep(tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> SweepOnDisk:
    """Three runs: complete, failed with a hostile message, and waiting."""
    monkeypatch.setenv("HPC_TRAINER_RUNS", str(tmp_path / "runs"))
    sweep = SweepOnDisk(tmp_path / "runs" / "mine", make_specs(3, "cluster=slurm"))
    sweep.submit()
    fake_slurm.answer("squeue", "500_2|PENDING||Priority|x\n")
    fake_slurm.answer("sacct", "")
    sweep.start(0, resumed=0)
    append_lines(sweep.run(0).metrics, [{"step": 100, "eval_loss": 0.5}, {"step": 200, "eval_loss": 0.75, "loss": 1.0}])
    sweep.end(0, state=RunState.COMPLETED, cause="done")
    sweep.done(0, eval_loss=0.75)
    sweep.start(1, resumed=0)
    error = {"type": "ValueError", "message": "<script>alert(1)</script>"}
    sweep.end(1, state=RunState.FAILED, cause="exception", error=error)
    return sweep


def test_results_and_metrics_are_frames(sweep: SweepOnDisk) -> None:
    pandas = pytest.importorskip("pandas")
    found = hpc_trainer.results("mine")
    assert isinstance(found, pandas.DataFrame)
    assert found["run_id"].tolist() == [spec.run_id for spec in sweep.specs]
    assert found["state"].tolist() == ["COMPLETED", "FAILED", "PENDING"]
    assert (found["seed"].tolist(), found["eval_loss"][0], found["eval_loss.best"][0]) == ([0, 1, 2], 0.75, 0.5)
    chosen = hpc_trainer.results(where="seed<2", columns=["seed", "state"], sort="-seed")
    assert chosen.to_dict("records") == [{"seed": 0, "state": "COMPLETED"}, {"seed": 1, "state": "FAILED"}]
    means = hpc_trainer.results(group_by=["seed"])
    assert (means["n"].tolist(), means["runs"].tolist(), means["eval_loss"].tolist()) == ([1], [3], [0.75])
    records = hpc_trainer.metrics(sweep.specs[0].run_id)
    assert records["step"].tolist() == [100, 200]
    assert records["eval_loss"].tolist() == [0.5, 0.75]
    with pytest.raises(ConfigError, match=r"where= sed<2: there is no column sed\. Did you mean seed"):
        hpc_trainer.results(where="sed<2")


def test_without_pandas_they_are_dicts_that_a_notebook_shows(
    sweep: SweepOnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notebook, "has_pandas", lambda: False)
    rows = hpc_trainer.results("mine", columns=["seed", "eval_loss"])
    assert list(rows) == [
        {"seed": 0, "eval_loss": 0.75},
        {"seed": 1, "eval_loss": None},
        {"seed": 2, "eval_loss": None},
    ]
    assert rows._repr_html_() == (
        "<table><thead><tr><th>seed</th><th>eval_loss</th></tr></thead><tbody><tr><td>0</td><td>0.75</td></tr>"
        "<tr><td>1</td><td>-</td></tr><tr><td>2</td><td>-</td></tr></tbody></table>"
    )
    assert hpc_trainer.metrics(sweep.specs[0].run_id)[0] == {"step": 100, "eval_loss": 0.5, "loss": None}


def test_status_why_and_sweeps_are_typed_and_shown_without_markup_of_others(sweep: SweepOnDisk) -> None:
    status = hpc_trainer.status()
    assert status.counts == {"COMPLETED": 1, "FAILED": 1, "PENDING": 1}
    assert [run.state for run in status.runs] == [RunState.COMPLETED, RunState.FAILED, RunState.PENDING]
    why = hpc_trainer.why(sweep.specs[1].run_id)
    assert (why.state, why.cause) == (RunState.FAILED, "exception")
    (line,) = hpc_trainer.sweeps()
    assert (line.name, line.num_runs) == ("mine", 3)
    assert repr(status) == "<Sweep mine: 1 COMPLETED, 1 FAILED, 1 PENDING>"
    assert repr(why).startswith(f"<Explanation of {sweep.specs[1].run_id}: FAILED, exception: The training raised")
    for shown in (status, why, hpc_trainer.sweeps()):
        text = shown._repr_html_()
        assert "<script>" not in text
        assert "mine" in text or sweep.specs[1].run_id in text
    with pytest.raises(RunStateError, match="mlp- names 3 runs of mine"):
        hpc_trainer.why("mlp-")
    with pytest.raises(RunStateError, match=r"there is no sweep mien\. Did you mean mine\?"):
        hpc_trainer.status("mien")


def test_a_table_of_states_has_outcomes_and_short_causes(sweep: SweepOnDisk) -> None:
    heartbeat = {"time": 0.0, "attempt": 0, "step": 20, "metrics": {"loss": 0.25, "lr": 0.1, "eval_loss": 0.5}}
    write_json(sweep.run(1).heartbeat, heartbeat)
    error = {"type": "ValueError", "message": "a long story " * 20}
    sweep.end(1, state=RunState.FAILED, cause="exception", error=error)
    text = hpc_trainer.status()._repr_html_()
    heads = re.findall("<th>(.*?)</th>", text)
    assert (heads[:4], heads[-1]) == (["run_id", "state", "step", "node"], "cause")
    assert {"loss", "eval_loss"} < set(heads)
    assert "lr" not in heads
    assert re.search(r"<td>ValueError: [a-z ]{68}\.\.</td>", text)


def test_a_table_of_states_keeps_the_state_beside_a_metric_of_that_name(sweep: SweepOnDisk) -> None:
    sweep.done(0, state=60.0, node=2.0, eval_loss=0.75)
    text = hpc_trainer.status()._repr_html_()
    assert re.findall("<th>(.*?)</th>", text) == [
        "run_id", "state", "step", "node", "metrics.state", "metrics.node", "eval_loss", "cause",
    ]  # fmt: skip
    assert "<td>COMPLETED</td>" in text


def test_a_table_of_sweeps_is_that_of_the_command_line(sweep: SweepOnDisk) -> None:
    heads, cells = (re.findall(f"<{tag}>(.*?)</{tag}>", hpc_trainer.sweeps()._repr_html_()) for tag in ("th", "td"))
    assert heads == ["sweep", "runs", "submitted", "by", "states", "size", "files", "best", "tags", "note"]
    assert cells[:2] == ["mine", "3"]
    assert re.fullmatch(r"20\d\d-\d\d-\d\d \d\d:\d\d", cells[2])
    assert cells[4] == "1 COMPLETED, 1 FAILED, 1 OPEN"
    assert cells[7] == "eval_loss=0.75"


def test_one_axis_or_column_is_given_as_text(sweep: SweepOnDisk) -> None:
    means = hpc_trainer.results(group_by="seed", columns="n,eval_loss")
    assert list(means) == ["n", "eval_loss"]
    with pytest.raises(ConfigError, match=r"--group-by sed: .*Did you mean seed\?"):
        hpc_trainer.results(group_by="sed")


def test_cancel_needs_a_name_and_cancels_what_it_names(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    with pytest.raises(RunStateError, match="cancel needs the name of a sweep or of a run"):
        hpc_trainer.cancel()
    assert hpc_trainer.cancel("mine") == [sweep.specs[2].run_id]
    assert sweep.paths.run(sweep.specs[2].run_id).marker(CANCEL).exists()
    assert fake_slurm.calls("scancel") == ["scancel --quiet 500_[2]"]


def test_cancel_of_the_runs_that_a_condition_chooses(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    with pytest.raises(RunStateError, match=r"where= seed>7: none of the 3 run\(s\) of mine fulfils it"):
        hpc_trainer.cancel("mine", where="seed>7")
    assert hpc_trainer.cancel("mine", where="seed==2") == [sweep.specs[2].run_id]
    assert not sweep.paths.run(sweep.specs[1].run_id).marker(CANCEL).exists()


def test_hold_and_release(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    waiting = sweep.specs[2].run_id
    for function, verb in ((hpc_trainer.hold, "hold"), (hpc_trainer.release, "release")):
        with pytest.raises(RunStateError, match=f"{verb} needs the name of a sweep or of a run"):
            function()
    assert hpc_trainer.hold("mine").held == (waiting,)
    assert sweep.paths.hold.exists()
    assert fake_slurm.calls("scontrol")[-1].startswith("scontrol uhold")
    assert hpc_trainer.status().runs[2].state is RunState.HELD
    done = hpc_trainer.release("mine")
    assert (done.released, done.to_submit) == ((waiting,), ())
    assert not sweep.paths.hold.exists()


def test_retry_submits_failed_runs_again(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    with pytest.raises(RunStateError, match=f"nothing to retry: {sweep.specs[0].run_id} is COMPLETED"):
        hpc_trainer.retry(sweep.specs[0].run_id)
    done = hpc_trainer.retry("mine", where="seed<2", changes=["hardware.time_limit_min=77"])
    assert [array.run_ids for array in done.arrays] == [(sweep.specs[1].run_id,)]
    assert [spec.shape.time_limit_min for spec in done.plan.specs] == [77]


def test_logs_configuration_and_differences_of_runs(sweep: SweepOnDisk) -> None:
    one, two = (spec.run_id for spec in sweep.specs[:2])
    log = sweep.run(1).log(0, 0)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("one\n<two>\n\x1b[31mthree\n")
    text = hpc_trainer.logs(two)
    assert text.splitlines() == [f"==> {log} <==", "one", "<two>", "\x1b[31mthree"]
    assert (hpc_trainer.logs(two, tail=1).splitlines()[1:], "\x1b" in repr(text)) == (["\x1b[31mthree"], False)
    assert "&lt;two&gt;" in text._repr_html_()
    keys = hpc_trainer.show(one)
    assert next(row.value for row in keys if row.key == "seed") == 0
    assert "<th>source</th>" in keys._repr_html_()
    pandas = pytest.importorskip("pandas")
    found = hpc_trainer.diff(one, two)
    assert isinstance(found, pandas.DataFrame)
    assert found.to_dict("records") == [{"key": "seed", one: 0, two: 1}]
    with pytest.raises(ConfigError, match="diff compares runs: name two or more"):
        hpc_trainer.diff(one)


def test_a_report_is_a_page(sweep: SweepOnDisk, tmp_path: Path) -> None:
    page = hpc_trainer.report("mine", plain=True)
    assert page == sweep.paths.folder / "report.html"
    assert "ValueError: &lt;script&gt;" in page.read_text()
    assert hpc_trainer.report(output=tmp_path / "other.html", plain=True) == tmp_path / "other.html"
    with pytest.raises(ConfigError, match="there is no folder"):
        hpc_trainer.report(output=tmp_path / "nowhere" / "x.html")
    with pytest.raises(RunStateError, match=r"there is no sweep mien\. Did you mean mine\?"):
        hpc_trainer.report("mien", plain=True)


def test_use_is_a_frame(sweep: SweepOnDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    pandas = pytest.importorskip("pandas")
    with pytest.warns(UserWarning, match="sacct did not answer"):  # to a question of usage
        found = hpc_trainer.usage("mine", by=["sweep", "month"])
    assert isinstance(found, pandas.DataFrame)
    assert list(found)[:3] == ["sweep", "month", "jobs"]
    assert (found["sweep"][0], found["jobs"][0], found["is_by_slurm"][0]) == ("mine", 2, False)
    with pytest.raises(ConfigError, match=r"by=swep: Did you mean sweep\?"):
        hpc_trainer.usage(by="swep")
    monkeypatch.setattr(notebook, "has_pandas", lambda: False)
    with pytest.warns(UserWarning, match="sacct did not answer"):
        assert hpc_trainer.usage()[0]["jobs"] == 2


def test_tags_and_a_note(sweep: SweepOnDisk) -> None:
    assert hpc_trainer.tag("mine", "good", "paper").tags == ("good", "paper")
    assert hpc_trainer.tag("mine", remove="paper").tags == ("good",)
    labels = hpc_trainer.note("mine", "rate too high")
    assert (labels.tags, labels.note) == (("good",), "rate too high")
    assert hpc_trainer.note("mine") == hpc_trainer.tag("mine") == labels
    assert hpc_trainer.note("mine", "").note == ""
    with pytest.raises(ConfigError, match="mine has no tag bad"):
        hpc_trainer.tag("mine", remove=["bad"])
    with pytest.raises(RunStateError, match=r"there is no sweep mien\. Did you mean mine\?"):
        hpc_trainer.tag("mien", "good")


def test_dir_has_every_public_name() -> None:
    functions = (
        "results metrics status why sweeps cancel plan submit sync hold release retry logs show diff report usage"
    )
    assert {*functions.split(), "tag", "note"} <= set(dir(hpc_trainer))
    for name in dir(hpc_trainer):
        if name != "RunContext":  # imports torch
            assert getattr(hpc_trainer, name) is not None
