"""The command line: exit codes, the stable JSON of the design, plain text in pipes, and nothing heavy imported."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from hpc_trainer.cli.main import app, main, with_one_verb
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.states import DONE, RunState
from hpc_trainer.record.status import read_status
from tests.unit.record.builders import make_spec, make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def runs_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HPC_TRAINER_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


@pytest.fixture
def cli(runs_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Gives a command; returns exit code, standard output, standard error."""

    def run(*argv: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hpc-trainer", *argv])
        capsys.readouterr()
        try:
            main()
            code: Any = 0
        except SystemExit as error:
            code = error.code
        out = capsys.readouterr()
        return (code or 0), out.out, out.err

    return run


def _check(value: Any, form: Any, path: str = "") -> None:
    """`form`: a type or tuple of types, {key: form}, or [form of each item]. Further keys are refused."""
    if isinstance(form, dict):
        assert isinstance(value, dict), path
        assert set(value) == set(form), path
        for key, inner in form.items():
            _check(value[key], inner, f"{path}.{key}")
    elif isinstance(form, list):
        assert isinstance(value, list), path
        assert value, f"{path}: an empty list proves nothing"
        for index, item in enumerate(value):
            _check(item, form[0], f"{path}[{index}]")
    else:
        assert isinstance(value, form), f"{path}: {value!r}"
        assert not (isinstance(value, bool) and form is int), path


def strict(text: str) -> Any:
    """JSON as other languages read it: no NaN, no Infinity, one document."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


NULLABLE = (str, type(None))
PLAN = {
    "sweep": str,
    "runs": [{"run_id": str, "overrides": dict, "hardware": str, "state": str}],
    "arrays": [
        {
            "hardware": str, "runs": int, "nodes": int, "gpus_per_node": int, "partition": NULLABLE,
            "time_limit_min": int, "gpu_hours_max": (int, float), "start": NULLABLE, "script": str,
            "slots": (int, type(None)), "per_node": (int, type(None)),
            "per_gpu": (int, type(None)),
        }
    ],
    "expected": list,
    "waiting": int,
    "no_longer_in_grid": list,
    "duplicates": int,
    "excluded": int,
    "gpu_hours_max": (int, float),
    "limits": list,
    "changed_code": list,
    "shorter_twins": list,
    "left_out": list,
    "notes": list,
    "problems": list,
}  # fmt: skip
SUBMIT = {
    "sweep": str,
    "submitted": int,
    "waiting": int,
    "already": int,
    "arrays": [{"job_id": str, "runs": int, "hardware": str, "slots": (int, type(None))}],
    "top_up_job": NULLABLE,
    "limits": list,
    "changed_code": list,
    "shorter_twins": list,
    "left_out": list,
    "notes": list,
}
STATUS = {
    "sweep": str,
    "counts": dict,
    "runs": [
        {
            "run_id": str, "state": str, "step": int, "num_steps": int, "attempt": int, "job_id": NULLABLE,
            "cause": NULLABLE, "pending_reason": NULLABLE, "node": NULLABLE, "metrics": dict,
            "metrics_step": (int, type(None)), "speed": dict, "goodput": (float, type(None)),
            "remarks": list, "axes": dict, "wall_s": (int, float), "waiting_s": (float, type(None)),
            "start": (float, type(None)),
        }
    ],
    "notes": list,
    "pools": list,
}  # fmt: skip


# --- the JSON of the design, section 7 ---


def test_plan_submit_status_in_json(cli: Cli, runs_dir: Path, fake_slurm: FakeSlurm) -> None:
    grid = ["experiment=digits", "optim.lr=1e-3,3e-3", "hardware=cpu_x1,gpu_x8", "sweep_name=lr"]
    code, out, _ = cli("plan", *grid, "--json")
    assert code == 0
    plan = strict(out)
    _check(plan, PLAN)
    assert plan["sweep"] == "lr"
    assert [run["overrides"] for run in plan["runs"]] == [
        {"optim.lr": lr, "hardware": hardware} for lr in ("0.001", "0.003") for hardware in ("cpu_x1", "gpu_x8")
    ]
    assert [(a["hardware"], a["runs"], a["nodes"], a["gpus_per_node"]) for a in plan["arrays"]] == [
        ("cpu_x1", 2, 1, 0), ("gpu_x8", 2, 1, 8),
    ]  # fmt: skip
    assert all(array["script"].startswith("#!/bin/bash") for array in plan["arrays"])
    assert {run["state"] for run in plan["runs"]} == {"NEW"}
    assert plan["gpu_hours_max"] == 16.0
    assert fake_slurm.calls("sbatch") == []
    assert len(fake_slurm.calls("test-only")) == 2, "one a shape"
    assert [array["start"] for array in plan["arrays"]] == ["2026-01-01T00:00:00"] * 2
    assert not runs_dir.exists(), "a plan writes nothing"

    fake_slurm.forget_calls()
    code, out, _ = cli("submit", *grid, "--json")
    assert code == 0
    submitted = strict(out)
    _check(submitted, SUBMIT)
    assert (submitted["submitted"], submitted["already"]) == (4, 0)
    assert [(a["job_id"], a["runs"], a["hardware"]) for a in submitted["arrays"]] == [
        ("101", 2, "cpu_x1"), ("102", 2, "gpu_x8"),
    ]  # fmt: skip
    assert len(fake_slurm.calls("sbatch")) == 2
    assert sorted(call.split()[0] for call in fake_slurm.calls()) == [
        "sbatch", "sbatch", "scontrol", "sinfo", "test-only", "test-only",
    ]  # fmt: skip

    code, out, _ = cli("submit", *grid, "--json")
    assert (code, strict(out)) == (
        0,
        {
            "sweep": "lr", "submitted": 0, "waiting": 0, "already": 4, "arrays": [], "top_up_job": None,
            "limits": [], "changed_code": [], "shorter_twins": [], "left_out": [], "notes": [],
        },
    )  # fmt: skip
    assert len(fake_slurm.calls("sbatch")) == 2

    code, out, _ = cli("status", "--json")
    assert code == 0
    status = strict(out)
    _check(status, STATUS)
    assert status["counts"] == {"PENDING": 4}
    assert [run["run_id"] for run in status["runs"]] != []
    assert {run["job_id"] for run in status["runs"]} == {"101_0", "101_1", "102_0", "102_1"}

    code, out, _ = cli("cancel", "lr", "--json")
    assert code == 0
    assert strict(out)["sweep"] == "lr"
    assert len(strict(out)["cancelled"]) == 4
    assert len(fake_slurm.calls("scancel")) == 1


def test_a_finished_sweep_in_json(cli: Cli, runs_dir: Path, fake_slurm: FakeSlurm) -> None:
    specs = [make_spec("cluster=slurm", seed=seed, axes={"seed": str(seed)}) for seed in (0, 1)]
    sweep = SweepOnDisk(runs_dir / "done", specs)
    sweep.submit()
    for index, loss in enumerate((0.5, float("nan"))):
        sweep.start(index)
        sweep.end(index, state=RunState.COMPLETED, cause="done")
        sweep.done(index, eval_loss=loss, eval_accuracy=0.5 + index / 10)
    code, out, _ = cli("results", "--json")
    assert code == 0
    rows = strict(out)
    assert [row["run_id"] for row in rows] == [spec.run_id for spec in specs]
    for row in rows:
        kept = {"run_id", "seed", "eval_loss", "eval_accuracy", "state", "step", "gpu_hours", "attempts"}
        assert set(row) == kept | {"core_hours", "wall_s", "queue_s", "redone_s"}
    assert (rows[0]["eval_loss"], rows[0]["state"], rows[0]["attempts"]) == (0.5, "COMPLETED", 1)
    assert rows[1]["eval_loss"] is None, "a loss that is not a number is no JSON number"
    code, out, _ = cli("results", "done", "--sort", "eval_accuracy", "--json")
    assert [row["eval_accuracy"] for row in strict(out)] == [0.6, 0.5]
    code, out, _ = cli("status", "done", "--json")
    _check(strict(out), STATUS)
    assert fake_slurm.calls() == []


REPORT = {
    "sweep": str,
    "page": str,
    "counts": dict,
    "runs": [
        {
            "run_id": str, "hardware": str, "ranks": int, "global_batch_size": int, "axes": dict, "state": str,
            "cause": NULLABLE, "step": int, "num_steps": int, "attempts": int, "gpu_hours": float, "metrics": dict,
            "metrics_step": (int, type(None)), "speed": dict, "num_windows": int, "last_lines": list, "hint": NULLABLE,
            "ledger": (dict, type(None)),
        }
    ],
    "scaling": [
        {
            "kind": str, "unit": str, "axes": dict,
            "points": [
                {
                    "run_id": str, "hardware": str, "ranks": int, "global_batch_size": int, "step_time_s": float,
                    "throughput": float, "speedup": float, "efficiency": float, "data_wait_share": (float, type(None)),
                    "mfu": (float, type(None)),
                }
            ],
        }
    ],
    "notes": list, "advice": list,
    "exports": list,
}  # fmt: skip


def _scaled_sweep(folder: Path) -> SweepOnDisk:
    specs = [
        make_spec("cluster=slurm", axes={"hardware": f"x{ranks}"}, hardware__tasks_per_node=ranks) for ranks in (1, 2)
    ]
    sweep = SweepOnDisk(folder, specs)
    sweep.submit()
    for index, speed in enumerate((2.0, 3.0)):
        sweep.start(index, resumed=0)
        lines = [
            {"step": step, "steps_per_s": speed, "step_time_s": 1 / speed, "samples_per_s": 64 * speed, "loss": 1.0}
            for step in (10, 20, 30, 40)
        ]
        sweep.run(index).metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        sweep.end(index, state=RunState.COMPLETED, cause="done")
        sweep.done(index, eval_loss=0.5)
    return sweep


def test_report_compares_sweeps_and_needs_plotly_for_it(
    cli: Cli, runs_dir: Path, fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = _scaled_sweep(runs_dir / "first"), _scaled_sweep(runs_dir / "second")
    code, out, errors = cli("report", "first", "second", "--json")
    document = strict(out)
    assert (code, errors, [each["sweep"] for each in document["sweeps"]]) == (0, "", ["first", "second"])
    assert document["page"] == str(first.paths.folder / "compare.html")
    assert Path(document["page"]).read_text().count("<title>first and second</title>") == 1
    assert not (second.paths.folder / "compare.html").exists()
    code, _, errors = cli("report", "first", "second", "--plain")
    assert (code, "--plain is a page of one sweep" in errors) == (2, True)
    code, _, errors = cli("report", "first", "second", "--sweep", "first")
    assert (code, "Name all of them without --sweep" in errors) == (2, True)
    code, _, errors = cli("report", "first", "second", "--watch")
    assert (code, "--watch follows one sweep" in errors) == (2, True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "plotly" else object())
    code, _, errors = cli("report", "first", "second")
    assert (code, "pip install 'hpc_trainer[report]'" in errors) == (2, True)
    code, out, _ = cli("report", "first")
    assert "pip install 'hpc_trainer[report]'" in out
    assert "<svg" in (first.paths.folder / "report.html").read_text(), "the page of still pictures"


def test_report_watch_writes_anew_until_the_runs_have_ended(
    cli: Cli, runs_dir: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = _scaled_sweep(runs_dir / "scaled")
    statuses = [read_status(sweep.paths), read_status(sweep.paths)]
    sweep.run(1).marker(DONE).unlink()
    statuses.insert(0, read_status(sweep.paths))
    assert statuses[0].counts != statuses[1].counts
    sweep.mark(DONE, 1)
    monkeypatch.setattr("hpc_trainer.cli.report_verbs.looks", lambda *_: iter(statuses))
    monkeypatch.setattr("hpc_trainer.cli.report_verbs._LEAST_PAUSE_S", 0.0)
    monkeypatch.setattr("hpc_trainer.cli.report_verbs._SHARE", 1e9)
    code, out, _ = cli("report", "--watch", "--plain")
    pages = [line for line in out.splitlines() if "Page: " in line]
    assert (code, len(pages)) == (0, 3), "a look without news writes nothing; the end does"
    assert "2 COMPLETED" in pages[1]


def test_report_in_json_and_words(cli: Cli, runs_dir: Path, fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    sweep = _scaled_sweep(runs_dir / "scaled")
    code, out, _ = cli("report", "--plain", "--json")
    assert code == 0
    document = strict(out)
    _check(document, REPORT)
    assert document["page"] == str(sweep.paths.folder / "report.html")
    page = sweep.paths.folder / "report.html"
    assert "Strong scaling" in page.read_text()
    assert page.stat().st_mode & 0o777 == 0o600
    (scaling,) = document["scaling"]
    assert [point["efficiency"] for point in scaling["points"]] == pytest.approx([1, 0.75])
    code, out, _ = cli("report", "scaled", "--output", str(tmp_path / "mine.html"))
    assert (code, (tmp_path / "mine.html").exists()) == (0, True)
    for words in ("Strong scaling", "EFFICIENCY", "192 samples/s", "1.50", "75%", f"Page: {tmp_path / 'mine.html'}"):
        assert words in out
    code, out, _ = cli("report", "--warmup-steps", "30", "--json")
    assert strict(out)["runs"][0]["num_windows"] == 1
    code, out, _ = cli("report", "--warmup-steps", "50")
    assert "--warmup-steps" in out
    assert cli("report", "--warmup-steps", "-1")[0] == 2
    code, _, errors = cli("report", "--output", str(tmp_path / "nowhere" / "x.html"))
    assert code == 2
    assert "there is no folder" in errors
    assert fake_slurm.calls() == []


def test_logs_in_json(cli: Cli, runs_dir: Path) -> None:
    sweep = SweepOnDisk(runs_dir / "s", make_specs(1))
    sweep.run().log(0, 0).write_text("hello\n")
    code, out, _ = cli("logs", "--json")
    assert (code, strict(out)) == (
        0, {"run_id": sweep.specs[0].run_id, "files": [str(sweep.run().log(0, 0))]},
    )  # fmt: skip
    code, out, _ = cli("logs")
    assert out.splitlines() == [f"==> {sweep.run().log(0, 0)} <==", "hello"]


# --- exit codes and errors ---


@pytest.mark.few(5)
@pytest.mark.usefixtures("no_slurm")
@pytest.mark.parametrize(
    ("argv", "code", "kind"),
    [
        (["plan", "optim.lrr=1"], 2, "ConfigError"),
        (["plan", "optim.lr=[1"], 2, "ConfigError"),
        (["plan", "=3"], 2, "ConfigError"),
        (["submit", "train.num_steps=0"], 2, "ConfigError"),
        (["submit", "--config-dir", "/no/such", "seed=1"], 2, "ConfigError"),
        (["train", "seed=1,2"], 2, "ConfigError"),
        (["status"], 1, "RunStateError"),
        (["status", "nope"], 1, "RunStateError"),
        (["logs", "nope"], 1, "RunStateError"),
        (["cancel", "nope"], 1, "RunStateError"),
        (["results", "nope"], 1, "RunStateError"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_errors(cli: Cli, argv: list[str], code: int, kind: str) -> None:
    plain_code, out, err = cli(*argv)
    assert plain_code == code
    assert out == ""
    lines = err.splitlines()
    assert lines
    assert all(line.startswith("error: ") for line in lines)
    json_code, out, err = cli(*argv, "--json")
    assert json_code == code
    error = strict(out)
    assert set(error) == {"error", "message"}
    assert error["error"] == kind
    assert [f"error: {line}" for line in error["message"].splitlines()] == lines
    assert err == ""


@pytest.mark.usefixtures("fake_slurm")
def test_a_refusing_sbatch_is_exit_1(cli: Cli, fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("sbatch", error="sbatch: error: Invalid account\n", code=1)
    code, out, _ = cli("submit", "--json")
    assert (code, strict(out)["error"]) == (1, "RefusedError")
    assert "Invalid account" in strict(out)["message"]


@pytest.mark.parametrize(
    "argv", [["--nope"], ["nope"], ["status", "--nope"], ["status", "a", "b"], ["logs", "--rank", "x"]]
)
def test_wrong_usage_is_exit_2(cli: Cli, argv: list[str]) -> None:
    code, out, err = cli(*argv)
    assert (code, out) == (2, "")
    assert "Usage" in err


@pytest.mark.usefixtures("fake_slurm")
@pytest.mark.parametrize("verb", ["retry", "cancel"])
def test_what_acts_on_a_run_that_two_sweeps_have_says_which_it_took(cli: Cli, runs_dir: Path, verb: str) -> None:
    for number, name in enumerate(("old", "new")):
        specs = make_specs(1)
        sweep = SweepOnDisk(runs_dir / name, specs)
        sweep.start(attempt=0)
        sweep.end(attempt=0, state=RunState.COMPLETED, cause="completed", step=9, saved_step=9)
        sweep.run().marker(DONE).touch()  # nothing to do for either verb
        os.utime(runs_dir / name / "specs.jsonl", (1e9 + number, 1e9 + number))
    _, _, err = cli(verb, specs[0].run_id)
    assert (
        f"Note: {specs[0].run_id} is the run of sweep new; old has a run of this name too: write old/{specs[0].run_id} "
        f"for that one." in err
    )
    _, _, err = cli(verb, specs[0].run_id, "--sweep", "old")
    assert "Note" not in err


@pytest.mark.long
def test_help_and_version(cli: Cli) -> None:
    code, out, _ = cli("--help")
    assert code == 0
    verbs = [line.split()[0] for line in out.partition("Commands:")[2].splitlines() if re.match("  [a-z]", line)]
    assert {"train", "plan", "submit", "status", "logs", "cancel", "results", "retry", "export"} <= set(verbs)
    left = [(verb,) for verb in verbs]
    while left:
        words = left.pop()
        code, out, _ = cli(*words, "--help")
        within = [line.split()[0] for line in out.partition("Commands:")[2].splitlines() if re.match("  [a-z]", line)]
        left += [(*words, verb) for verb in within]
        assert (code, "--json" in out) == (0, words not in (("log-metrics",), ("top",)) and not within), words
        assert all(of_python not in out for of_python in ("list[", "<", "[[", "...]...")), out
    code, out, _ = cli("--version")
    assert (code, out.split()[0]) == (0, "hpc-trainer")


def test_an_error_while_another_submits_names_the_holder(cli: Cli, runs_dir: Path, fake_slurm: FakeSlurm) -> None:
    from hpc_trainer.record.processes import submit_lock

    with submit_lock(SweepPaths(runs_dir / "train")):
        code, _, err = cli("submit")
    assert code == 1
    assert f":{os.getpid()}:" in err
    assert fake_slurm.calls("sbatch") == []


# --- words ---


@pytest.mark.usefixtures("fake_slurm")
def test_a_plan_in_words(cli: Cli) -> None:
    code, out, _ = cli("plan", "experiment=digits", "seed=0,1,1", "--script")
    assert code == 0
    assert "Sweep digits in" in out
    assert "Array 0: 2 run(s) on cpu_x1" in out
    assert "1 point(s) gave the same run" in out
    assert "#SBATCH --array=0-1%2" in out
    assert out.endswith("Next: hpc-trainer submit experiment=digits seed=0,1,1\n"), "below the scripts"


@pytest.mark.usefixtures("fake_slurm")
def test_submitting_in_words_and_again(cli: Cli) -> None:
    assert "Submitted 2 run(s) on cpu_x1 to job 101." in cli("submit", "seed=0,1")[1]
    out = cli("submit", "seed=0,1,2")[1]
    assert "Submitted 1 run(s) on cpu_x1 to job 102." in out
    assert "2 run(s) were there already." in out
    out = cli("submit", "seed=0")[1]
    assert "nothing to submit (1 PENDING)" in out
    assert "2 run(s) of this sweep are not in this grid; they are left unchanged." in out
    assert "PENDING" in cli("submit", "seed=0", "--dry-run")[1]
    cli("cancel", "train")
    out = cli("submit", "seed=0")[1]
    assert "1 cancelled run(s) stay cancelled; " in out
    assert re.search(r"hpc-trainer retry \S+-s0-\w+ restarts it\.", out), out


def test_values_with_brackets_are_shown_as_they_are(cli: Cli, runs_dir: Path) -> None:
    spec = make_spec(axes={"model.kwargs.act": "[relu]", "x": "[/red]"})
    SweepOnDisk(runs_dir / "s", [spec])
    code, out, err = cli("results")
    assert (code, err) == (0, "")
    assert "[relu]" in out
    assert "[/red]" in out
    code, out, err = cli("results", "--sort", "model.kwargs.act")
    assert (code, err) == (0, "")
    assert "[relu]" in out


@pytest.mark.usefixtures("fake_slurm")
def test_folders_and_commands_with_brackets_are_shown_as_they_are(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs_dir = tmp_path / "[b]" / "x[/b]"
    monkeypatch.setenv("HPC_TRAINER_RUNS", str(runs_dir))
    given = [
        "model=custom",
        "model._target_=torch.nn.Linear",
        "+model.kwargs={names:[a,b]}",
        f"+cluster.env.A={'x' * 200}",
    ]
    code, out, err = cli("plan", *given)
    assert (code, err) == (0, "")
    assert str(runs_dir / "train") in out
    assert f"Next: hpc-trainer submit {shlex.join(given)}" in out.splitlines()
    SweepOnDisk(runs_dir / "s", make_specs(1))
    assert str(runs_dir / "s") in cli("results", "s")[1]


def test_the_first_line_of_an_error_is_the_cause(cli: Cli, runs_dir: Path) -> None:
    sweep = SweepOnDisk(runs_dir / "s", make_specs(1))
    sweep.start(executor="local")
    sweep.end(state=RunState.FAILED, cause="exception", error={"type": "ValueError", "message": "bad [x]\nmore"})
    code, out, _ = cli("status")
    assert code == 0
    assert "ValueError: bad [x]" in out
    assert f"Next: hpc-trainer why {sweep.specs[0].run_id}" in out


# --- processes of their own ---


def _run(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *argv], capture_output=True, text=True, check=False, env={**os.environ, **environ}
    )


HEAVY = "heavy = [m for m in ('torch', 'hydra', 'omegaconf', 'submitit', 'numpy', 'sklearn') if m in sys.modules]"


def test_the_command_line_imports_nothing_heavy() -> None:
    code = f"import sys, hpc_trainer.cli.main; {HEAVY}; print(heavy)"
    assert _run("-c", code).stdout == "[]\n"


@pytest.mark.parametrize("verb", ["status", "results", "cancel"])
def test_texts_and_paths_of_a_command_line_need_no_pydantic(tmp_path: Path, verb: str) -> None:
    code = (
        "import atexit, sys; atexit.register(lambda: print('pydantic' in sys.modules)); "
        "from hpc_trainer.cli.main import main; main()"
    )
    ran = _run("-c", code, verb, "no-such-sweep", "--runs-dir", str(tmp_path), "--where", "seed<1")
    assert ran.stdout == "False\n"
    assert f"{tmp_path} holds no sweep" in ran.stderr


def test_no_verb_of_the_login_node_imports_torch(runs_dir: Path, fake_slurm: FakeSlurm) -> None:
    code = (
        "import sys\nfrom hpc_trainer.cli.main import main\n"
        "for argv in (['plan', 'seed=1', '--script'], ['submit', 'seed=1'], ['status'], ['results'],"
        "             ['cancel', 'train']):\n"
        "    sys.argv = ['hpc-trainer', *argv]\n"
        "    try:\n        main()\n    except SystemExit as error:\n        assert not error.code, argv\n"
        f"{HEAVY}\n"
        "assert 'torch' not in heavy and 'sklearn' not in heavy, heavy\nprint('light')\n"
    )
    done = _run("-c", code)
    assert done.stdout.splitlines()[-1] == "light", done.stderr
    assert len(fake_slurm.calls("sbatch")) == 1


def test_a_verb_of_its_own_is_the_verb_of_the_whole_app() -> None:
    whole = typer.main.get_group(app).commands
    alone = {name: typer.main.get_group(with_one_verb(name)).commands for name in whole}
    assert {"status", "top-up", "log", "eval", "find-lr", "tag"} <= alone.keys()
    for name, command in whole.items():
        assert len(alone[name]) in (1, len(whole)), name  # a group of verbs keeps all
        there = alone[name][name]
        assert [param.opts for param in there.params] == [param.opts for param in command.params]
        assert there.help == command.help
    assert len(alone["status"]) == 1
    assert with_one_verb("statsu") is app
    assert with_one_verb("") is app


@pytest.mark.parametrize("words", [["status", "--json"], ["--help"]])
def test_status_and_help_import_no_hydra(runs_dir: Path, words: list[str]) -> None:
    """The time that they take is in docs/benchmarks/login_node_and_loop.md."""
    SweepOnDisk(runs_dir / "s", make_specs(1))
    code = (
        f"import sys\nfrom hpc_trainer.cli.main import main\nsys.argv = ['hpc-trainer', *{words}]\n"
        f"try:\n    main()\nexcept SystemExit:\n    pass\n{HEAVY}\nprint(heavy, file=sys.stderr)\n"
    )
    assert _run("-c", code).stderr == "[]\n"


@pytest.mark.few(1)
@pytest.mark.parametrize("environ", [{}, {"NO_COLOR": "1"}, {"COLUMNS": "40"}, {"TERM": "xterm-256color"}])
def test_a_pipe_gets_no_escape_codes_and_whole_ids(runs_dir: Path, environ: dict[str, str]) -> None:
    sweep = SweepOnDisk(runs_dir / "s", make_specs(2))
    sweep.done(0, eval_accuracy=0.5)
    done = _run("-m", "hpc_trainer", "status", **environ)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    if "COLUMNS" not in environ:
        assert sweep.specs[0].run_id in done.stdout


def test_a_reader_that_has_seen_enough_is_no_error(runs_dir: Path) -> None:
    sweep = SweepOnDisk(runs_dir / "s", make_specs(1))
    sweep.run().log(0, 0).write_text("line\n" * 200_000)
    process = subprocess.Popen(
        [sys.executable, "-m", "hpc_trainer", "logs"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=60) in (0, 1)


@pytest.mark.parametrize("words", [(), ("submit",), ("why",), ("data", "prepare", "images"), ("verify", "preempt")])
def test_the_short_option_for_help_is_known_to_each_verb(cli: Cli, words: tuple[str, ...]) -> None:
    code, out, err = cli(*words, "-h")
    assert (code, err) == (0, "")
    assert (code, out, err) == cli(*words, "--help")


def test_of_several_nodes_the_first_is_named_with_how_many_more(cli: Cli, runs_dir: Path) -> None:
    sweep = SweepOnDisk(runs_dir / "s", [make_spec("cluster=slurm", seed=0, hardware__num_nodes=2), make_spec(seed=1)])
    for index in range(2):
        sweep.start(index, executor="local", resumed=0)
        sweep.end(index, state=RunState.FAILED, cause="exception")
    out = cli("status", "s")[1]
    assert (out.count("n1 +1"), out.count("n1")) == (1, 2), out


def test_the_same_error_on_other_ranks_and_nodes_is_one_group_of_why(cli: Cli, runs_dir: Path) -> None:
    sweep = SweepOnDisk(runs_dir / "s", make_specs(3))
    errors = [("n1", 0, "a batch of -1"), ("n2", 1, "a batch of -1"), ("n3", 0, "another")]
    for index, (node, rank, message) in enumerate(errors):
        sweep.start(index, executor="local", resumed=0)
        error = {"rank": rank, "node": node, "type": "ValueError", "message": message, "exit_code": 1}
        sweep.end(index, state=RunState.FAILED, cause="exception", error=error)
    out = cli("why", "s")[1]
    assert [line[:11] for line in out.splitlines() if " x FAILED" in line] == ["2 x FAILED:", "1 x FAILED:"]
    assert "\n  ValueError: a batch of -1\n" in out, "neither node is the one"
    assert "\n  rank 0 on n3: ValueError: another\n" in out


def test_the_run_that_one_goes_on_from_is_shown_by_its_name(cli: Cli, runs_dir: Path) -> None:
    origin = f"/{'long/' * 16}runs/s/mlp-digits-s0-0123456789"
    axes = [{"checkpoint.resume_from": each} for each in (origin, "null")]
    SweepOnDisk(runs_dir / "s", [make_spec(seed=seed, axes=each) for seed, each in enumerate(axes)])
    for verb in ("status", "results"):
        out = cli(verb, "s")[1]
        assert "mlp-digits-s0-0123456789" in out
        assert "long/" not in out


@pytest.mark.parametrize(
    ("word", "verb"),
    [("resume", "submit"), ("rerun", "retry"), ("kill", "cancel"), ("ls", "sweeps"), ("retrry", "retry")],
)
def test_an_unknown_verb_gets_the_one_that_is_meant(
    word: str, verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`resume` was answered with `rename`, `kill` with the old name of a verb."""
    monkeypatch.setattr(sys, "argv", ["hpc-trainer", word, "x"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert f"No such command {word!r}. Did you mean {verb!r}" in capsys.readouterr().err
