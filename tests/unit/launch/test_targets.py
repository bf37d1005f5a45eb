"""A name of a person's own code that leads nowhere: found in files before a submit, with nothing imported."""

from __future__ import annotations

import dataclasses
import functools
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from hpc_trainer.config.targets import TO_BE_FOUND
from hpc_trainer.errors import ConfigError
from hpc_trainer.launch.freeze import freeze_grid
from hpc_trainer.launch.frozen_code.snapshot import read_code
from hpc_trainer.launch.grids import plan_grid, submit_grid
from hpc_trainer.launch.targets import Unfound, find_nowhere
from tests.unit.launch.frozen_code.projects import git, make_checkout, write_files
from tests.unit.record.builders import make_spec

NET = "class Net: ...\n\n\ndef build():\n    inner = 1\n    return inner\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with packages, in which one stands. Importing any of it fails the test."""
    folder = make_checkout(tmp_path / "project")
    bomb = "raise SystemExit('was imported')\n"
    write_files(
        folder,
        {
            "my_lab/__init__.py": bomb, "my_lab/net.py": bomb + NET, "my_lab/deep/__init__.py": bomb,
            "my_lab/deep/more.py": bomb + "from x import y as Renamed\nif True:\n    Chosen = [Item for Item in ()]\n",
            "my_lab/star.py": "from my_lab.net import *\n", "my_lab/lazy.py": "def __getattr__(name): ...\n",
            "my_lab/made.py": "def _make():\n    global Later\n    Later = 1\n", "single.py": bomb + NET,
            "my_lab/newer.py": "this is no Python of today\n", f"my_lab/compiled{EXTENSION_SUFFIXES[0]}": "",
        },
    )  # fmt: skip
    git(folder, "add", "-A", "-f")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder), *(entry for entry in sys.path if entry)])
    return folder


_composed = functools.cache(make_spec)


def _found(tmp_path: Path, target: str, *words: str) -> Unfound:
    """As of one run whose model is `target`."""
    spec = _composed("cluster=local", *words)
    config = {**spec.config, "model": {**spec.config["model"], "_target_": target}}
    spec = dataclasses.replace(spec, config=config)
    return find_nowhere([spec], read_code([spec], tmp_path / "runs"))


THERE = (
    "my_lab.net.Net", "my_lab.net.build", "my_lab.deep.more.Renamed", "my_lab.deep.more.Chosen", "single.Net",
    "my_lab.star.Anything", "my_lab.lazy.Anything", "my_lab.made.Later", "my_lab.newer.Anything", "my_lab.net",
    "my_lab.compiled.Net", "torch.nn.Linear", "hpc_trainer.models.mlp.Mlp", "json.decoder.JSONDecoder",
)  # fmt: skip
MODES = ("git", "copy", "off")


@pytest.mark.parametrize(("target", "mode"), [(target, MODES[number % 3]) for number, target in enumerate(THERE)])
def test_what_is_there_or_may_come_to_be_is_no_problem(project: Path, tmp_path: Path, target: str, mode: str) -> None:
    assert _found(tmp_path, target, f"snapshot={mode}") == Unfound()


@pytest.mark.parametrize("mode", ["git", "copy"])
def test_what_is_installed_in_an_environment_of_the_project_is_found(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """It lies below what is frozen, and is no part of it."""
    packages = project / ".venv" / "lib" / "python3" / "site-packages"
    write_files(packages, {"installed/net.py": "class Net: ...\n", "installed/__init__.py": ""})
    monkeypatch.setattr(sys, "path", [*sys.path, str(packages)])
    assert _found(tmp_path, "installed.net.Net", f"snapshot={mode}") == Unfound()


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("my_lab.net.Nett", "{project}/my_lab/net.py defines no Nett. Did you mean Net?"),
        ("my_lab.net.inner", "{project}/my_lab/net.py defines no inner."),
        ("single.Nett", "{project}/single.py defines no Nett. Did you mean Net?"),
        ("my_lab.nets.Net", "{project}/my_lab holds no module nets. Did you mean net?"),
        ("my_lab.deep.less.Net", "{project}/my_lab/deep holds no module less."),
        ("single.net.Net", "single is the module {project}/single.py, and no package that holds net."),
    ],
)
@pytest.mark.parametrize("mode", ["git", "copy", "off"])
def test_a_name_that_leads_nowhere_names_where_it_looked_and_the_nearest(
    project: Path, tmp_path: Path, target: str, why: str, mode: str
) -> None:
    told = f"model._target_={target} was not found: {why.format(project=project)}"
    assert _found(tmp_path, target, f"snapshot={mode}") == Unfound(problems=[told])


