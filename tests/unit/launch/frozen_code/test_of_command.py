"""What `plan` and `submit` say of a command: what of it is frozen, and what a run reads as it is when it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_trainer.launch.frozen_code.snapshot import commands_of, frozen_of_command, read_code
from tests.unit.launch.frozen_code.projects import make_checkout, write_files
from tests.unit.record.builders import make_spec


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git checkout with a package, scripts, and data that git does not have; the current folder."""
    folder = make_checkout(tmp_path / "project")
    write_files(folder, {"fit.py": "import my_lab.net\n", "my_lab/run.py": "", "job.sh": "true\n"})
    write_files(folder, {".gitignore": "data\n", "data/train.csv": "1\n", "data/eval.csv": "2\n"})
    monkeypatch.chdir(folder)
    return folder


def _said(command: str, *words: str) -> list[str]:
    specs = [make_spec("cluster=local", *words, train__command=command)]
    return list(frozen_of_command(specs, read_code(specs, Path("/nowhere"))))


def test_a_script_is_frozen_and_data_are_not() -> None:
    assert _said("python fit.py --lr 0.1") == ["train.command: fit.py is frozen."]
    assert _said("python fit.py --data=data/train.csv data --out {run.dir}/out --here .") == [
        "train.command: fit.py is frozen. Not frozen, but read as it is when a run starts: data/train.csv, data."
    ]
    assert _said("python fit.py data/none.csv --name= --resume={run.dir}") == ["train.command: fit.py is frozen."]


def test_a_command_is_relative_to_the_folder_that_its_spec_names() -> None:
    trains = [
        {"command": "a.py", "command_from": "/here", "command_dir": "/there"},
        {"command": "b.py", "command_dir": "/there"},
        {"command": "c.py"},
        {"command": None},
    ]
    found = commands_of({"train": train} for train in trains)
    assert found == {("a.py", "/here"), ("b.py", "/there"), ("c.py", ".")}, "older specs name none, or one alone"


def test_a_module_is_frozen_with_its_package() -> None:
    assert _said("python -m my_lab.run") == ["train.command: -m my_lab.run is frozen."]
    assert _said("python -m nowhere.run") == [
        "train.command: nothing of it is frozen. Not frozen, but read as it is when a run starts: -m nowhere.run."
    ]
    assert _said("python -m json.tool data/train.csv") == [
        "train.command: nothing of it is frozen. Not frozen, but read as it is when a run starts: data/train.csv."
    ], "the standard library is no code of theirs"


def test_words_of_a_shell_are_looked_at() -> None:
    assert _said("bash job.sh data/train.csv") == [
        "train.command: job.sh is frozen. Not frozen, but read as it is when a run starts: data/train.csv."
    ]
    (said,) = _said("sh -c 'python fit.py data/eval.csv'")
    assert "fit.py is frozen" in said
    assert "data/eval.csv" in said


def test_a_run_in_a_folder_of_its_own_needs_whole_paths(project: Path) -> None:
    (said,) = _said("python fit.py data/train.csv", "train.command_dir=run", f"train.command_from={project}")
    assert said.endswith("Runs start in folders of their own: write the whole path of data/train.csv.")
    (said,) = _said(f"python fit.py {project}/data", "train.command_dir=run", f"train.command_from={project}")
    assert said.endswith(f"read as it is when a run starts: {project}/data.")


def test_of_many_files_the_first_eight_are_named(project: Path) -> None:
    write_files(project, {f"data/{number}": "" for number in range(10)})
    (said,) = _said("python fit.py " + " ".join(f"data/{number}" for number in range(10)))
    assert said.endswith("data/6, data/7 and 2 more.")
    (said,) = _said("python fit.py " + " ".join(f"data/{number}" for number in range(8)))
    assert said.endswith("data/6, data/7.")


def test_nothing_is_said_where_nothing_is_frozen_or_no_command_stands() -> None:
    assert _said("python fit.py", "snapshot=off") == []
    specs = [make_spec("cluster=local")]
    assert list(frozen_of_command(specs, read_code(specs, Path("/nowhere")))) == []
