"""What `cluster=` says of a site holds for a run on this machine too: its environment, its setup lines, its python."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.integration.conftest import LocalDriver

TELLS = """
import json, os
from torch import nn

def build(input_shape, num_classes):
    with open("seen.json", "w") as file:
        json.dump({key: os.environ.get(key) for key in ("OF_ENV", "OF_SETUP", "OF_PYTHON")}, file)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))
"""
WORDS = (
    "experiment=digits", "sweep_name=here", "train.num_steps=12", "--trust", "tells", "model=custom",
    "model._target_=tells.build", "--config-dir", "site",
)  # fmt: skip
SITE = """
name: my_site
executor: slurm
env: {{OF_ENV: hello}}
setup: ["export OF_SETUP='a b'", "false || true"]
python: {python}
"""


@pytest.fixture
def site(local: LocalDriver) -> Path:
    """A folder of --config-dir with `cluster=my_site`; its python is a program that says that it was used."""
    (local.folder / "tells.py").write_text(TELLS)
    python = local.folder / "site_python"
    python.write_text(f'#!/bin/sh\nexport OF_PYTHON=site\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    folder = local.folder / "site" / "cluster"
    folder.mkdir(parents=True)
    (folder / "my_site.yaml").write_text(SITE.format(python=python))
    return folder


def _seen(local: LocalDriver) -> Any:
    return json.loads((local.folder / "seen.json").read_text())


@pytest.mark.long
def test_train_honours_what_the_site_of_the_persons_own_file_fixes(local: LocalDriver, site: Path) -> None:
    own = local.folder / "config" / "hpc_trainer" / "config.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("cluster: my_site\n")
    own.chmod(0o600)
    assert local.train(*WORDS)["state"] == "COMPLETED"
    assert _seen(local) == {"OF_ENV": "hello", "OF_SETUP": "a b", "OF_PYTHON": "site"}


def test_the_local_executor_runs_setup_and_python_too(local: LocalDriver, site: Path) -> None:
    own = ("cluster=local", "+cluster.env.OF_ENV=x", "cluster.setup=['export OF_SETUP=y']")
    local.run("submit", *WORDS, *own, f"cluster.python={local.folder / 'site_python'}", "--wait")
    assert _seen(local) == {"OF_ENV": "x", "OF_SETUP": "y", "OF_PYTHON": "site"}


@pytest.mark.few(1)
@pytest.mark.parametrize("verb", ["train", "submit"])
def test_the_first_setup_line_that_fails_is_the_cause(local: LocalDriver, verb: str) -> None:
    lines = "cluster.setup=['cd .', 'for each in a b; do', 'ls /not/$each', 'done', 'touch reached']"
    wait = ("cluster=local", "--wait") if verb == "submit" else ()
    done = local.run(verb, "experiment=digits", "sweep_name=setup", "train.num_steps=12", lines, *wait, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    (run,) = local.json("status", "setup")["runs"]
    assert (run["state"], run["cause"], run["attempt"]) == ("FAILED", "not started", 1)
    assert not (local.folder / "reached").exists()
    why = local.json("why", run["run_id"])
    said = "ls: cannot access '/not/a': No such file or directory"
    assert why["evidence"][0] == f"not started: cluster.setup line 3 failed: `ls /not/$each`: {said}"
    assert "cluster.setup line 3 failed: `ls /not/$each`" in local.run("status", "setup").stdout
    (row,) = local.json("report", "setup")["runs"]
    assert row["last_lines"] == [said]


@pytest.mark.long
def test_a_python_that_is_not_there_is_named(local: LocalDriver) -> None:
    words = ("experiment=digits", "sweep_name=python", "train.num_steps=12", "cluster.python=/no/such/python")
    assert local.run("submit", *words, "cluster=local", "--wait", check=False).returncode == 1
    (run,) = local.json("status", "python")["runs"]
    why = local.json("why", run["run_id"])
    assert "the node has no file /no/such/python" in why["verdict"], why
    assert "cluster.python" in why["advice"][0]
    (row,) = local.json("report", "python", "--plain")["runs"]
    assert row["hint"].startswith("the node has no file /no/such/python: is the file on a disk")
    page = (local.folder / "runs" / "python" / "report.html").read_text()
    assert "the node has no file /no/such/python" in page


@pytest.mark.parametrize(
    "verb", ["train", *(pytest.param(verb, marks=pytest.mark.long) for verb in ("find-lr", "verify resume"))]
)
def test_a_site_that_does_not_exist_is_refused(local: LocalDriver, verb: str) -> None:
    done = local.run(*verb.split(), "experiment=digits", "train.num_steps=20", "cluster=doesnotexist", check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "cluster=doesnotexist: no such choice." in done.stderr
    assert "Valid: local, slurm; in folders: " in done.stderr


@pytest.mark.parametrize(
    "verb", ["train", *(pytest.param(verb, marks=pytest.mark.long) for verb in ("find-lr", "verify resume"))]
)
def test_what_runs_here_is_not_handed_to_slurm(local: LocalDriver, verb: str) -> None:
    done = local.run(*verb.split(), "experiment=digits", "train.num_steps=20", "cluster.executor=slurm", check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"cluster.executor=slurm: {verb} runs on this machine." in done.stderr
    assert "submit" in done.stderr