def test_a_package_that_is_nowhere_names_the_folders_and_the_three_ways(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not syspath_prepend: it would put back, after the fixture is undone, the path that the fixture has set.
    monkeypatch.setattr(sys, "path", [str(tmp_path / "no-such-folder"), *sys.path])
    (told,) = _found(tmp_path, "nowhere_at_all.Net").problems
    assert told.startswith(
        f"model._target_=nowhere_at_all.Net was not found: there is no package or module nowhere_at_all in {project}, "
    )
    assert next(entry for entry in sys.path if "site-packages" in entry) in told
    assert "no-such-folder" not in told
    assert told.endswith(TO_BE_FOUND)


def test_on_slurm_the_way_around_is_named_and_works(project: Path, tmp_path: Path) -> None:
    way = f"cluster.python={sys.executable}"
    (told,) = _found(tmp_path, "nowhere_at_all.Net", "cluster.executor=slurm").problems
    assert told.endswith(f"If this Python has other packages on the nodes, name it: {way}")
    assert _found(tmp_path, "nowhere_at_all.Net", "cluster.executor=slurm", way).problems == []


def test_a_package_in_a_folder_above_is_pointed_to(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "notebooks").mkdir()
    monkeypatch.chdir(project / "notebooks")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(project)])
    (told,) = _found(tmp_path, "my_lab.net.Net").problems
    assert f"It is in {project}: submit from there." in told


@pytest.mark.parametrize(
    "word", ["cluster.python=/their/python", "cluster.setup=[module load lab]", "+cluster.env.PYTHONPATH=/their/code"]
)
def test_where_the_runs_may_have_another_python_it_is_a_note(project: Path, tmp_path: Path, word: str) -> None:
    found = _found(tmp_path, "nowhere_at_all.Net", word)
    assert found.problems == []
    assert found.notes[0].startswith("here model._target_=nowhere_at_all.Net was not found: there is no package")
    assert found.notes[0].endswith("The runs may find it: cluster=local sets another Python for them.")
    # What is frozen is what they import, with any Python.
    assert _found(tmp_path, "my_lab.net.Nett", word).problems


def test_a_module_that_git_ignores_is_said_to_be_there_and_not_frozen(project: Path, tmp_path: Path) -> None:
    write_files(project, {".gitignore": "own_*\n", "my_lab/own_net.py": NET})
    (told,) = _found(tmp_path, "my_lab.own_net.Net").problems
    assert f"{project}/my_lab/own_net.py is not frozen: git ignores it, or snapshot.exclude names it." in told
    assert _found(tmp_path, "my_lab.own_net.Net", "snapshot=off") == Unfound()


def test_each_name_is_looked_up_and_told_once(project: Path) -> None:
    words = ["cluster=local", "model=custom", "model._target_=my_lab.net.Nett", "seed=1,2,3"]
    grid = freeze_grid([*words, "paths.runs_dir=../runs"], trust=["my_lab"])
    plan = plan_grid(grid)
    assert len(plan.problems) == 1
    with pytest.raises(ConfigError, match=r"defines no Nett\. Did you mean Net\?"):
        submit_grid(grid)
    assert not grid.sweep.folder.exists(), "nothing was written"
