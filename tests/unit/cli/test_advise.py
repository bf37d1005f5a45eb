"""`hpc-trainer advise` on files as runs leave them: one run, runs alike, one that nothing is wrong with."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.cli.main import main
from hpc_trainer.record.states import RunState
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm

Cli = Callable[..., tuple[int, str]]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    monkeypatch.setenv("HPC_TRAINER_RUNS", str(tmp_path / "runs"))

    def run(*argv: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["hpc-trainer", *argv])
        capsys.readouterr()
        try:
            main()
            code: Any = 0
        except SystemExit as error:
            code = error.code
        return code or 0, capsys.readouterr().out

    return run


def _sweep(tmp_path: Path, waits: list[float], overrides: tuple[str, ...] = (), **changes: Any) -> SweepOnDisk:
    specs = make_specs(len(waits), hardware__cpus_per_task=4, **changes)
    specs = [dataclasses.replace(spec, overrides=overrides or spec.overrides) for spec in specs]
    sweep = SweepOnDisk(tmp_path / "runs" / "s", specs)
    for index, wait in enumerate(waits):
        sweep.start(index, executor="local", resumed=0)
        lines = [{"step": each, "step_time_s": 0.1, "data_wait_s": 0.1 * wait} for each in range(10, 210, 10)]
        sweep.run(index).metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        sweep.end(index, state=RunState.COMPLETED, cause="done")
        sweep.done(index, eval_loss=0.5)
    return sweep


def test_one_run_gets_a_line_for_each_piece_of_advice_and_the_command(
    cli: Cli, tmp_path: Path, fake_slurm: FakeSlurm
) -> None:
    sweep = _sweep(tmp_path, [0.75])
    run_id = sweep.specs[0].run_id
    code, out = cli("advise", run_id)
    told = "a step waits 75 of 100 ms for its batch (75%). data.num_workers=4: up to 4x faster"
    assert (code, out.splitlines()) == (0, [f"{run_id}  COMPLETED", f"data-workers: {told}"])
    (run,) = json.loads(cli("advise", "--json")[1])["runs"]
    assert run == {
        "run_id": run_id, "state": "COMPLETED",
        "advice": [{
            "rule": "data-workers", "seen": "a step waits 75 of 100 ms for its batch (75%)",
            "set": ["data.num_workers=4"], "do": "",
            "gain": {"share": pytest.approx(0.75), "of": "time", "is_bound": True},
            "is_same_run": True, "line": f"data-workers: {told}",
        }],
    }  # fmt: skip
    assert f"advise {run_id}: 1 suggestion(s)" in cli("why", run_id)[1]
    assert fake_slurm.calls() == []


def test_runs_of_a_sweep_with_the_same_advice_stand_together(cli: Cli, tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    sweep = _sweep(tmp_path, [0.75, 0.76, 0.0])
    first, second, _ = (spec.run_id for spec in sweep.specs)
    code, out = cli("advise")
    lines = out.splitlines()
    assert code == 0
    assert lines[0].startswith("2 x data-workers: a step waits 76 of 100 ms")
    assert lines[1:] == [
        f"  {first}, {second}", "2 of 3 runs looked at have advice.", f"Next: hpc-trainer advise {first}",
    ]  # fmt: skip
    code, out = cli("report", "--plain", "--json")
    assert json.loads(out)["advice"] == [f"2 run(s), as {first}: {lines[0].removeprefix('2 x ')}"]
    page = (sweep.paths.folder / "report.html").read_text()
    assert "<h2>Advice</h2><ul><li>2 run(s), as" in page


def test_a_report_ends_with_the_command_of_its_first_advice(cli: Cli, tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    sweep = _sweep(tmp_path, [0.5, 0.75], ("experiment=digits", "data.num_workers=0"))
    _, tuned = cli("advise", sweep.specs[1].run_id)
    _, out = cli("report", "s", "--plain")
    command = out.splitlines()[-1]
    assert command.startswith("Next: hpc-trainer plan experiment=digits data.num_workers=")
    assert command == tuned.splitlines()[-1]
    assert command.removeprefix("Next: ") in (sweep.paths.folder / "report.html").read_text()
    text = cli("report", "s", "--json")[1]
    assert "Next" not in text


def test_a_healthy_run_is_told_nothing(cli: Cli, tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    sweep = _sweep(tmp_path, [0.02])
    run_id = sweep.specs[0].run_id
    assert cli("advise", run_id) == (0, f"{run_id}  COMPLETED\nNothing stands out.\n")
    assert json.loads(cli("advise", "--json")[1])["runs"][0]["advice"] == []
    assert "advise" not in cli("why", run_id)[1]
    cli("report", "--plain")
    assert "Advice" not in (sweep.paths.folder / "report.html").read_text()


def test_a_run_of_another_version_costs_no_other(cli: Cli, tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    sweep = _sweep(tmp_path, [0.75, 0.75])
    specs = sweep.paths.specs
    first, second = specs.read_text().splitlines()
    record = json.loads(first)
    record.pop("crc")
    record["config"]["optim"]["later"] = 1
    specs.write_text(f"{json.dumps(record)}\n{second}\n")
    document = json.loads(cli("advise", "--json")[1])
    assert [run["run_id"] for run in document["runs"]] == [sweep.specs[1].run_id]
    assert sweep.specs[0].run_id in document["notes"][0]


def test_what_has_not_begun_has_nothing_to_look_at(cli: Cli, tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    SweepOnDisk(tmp_path / "runs" / "s", make_specs(2))
    document = json.loads(cli("advise", "--json")[1])
    assert document["runs"] == []
    assert document["notes"] == ["none of these runs has begun: there is nothing to look at yet."]


@pytest.mark.parametrize(
    ("state", "after"), [(RunState.FAILED, ["Next: hpc-trainer why {}"]), (RunState.COMPLETED, [])]
)
def test_a_run_that_failed_is_a_matter_for_why(
    cli: Cli, tmp_path: Path, fake_slurm: FakeSlurm, state: RunState, after: list[str]
) -> None:
    sweep = SweepOnDisk(tmp_path / "runs" / "s", make_specs(1))
    sweep.start(executor="local", resumed=0)
    sweep.end(state=state, cause="exception")
    if state is RunState.COMPLETED:
        sweep.done(eval_loss=0.5)
    run_id = sweep.specs[0].run_id
    _, out = cli("advise", run_id)
    assert out.splitlines()[1:] == ["Nothing stands out.", *(line.format(run_id) for line in after)]


def test_a_complete_run_is_tuned_in_another_sweep(cli: Cli, tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    """The same run in the same sweep is done: `plan` would say that there is nothing to submit."""
    given = ("experiment=digits", "model=mlp", "sweep_name=s", "hardware.cpus_per_task=4")
    sweep = _sweep(tmp_path, [0.75], overrides=given)
    _, out = cli("advise", sweep.specs[0].run_id)
    (line,) = (line for line in out.splitlines() if line.startswith("Next: hpc-trainer "))
    assert line.endswith(" hardware.cpus_per_task=4 data.num_workers=4 sweep_name=s-tuned")
    assert line.count("sweep_name=") == 1
    assert "1 NEW. To submit: 1" in cli(*line.removeprefix("Next: hpc-trainer ").split(), "cluster=local")[1]


def test_a_cancelled_run_is_tuned_by_retry(cli: Cli, tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    """`plan` of the same run would say that there is nothing to submit."""
    sweep = _sweep(tmp_path, [0.75], overrides=("experiment=digits", "model=mlp", "sweep_name=s"))
    sweep.run().marker("DONE").unlink()
    sweep.end(state=RunState.CANCELLED, cause="cancelled", saved_step=100)
    run_id = sweep.specs[0].run_id
    _, out = cli("advise", run_id)
    (line,) = (line for line in out.splitlines() if line.startswith("Next: hpc-trainer "))
    assert line == f"Next: hpc-trainer retry {run_id} data.num_workers=4"
