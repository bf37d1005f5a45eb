"""A Hydra app as it is: its grid by `--app`, and by our launcher from the app itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from hpc_trainer.launch.hydra_app import NUMBER, PICKLE

if TYPE_CHECKING:
    from tests.integration.conftest import LocalDriver

JOBS = Path(__file__).parents[3] / "jobs"
OURS = ("cluster=local", "local.max_parallel=2", "monitor.heartbeat_every_s=0")
QUICK = ("steps=20", "pause_s=0")


@pytest.fixture
def app(local: LocalDriver) -> LocalDriver:
    """A folder with the app of jobs/, which git does not know."""
    shutil.copy(JOBS / "hydra_app.py", local.folder / "train.py")
    shutil.copytree(JOBS / "hydra_app_conf", local.folder / "hydra_app_conf")
    return local


def _multirun(app: LocalDriver, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """`python train.py -m hydra/launcher=hpc_trainer`, as a person types it."""
    argv = [sys.executable, "train.py", "-m", "hydra/launcher=hpc_trainer", "hydra.launcher.cluster=local", *words]
    done = subprocess.run(argv, cwd=app.folder, env=app.env, capture_output=True, text=True, timeout=200, check=False)
    assert not check or done.returncode == 0, done.stdout + done.stderr + app.logs()
    return done


def _runs(app: LocalDriver, sweep: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = app.json("results", sweep)
    return found


def test_a_grid_of_an_app_as_it_is(app: LocalDriver) -> None:
    words = ("--app", "train.py", "model=line,cubic", "lr=0.5", *QUICK)
    app.run("submit", "--wait", *OURS, *words)
    rows = _runs(app, "train")
    assert [row["params.model"] for row in rows] == ["line", "cubic"]
    assert all(row["state"] == "COMPLETED" and 0 < row["return_value"] < 0.1 for row in rows)
    folder = app.folder / "runs" / "train" / rows[0]["run_id"] / "output"
    assert yaml.safe_load((folder / ".hydra" / "overrides.yaml").read_text()) == ["model=line", "lr=0.5", *QUICK]
    assert yaml.safe_load((folder / ".hydra" / "config.yaml").read_text())["model"] == {"name": "line", "degree": 1}
    assert "line begins after step 0" in (folder / "train.log").read_text(), "logged as the app configured it"
    assert "line begins after step 0" in app.run("logs", rows[0]["run_id"]).stdout
    assert not (app.folder / "multirun").exists(), "plan leaves nothing behind"
    # The same command again submits nothing; another value one run.
    again = json.loads(app.run("submit", "--json", *OURS, *words).stdout)
    assert (again["submitted"], again["already"]) == (0, 2)
    one = ("--app", "train.py", "model=line", "lr=0.5", *QUICK)
    assert "all steps are done" in app.run("train", *one).stdout
    # A changed file of the app's configuration makes other runs of the same words.
    (app.folder / "hydra_app_conf" / "model" / "line.yaml").write_text("name: line\ndegree: 2\n")
    more = ("--app", "train.py", "model=line,cubic", "lr=0.5,0.1", *QUICK)
    planned = json.loads(app.run("plan", "--json", *OURS, *more).stdout)
    assert [run["state"] for run in planned["runs"]] == ["NEW", "NEW", "COMPLETED", "NEW"]


@pytest.mark.long
def test_ours_and_the_apps_words_never_meet(app: LocalDriver) -> None:
    """The app has a group `hardware` and a key `seed` of its own."""
    (app.folder / "hydra_app_conf" / "hardware").mkdir()
    for name in ("gpu", "tpu"):
        (app.folder / "hydra_app_conf" / "hardware" / f"{name}.yaml").write_text(f"kind: {name}\n")
    words = ("--app", "train.py", "+hardware=gpu,tpu", "+seed=7")
    planned = json.loads(app.run("plan", "--json", *OURS, "hardware=cpu_x1,cpu_x2", *words).stdout)
    assert [(run["hardware"], run["overrides"]["params.hardware"]) for run in planned["runs"]] == [
        ("cpu_x1", "gpu"), ("cpu_x1", "tpu"), ("cpu_x2", "gpu"), ("cpu_x2", "tpu"),
    ]  # fmt: skip
    assert all("-hardwaregpu-" in run["run_id"] or "-hardwaretpu-" in run["run_id"] for run in planned["runs"])


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("model=lime",), "Could not find 'model/lime'"),
        pytest.param(("model.degre=3",), "Did you mean model.degree?", marks=pytest.mark.long),
        pytest.param(("modl=cubic",), "Did you mean model?", marks=pytest.mark.long),
        pytest.param(("lr=(1",), "Error parsing override 'lr=(1'", marks=pytest.mark.long),
        (("lr=1", "--wait"), "--wait comes after --app train.py, and what comes there is for the app"),
    ],
)
def test_what_does_not_compose_is_said_at_plan_time(app: LocalDriver, words: tuple[str, ...], told: str) -> None:
    config = app.folder / "hydra_app_conf" / "config.yaml"
    config.write_text(config.read_text().replace("  - _self_\n", ""))  # of which Hydra warns
    done = app.run("plan", *OURS, "--app", "train.py", *words, check=False)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Warning" not in done.stderr
    assert not (app.folder / "runs").exists()


@pytest.mark.long
def test_an_app_that_is_set_up_for_another_sweeper_is_a_plain_grid_here(app: LocalDriver) -> None:
    config = app.folder / "hydra_app_conf" / "config.yaml"
    text = config.read_text().replace("  - _self_\n", "  - override hydra/sweeper: optuna\n  - _self_\n")
    config.write_text(text + "hydra:\n  sweeper:\n    n_trials: 20\n    n_jobs: 2\n    params:\n      lr: 0.1,0.2\n")
    planned = json.loads(app.run("plan", "--json", *OURS, "--app", "train.py", "model=line,cubic").stdout)
    assert [run["overrides"] for run in planned["runs"]] == [
        {"params.lr": lr, "params.model": model} for lr in ("0.1", "0.2") for model in ("line", "cubic")
    ]


@pytest.mark.long
def test_what_is_no_hydra_app_is_told_so(app: LocalDriver) -> None:
    (app.folder / "plain.py").write_text("print('all done')\n")
    assert "is not a Hydra app" in app.run("plan", *OURS, "--app", "plain.py", "lr=1", check=False).stderr
    assert "has no such file" in app.run("plan", *OURS, "--app", "other.py", check=False).stderr
    taken = app.run("plan", *OURS, "params.lr=1", "--app", "train.py", check=False)
    assert (taken.returncode, "params.lr=1 is decided by the app" in taken.stderr) == (2, True)
    both = app.run("plan", *OURS, "--command", "true", "--app", "train.py", check=False)
    assert (both.returncode, "Keep one" in both.stderr) == (2, True)


@pytest.mark.long
def test_the_launcher_returns_at_once_and_skips_what_is_done(app: LocalDriver) -> None:
    done = _multirun(app, "model=line,cubic", *QUICK)
    assert "2 submitted, 0 before" in done.stdout
    rows = app.run("status", "train", "--watch") and _runs(app, "train")
    assert [(row["state"], row["params.model"]) for row in rows] == [("COMPLETED", "line"), ("COMPLETED", "cubic")]
    folder = app.folder / "runs" / "train" / rows[1]["run_id"] / "output"
    assert (folder / ".hydra" / "hydra.yaml").is_file()
    assert (folder / "train.log").is_file()
    assert not (app.folder / "runs" / "train" / "pickles").exists(), "an app that a command starts is not pickled"
    again = _multirun(app, "model=line,cubic", *QUICK, "hydra.launcher.wait=true")
    assert "0 submitted, 2 before" in again.stdout
    # The same runs by --app.
    by_app = ("--app", "train.py", "model=line,cubic", *QUICK)
    assert json.loads(app.run("submit", "--json", *OURS, *by_app).stdout)["already"] == 2


@pytest.mark.long
def test_a_failing_task_is_told_by_the_launcher_that_waits(app: LocalDriver) -> None:
    done = _multirun(app, "model=line", "lr=none", *QUICK, "hydra.launcher.wait=true", check=False)
    assert done.returncode == 1
    assert "is FAILED" in done.stderr
    assert "hpc-trainer why train-modelline-lrnone" in done.stderr
    assert "Traceback" not in done.stderr or sys.gettrace()  # Hydra shows all where a tool (coverage) traces the app


@pytest.mark.long
def test_optuna_draws_values_by_what_runs_return(app: LocalDriver) -> None:
    study = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=4", "hydra.sweeper.n_jobs=2", "hydra.sweep.dir=study")
    study += ("hydra.sweep.subdir=${hydra.job.num}",)
    refused = _multirun(app, *study, "hydra.launcher.wait=false", "lr=interval(0.1,1.0)", *QUICK, check=False)
    assert "Leave out hydra.launcher.wait, or use hydra/sweeper=basic" in refused.stderr
    _multirun(app, *study, 'hydra.launcher.overrides=["local.max_parallel=2"]', "lr=interval(0.1,1.0)", *QUICK)
    best = yaml.safe_load((app.folder / "study" / "optimization_results.yaml").read_text())
    rows = _runs(app, "train")
    assert len(rows) == 4
    assert best["best_value"] == min(row["return_value"] for row in rows)
    assert [(app.folder / "study" / str(number) / ".hydra").is_dir() for number in range(4)] == [True] * 4


_NOTEBOOK = """
import os, sys
import hydra, hydra.core.plugins
from hydra import initialize
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
factor = 3

