"""The project file: found upward, told or refused by who may have written it, and no part of what a run is."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hpc_trainer.config.compose import own_files as project_module
from hpc_trainer.config.compose.own_files import Project, own_defaults, read_project
from hpc_trainer.errors import ConfigError, UntrustedFileError
from hpc_trainer.launch.freeze import freeze_grid

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
ANOTHER_USER = 54321
TOML = '[project]\nname = "mine"\n\n[tool.hpc_trainer]\nconfig_dir = ["conf"]\ntrust = ["my_lab"]\nruns_dir = "runs"\n'
YAML = "config_dir: [conf]\ntrust: [my_lab]\nruns_dir: runs\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project: the root of a checkout, with a folder of configurations; one stands in a folder below it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "own"))
    monkeypatch.delenv("HPC_TRAINER_RUNS", raising=False)
    root = tmp_path / "project"
    (root / "conf" / "experiment").mkdir(parents=True)
    (root / ".git").mkdir()
    (root / "conf" / "experiment" / "rings.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /model: custom\n"
        "experiment_name: rings\nmodel:\n  _target_: my_lab.net.Net\n"
    )
    (root / "notebooks" / "deep").mkdir(parents=True)
    monkeypatch.chdir(root / "notebooks" / "deep")
    return root


@pytest.mark.parametrize(("name", "text"), [("pyproject.toml", TOML), ("hpc_trainer.yaml", YAML)])
def test_it_is_found_from_a_folder_below(folder: Path, name: str, text: str) -> None:
    if name == "pyproject.toml" and sys.version_info < (3, 11):
        pytest.importorskip("tomli")
    (folder / name).write_text(text)
    found = read_project()
    assert found == Project(
        path=folder / name, config_dirs=(folder / "conf",), trust=("my_lab",), runs_dir=folder / "runs"
    )
    assert found.notes == (f"the project file {folder / name} adds --config-dir {folder / 'conf'} --trust my_lab.",)


def test_without_one_nothing_is_said(folder: Path) -> None:
    (folder / "pyproject.toml").write_text('[project]\nname = "x"\ndependencies = ["hpc_trainer"]\n[tool]\nother = 1\n')
    assert read_project() == Project()
    assert read_project().notes == ()


def test_the_search_ends_at_the_root_of_git_and_at_the_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    above = folder.parent / "hpc_trainer.yaml"
    above.write_text("trust: [from_above]\n")
    assert read_project() == Project()
    (folder / ".git").rmdir()
    assert read_project().path == above
    monkeypatch.setenv("HOME", str(folder))
    assert read_project() == Project()


def test_the_nearest_file_counts_alone(folder: Path) -> None:
    (folder / "hpc_trainer.yaml").write_text(YAML)
    nearer = folder / "notebooks" / "hpc_trainer.yaml"
    nearer.write_text("trust: [other]\n")
    assert read_project() == Project(path=nearer, trust=("other",))


def test_two_files_side_by_side_are_refused(folder: Path) -> None:
    pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
    (folder / "hpc_trainer.yaml").write_text(YAML)
    (folder / "pyproject.toml").write_text(TOML)
    with pytest.raises(ConfigError, match=r"hpc_trainer\.yaml and .*pyproject\.toml are both project files"):
        read_project()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("trusts: [a]", r"trusts: no such key\. Did you mean trust\? Valid: config_dir, trust, runs_dir"),
        ("optim.lr: 1", r"optim\.lr: no such key"),
        ("trust: my_lab", r"trust='my_lab' must be a list of texts"),
        ("trust: [1]", r"trust=\[1\] must be a list of texts"),
        ("trust: ['my lab']", r"'my lab' must be the name of a package"),
        ("runs_dir: [a]", r"runs_dir=\['a'\] must be a folder"),
        ("config_dir: [nowhere]", r"config_dir names .*/project/nowhere, and there is no such folder"),
        ("- a", r"must map keys to values"),
        ("a: [1", r"cannot be read as YAML"),
        ("a: &x\n  b: *y", r"cannot be read as YAML"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(folder: Path, text: str, told: str) -> None:
    (folder / "hpc_trainer.yaml").write_text(text)
    with pytest.raises(ConfigError, match=told) as caught:
        read_project()
    assert str(caught.value).startswith(str(folder / "hpc_trainer.yaml"))


def test_a_broken_table_of_toml_is_told(folder: Path) -> None:
    pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
    (folder / "pyproject.toml").write_text("[tool.hpc_trainer]\ntrust = [\n")
    with pytest.raises(ConfigError, match=r"pyproject\.toml cannot be read as TOML"):
        read_project()


def test_a_python_without_a_reader_of_toml_says_what_to_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(project_module, "_toml_reader", lambda: None)
    (folder / "pyproject.toml").write_text('[project]\ndependencies = ["hpc_trainer"]\n')
    assert read_project() == Project(), "a file without our table needs no reader"
    (folder / "pyproject.toml").write_text(TOML)
    with pytest.raises(
        ConfigError, match=r"Put the same keys into .*/project/hpc_trainer\.yaml, or: pip install tomli"
    ):
        read_project()


# --- whose it is ---


@needs_root
@pytest.mark.parametrize("name", ["pyproject.toml", "hpc_trainer.yaml"])
def test_a_file_of_another_user_is_not_used_and_that_is_said(folder: Path, name: str) -> None:
    pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
    (folder / name).write_text(TOML if name == "pyproject.toml" else YAML)
    os.chown(folder / name, ANOTHER_USER, -1)
    found = read_project()
    assert (found.config_dirs, found.trust, found.runs_dir) == ((), (), None)
    assert found.notes[0].startswith(f"{folder / name} is not used: it belongs to user {ANOTHER_USER}")


@needs_root
def test_a_link_is_judged_by_its_own_owner_and_by_what_it_leads_to(folder: Path) -> None:
    mine = folder.parent / "mine.yaml"
    mine.write_text(YAML)
    link = folder / "hpc_trainer.yaml"
    link.symlink_to(mine)
    (folder.parent / "conf").mkdir()
    assert read_project().trust == ("my_lab",)
    os.lchown(link, ANOTHER_USER, -1)
    assert "belongs to user" in str(read_project().unused)
    os.lchown(link, 0, -1)
    os.chown(mine, ANOTHER_USER, -1)
    assert "belongs to user" in str(read_project().unused)


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o602])
def test_a_file_that_others_may_write_is_not_used(folder: Path, mode: int) -> None:
    path = folder / "hpc_trainer.yaml"
    path.write_text(YAML)
    path.chmod(mode)
    assert f"others can write to it, but it decides which code runs as you. Check it, then: chmod go-w {path}" in str(
        read_project().unused
    )
    path.chmod(0o644)
    assert read_project().trust == ("my_lab",)


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_file_in_a_folder_that_everybody_may_write_is_not_used(folder: Path, mode: int) -> None:
    (folder / "hpc_trainer.yaml").write_text(YAML)
    folder.chmod(mode)
    assert f"everyone can write to its folder {folder}" in str(read_project().unused)
    folder.chmod(0o2775)
    assert read_project().trust == ("my_lab",)


@needs_root
def test_a_folder_that_a_colleague_put_there_must_be_named_in_full(folder: Path) -> None:
    path = folder / "hpc_trainer.yaml"
    path.write_text("config_dir: [conf]\n")
    os.chown(folder / "conf", ANOTHER_USER, -1)
    with pytest.raises(UntrustedFileError, match=f"belongs to user {ANOTHER_USER}.*write its full path: {folder}/conf"):
        read_project()
    path.write_text(f"config_dir: [{folder}/conf]\n")
    assert read_project().config_dirs == (folder / "conf",)


# --- what it is for ---


def test_a_grid_needs_neither_option_any_more(folder: Path) -> None:
    words = ["experiment=rings", "cluster=local"]
    with pytest.raises(ConfigError, match="rings: no such choice"):
        freeze_grid(words)
    by_options = freeze_grid(words, config_dirs=[folder / "conf"], trust=["my_lab"])
    (folder / "hpc_trainer.yaml").write_text(YAML)
    grid = freeze_grid(words)
    assert grid.sweep.folder == folder / "runs" / "rings"
    assert grid.specs[0].config["trust"] == ["my_lab"]
    assert grid.notes == read_project().notes
    assert grid.specs[0].run_id == by_options.specs[0].run_id, "the file is no part of what a run is"
    assert by_options.notes == ()


def test_options_come_first_and_add_up(folder: Path, tmp_path: Path) -> None:
    (folder / "hpc_trainer.yaml").write_text(YAML)
    mine = tmp_path / "mine" / "experiment"
    mine.mkdir(parents=True)
    (mine / "rings.yaml").write_text("# @package _global_\nexperiment_name: mine\nseed: 7\n")
    grid = freeze_grid(["experiment=rings", "cluster=local"], config_dirs=[mine.parent], trust=["more", "my_lab"])
    assert (grid.specs[0].config["seed"], grid.specs[0].config["trust"]) == (7, ["more", "my_lab"])


def test_whose_folder_of_runs_counts(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own" / "hpc_trainer" / "config.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("paths.runs_dir: /scratch/me\n")
    words = ["experiment=digits", "cluster=local"]
    assert freeze_grid(words).sweep.folder == Path("/scratch/me/digits")
    (folder / "hpc_trainer.yaml").write_text(YAML)
    assert own_defaults() == {"paths.runs_dir": str(folder / "runs")}
    assert freeze_grid(words).sweep.folder == folder / "runs" / "digits"
    monkeypatch.setenv("HPC_TRAINER_RUNS", "/env")
    assert freeze_grid(words).sweep.folder == Path("/env/digits")
    assert freeze_grid([*words, "paths.runs_dir=/word"]).sweep.folder == Path("/word/digits")
