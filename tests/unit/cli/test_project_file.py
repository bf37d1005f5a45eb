"""The command line in a project with a project file: no options, and a note of what it adds or why it is not used."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.cli.main import main
from hpc_trainer.record.spec import append_specs
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("HPC_TRAINER_RUNS", raising=False)
    folder = tmp_path / "project"
    (folder / "conf" / "experiment").mkdir(parents=True)
    (folder / "conf" / "experiment" / "rings.yaml").write_text("# @package _global_\nexperiment_name: rings\n")
    (folder / "hpc_trainer.yaml").write_text("config_dir: [conf]\ntrust: [my_lab]\nruns_dir: here\n")
    (folder / "below").mkdir()
    monkeypatch.chdir(folder / "below")
    return folder


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    def run(*argv: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hpc-trainer", *argv])
        try:
            main()
            code: Any = 0
        except SystemExit as error:
            code = error.code
        out = capsys.readouterr()
        return code or 0, out.out, out.err

    return run


def test_plan_needs_no_options_and_says_what_the_file_adds(project: Path, cli: Cli) -> None:
    words = ("plan", "experiment=rings", "cluster=local")
    code, out, err = cli(*words)
    assert (code, err) == (0, "")
    note = f"the project file {project}/hpc_trainer.yaml adds --config-dir {project}/conf --trust my_lab."
    assert f"Note: {note}" in out
    assert f"Sweep rings in {project}/here/rings" in out
    assert note in json.loads(cli(*words, "--json")[1])["notes"]


def test_what_the_file_adds_is_said_again_only_if_it_trusts_more_than_before(project: Path, cli: Cli) -> None:
    words = ("plan", "experiment=rings", "cluster=local")
    (spec,) = make_specs(1)
    sweep = SweepOnDisk(project / "here" / "rings", [spec])
    assert "Note: the project file" in cli(*words)[1], "its run was submitted without"
    config = {**spec.config, "trust": ["my_lab"]}
    append_specs(sweep.paths, [dataclasses.replace(spec, config=config)])
    assert "Note: the project file" not in cli(*words)[1]
    assert "Note: the project file" in cli(*words, "sweep_name=another")[1]


def test_verbs_that_read_look_into_its_folder_of_runs(project: Path, cli: Cli) -> None:
    sweep = SweepOnDisk(project / "here" / "rings", make_specs(2))
    code, out, err = cli("sweeps", "--json")
    assert (code, err) == (0, "")
    assert [each["name"] for each in json.loads(out)] == [sweep.paths.name]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_a_file_of_somebody_else_is_told_and_not_used(project: Path, cli: Cli) -> None:
    path = project / "hpc_trainer.yaml"
    os.chown(path, 54321, -1)
    code, _, err = cli("status")
    assert code == 1
    assert err.startswith(f"Note: {path} is not used: it belongs to user 54321")
    SweepOnDisk(project / "below" / "runs" / "other", make_specs(1))
    assert "is not used" not in cli("status")[2], "what is asked for was found"
    code, out, _ = cli("plan", "experiment=digits", "cluster=local")
    assert code == 0
    assert f"Note: {path} is not used" in out
    assert f"in {project}/below/runs/digits" in out
    code, _, err = cli("plan", "experiment=rings", "cluster=local")
    assert code == 2
    assert "experiment=rings: no such choice" in err
    assert f"error: {path} is not used" in err, "why the choice is missing"


def test_a_wrong_key_ends_with_exit_code_2(project: Path, cli: Cli) -> None:
    (project / "hpc_trainer.yaml").write_text("config_dirs: [conf]\n")
    for words in (("plan", "experiment=digits"), ("status",)):
        code, _, err = cli(*words)
        assert (code, "Did you mean config_dir?" in err) == (2, True)