def train(config):
    print("the task of", os.path.basename(os.getcwd()))
    return {"score": config.lr * factor, "state": [1, 2.5]}

del sys.modules["__main__"].__file__  # as in a notebook
runner = Hydra.create_main_hydra2("book", create_config_search_path(os.path.abspath("hydra_app_conf")))
words = ["hydra/launcher=hpc_trainer", "hydra.launcher.cluster=local", "hydra.launcher.wait=true", "lr=0.5,1.0"]
(found,) = runner.multirun("config", train, words, with_log_configuration=False)
print([each.return_value for each in found])
"""


@pytest.mark.long
def test_a_task_that_no_command_starts_is_pickled_for_its_owner_alone(app: LocalDriver) -> None:
    (app.folder / "book.py").write_text(_NOTEBOOK)
    argv = [sys.executable, "book.py"]
    done = subprocess.run(argv, cwd=app.folder, env=app.env, capture_output=True, text=True, timeout=200, check=False)
    values = "[{'score': 1.5, 'state': [1, 2.5]}, {'score': 3.0, 'state': [1, 2.5]}]"
    assert values in done.stdout, done.stderr + app.logs()
    rows = _runs(app, "book")
    assert [row["score"] for row in rows] == [1.5, 3.0]
    (pickle,) = (app.folder / "runs" / "book" / "pickles").iterdir()
    assert (pickle.stat().st_mode & 0o777, pickle.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    # A file that others may write is not read.
    pickle.chmod(0o622)
    run = app.folder / "runs" / "book" / rows[0]["run_id"]
    env = {
        **app.env,
        "HPC_TRAINER_RUN_DIR": str(run / "output"),
        "HPC_TRAINER_RUN_ID": run.name,
        PICKLE: pickle.name,
        NUMBER: "0",
    }
    argv = [sys.executable, "-m", "hpc_trainer.hydra_apps.pickled", "train"]
    done = subprocess.run(argv, cwd=app.folder, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "the pickled task is not read" in done.stderr
    assert "others may write it" in done.stderr
    assert "the task of" not in done.stdout


@pytest.mark.long
def test_the_plugin_costs_a_hydra_program_nothing() -> None:
    """Hydra imports it at the start of each of its programs."""
    code = (
        "import sys, time, hydra, hydra.core.plugins as p; began = time.process_time(); "  # the clock counts other work
        "import hydra_plugins.hpc_trainer_launcher; seconds = time.process_time() - began; "
        "del sys.modules['hydra_plugins.hpc_trainer_launcher']; p.Plugins.instance(); "
        "assert 'hydra_plugins.hpc_trainer_launcher' in sys.modules; "
        "print([m for m in ('torch', 'submitit', 'numpy', 'hpc_trainer', 'cloudpickle') if m in sys.modules], "
        "seconds)"
    )
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    # The sweeper of Optuna, where it is installed, imports numpy itself.
    code = code.replace("p.Plugins.instance();", "sys.modules['optuna'] = None; p.Plugins.instance();", 1)
    argv = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    loaded, _, seconds = done.stdout.strip().partition("] ")
    assert loaded == "["
    assert float(seconds) < 0.1
