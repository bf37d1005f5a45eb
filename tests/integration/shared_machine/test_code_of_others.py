"""A folder that a team may write: what a colleague puts there never runs as the person who works in it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_trainer.runtime.start import START
from tests.integration.shared_machine.shared_folder import COLLEAGUE, TRAP, SharedFolder, make_shared_folder
from tests.unit.launch.frozen_code.projects import git

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can play two users")
TINY = (
    "experiment=digits", "model=mlp", "train.num_steps=4", "schedule.warmup_steps=0", "train.eval_every_steps=0",
    "cluster=local",
)  # fmt: skip


@pytest.fixture
def shared(tmp_path: Path) -> SharedFolder:
    return make_shared_folder(tmp_path)


@pytest.mark.dist
@pytest.mark.parametrize("how", ["frozen", pytest.param("live", marks=pytest.mark.long)])
def test_a_run_imports_nothing_of_the_folder_that_one_submits_from(shared: SharedFolder, how: str) -> None:
    shared.set_traps()
    words = (*TINY, "sweep_name=s", *(("snapshot=off",) if how == "live" else ()))
    shared.run("submit", *words, "--wait")
    if how == "live":
        shared.run("plan", *words, "seed=1", "--memory")
    assert shared.sprung == ""


def _start(shared: SharedFolder, module: str, *words: str, release: str = "", **environ: str) -> str:
    """What a module prints that starts as jobs and local queues start it; `release`: as an older Python would."""
    code = f"import sys; sys.version_info = {release}; {START}" if release else START
    # Where lines are counted, a file in site-packages imports coverage before a line of ours can sort the path.
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "COVERAGE"))}
    done = subprocess.run(
        [sys.executable, "-u", "-c", code, module, *words], cwd=shared.folder, env={**kept, **environ},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert shared.sprung == ""
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


SHOW = "import json, pathlib, sys; print('path', sys.path); import own; print('own module found')"


@pytest.mark.long
@pytest.mark.parametrize("release", ["", "(3, 10)"])
@pytest.mark.parametrize("python_path", ["", ":/nowhere", "."])
def test_the_current_folder_comes_last_on_every_python(shared: SharedFolder, release: str, python_path: str) -> None:
    shared.set_traps()
    (shared.folder / "own.py").touch()
    (shared.folder / "show.py").write_text(SHOW)
    environ = {"PYTHONPATH": python_path} if python_path else {}
    said = _start(shared, "show", release=release, **environ)
    assert f"'{shared.folder}']" in said, "the last entry"
    assert said.endswith("own module found\n")
    if python_path == ".":  # it tries hardest to bring the folder to the front
        assert "--sweep-dir" in _start(shared, "hpc_trainer.worker", "--help", release=release, **environ)
        assert "SWEEP_FOLDER" in _start(shared, "hpc_trainer", "top-up", "--help", release=release, **environ)


@pytest.mark.long
def test_a_folder_of_pythonpath_that_others_may_write_comes_late_and_is_named(
    shared: SharedFolder, tmp_path: Path
) -> None:
    shared.set_traps()
    for name in ("mine", "work"):
        (tmp_path / name).mkdir(mode=0o755)
    (tmp_path / "work" / "show.py").write_text(SHOW)
    (shared.folder / "own.py").touch()
    at_work = SharedFolder(tmp_path / "work", shared.record, tmp_path)
    said = _start(at_work, "show", PYTHONPATH=f"{tmp_path}/mine:{shared.folder}")
    assert f"others may write {shared.folder}: searched after the installed packages." in said
    assert f"'{shared.folder}', '{tmp_path}/work']" in said


OWN = """
from hpc_trainer.config.schema.data import DigitsConfig
from hpc_trainer.datasets import digits

def build(split):
    print("built by", __file__)
    return digits.build(DigitsConfig(), split)
"""
OWN_DATA = ("data=custom", "data._target_=my_data.build", "--trust", "my_data")


@pytest.mark.long
@pytest.mark.parametrize("mode", ["git", "copy"])
def test_a_trap_beside_ones_own_code_is_not_frozen(shared: SharedFolder, mode: str) -> None:
    (shared.folder / "my_data.py").write_text(OWN)
    if mode == "git":
        git(shared.folder, "init", "-q")
    shared.colleague_writes("numpy.py", TRAP.format(record=str(shared.record)))
    words = (*TINY, *OWN_DATA, f"snapshot={mode}", "sweep_name=s")
    for verb in ("plan", "submit"):
        said = shared.run(verb, *words, code=1, is_forked=True)
        assert f"{shared.folder}/numpy.py belongs to user {COLLEAGUE}" in said
        assert "run as you in place of the module numpy" in said
        assert "'snapshot.exclude=[numpy.py]'" in said
    assert not (shared.home / "runs").exists()
    shared.run("submit", *words, "snapshot.exclude=[numpy.py]", "--wait")
    assert shared.sprung == ""
    (log,) = (shared.home / "runs").glob("s/*/logs/attempt-000.rank-0.log")
    (archive,) = (shared.home / "runs" / "s" / "code").glob("*.zip")
    assert re.search(rf"built by /\S+/hpc_trainer-{os.getuid()}/{archive.stem}/\S+/my_data\.py\n", log.read_text())


@pytest.mark.long
def test_train_finds_ones_own_module_in_a_shared_folder(shared: SharedFolder) -> None:
    (shared.folder / "my_data.py").write_text(OWN)
    shared.run("train", *TINY, *OWN_DATA, "sweep_name=s", is_forked=True)
    shared.set_traps()
    shared.run("train", *TINY, *OWN_DATA, "sweep_name=live", "snapshot=off")
    (log,) = (shared.home / "runs").glob("live/*/logs/attempt-000.rank-0.log")
    assert f"built by {shared.folder}/my_data.py" in log.read_text()
    assert shared.sprung == ""


@pytest.mark.long
def test_a_colleagues_part_of_the_package_is_said(shared: SharedFolder) -> None:
    (shared.folder / "my_data.py").write_text(OWN)
    shared.colleague_writes("helpers.py", "")
    shared.colleague_writes("parts/numpy.py", "")
    note = f"2 of the frozen files in {shared.folder} belong to user {COLLEAGUE} and will run as you: helpers.py"
    words = (*TINY, *OWN_DATA, "sweep_name=s")
    assert note in shared.run("plan", *words, is_forked=True)
    assert note in json.loads(shared.run("plan", *words, "--json", is_forked=True))["notes"][0]


def test_code_that_everybody_may_write_is_refused(shared: SharedFolder) -> None:
    (shared.folder / "my_data.py").write_text(OWN)
    (shared.folder / "my_data.py").chmod(0o666)
    said = shared.run("plan", *TINY, *OWN_DATA, code=1, is_forked=True)
    assert f"{shared.folder}/my_data.py would be frozen and run as you, and everybody may write it" in said
    assert f"chmod -R o-w {shared.folder}" in said


@pytest.mark.long
def test_plan_and_submit_list_the_secrets_that_stay_behind(shared: SharedFolder) -> None:
    (shared.folder / "my_data").mkdir()
    (shared.folder / "my_data" / "__init__.py").write_text(OWN)
    (shared.folder / "my_data" / "API_KEY.txt").touch()
    words = (*TINY, *OWN_DATA, "sweep_name=s")
    secret = f"{shared.folder}/my_data/API_KEY.txt"
    line = f"Not in the frozen code (secrets by their names, links to code outside): {secret}"
    assert line in shared.run("plan", *words, is_forked=True)
    planned = json.loads(shared.run("plan", *words, "--json", is_forked=True))
    assert planned["left_out"] == [secret]
    assert line in shared.run("submit", *words, "--wait", is_forked=True)
