"""$HPC_TRAINER_CONFIG_DIR: folders of configurations that a site names once for all its users."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_trainer.cli.main import main
from hpc_trainer.config.compose.changes import with_changes, with_data
from hpc_trainer.config.compose.own_files import SITE_VARIABLE, config_dirs_of
from hpc_trainer.doctor.machine import machine_findings
from hpc_trainer.errors import ConfigError, UntrustedFileError
from hpc_trainer.launch.freeze import freeze_grid

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
ANOTHER_USER = 54321
WORDS = ("experiment=digits", "cluster=local")


def _profile(folder: Path, name: str, minutes: int) -> Path:
    """Write a hardware profile into a folder of configurations."""
    path = folder / "hardware" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# A node of the lab.\nname: {name}\ntime_limit_min: {minutes}\n")
    return path


def _minutes(name: str, *given: Path) -> int:
    """Return the time limit that a frozen run has with this profile."""
    (spec,) = freeze_grid([*WORDS, f"hardware={name}"], config_dirs=given).specs
    return int(spec.config["hardware"]["time_limit_min"])


def _error_of_another_user(folder: Path, call: Callable[[], object]) -> str:
    """Return the error of a call that another user makes, who may enter the folders above `folder`."""
    for above in folder.parents:
        if above.stat().st_uid == os.getuid() and above != Path("/"):
            above.chmod(above.stat().st_mode | 0o055)
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setgid(ANOTHER_USER)
            os.setuid(ANOTHER_USER)
            call()
        except ConfigError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        text = said.read()
    os.waitpid(child, 0)
    return text


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that the variable names, with a profile; the current folder is an empty project."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "own"))
    folder = tmp_path / "site" / "conf"
    _profile(folder, "lab_x1", 11)
    monkeypatch.setenv(SITE_VARIABLE, str(folder))
    (tmp_path / "project" / ".git").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "project")
    return folder


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*argv: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hpc-trainer", *argv])
        code = 0
        try:
            main()
        except SystemExit as error:
            code = int(error.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


# --- what it is for ---


def test_its_choices_need_no_option_and_are_listed(site: Path, cli: Callable[..., tuple[int, str, str]]) -> None:
    assert _minutes("lab_x1") == 11
    (profile,) = json.loads(cli("hardware", "list", "lab_x1", "--json")[1])["profiles"]
    assert profile["file"] == str(site / "hardware" / "lab_x1.yaml")
    assert "A node of the lab." in cli("hardware", "show", "lab_x1")[1]


def test_options_stand_before_the_project_before_the_site_before_the_shipped(site: Path, tmp_path: Path) -> None:
    assert _minutes("cpu_x1") == 60, "shipped"
    _profile(tmp_path / "project" / "conf", "lab_x1", 12)
    Path("hpc_trainer.yaml").write_text("config_dir: [conf]\n")
    assert _minutes("lab_x1") == 12
    given = tmp_path / "given"
    _profile(given, "lab_x1", 13)
    assert _minutes("lab_x1", given) == 13
    assert config_dirs_of([given]) == [given, tmp_path / "project" / "conf", site]


def test_of_several_folders_the_first_counts_and_empty_items_do_not(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = tmp_path / "group"
    _profile(group, "lab_x1", 14)
    _profile(group, "group_x1", 15)
    monkeypatch.setenv(SITE_VARIABLE, f":{site}::{group}/:")
    assert (_minutes("lab_x1"), _minutes("group_x1")) == (11, 15)
    monkeypatch.setenv(SITE_VARIABLE, f"{group}:{site}")
    assert _minutes("lab_x1") == 14
    for empty in ("", ":", " "):
        monkeypatch.setenv(SITE_VARIABLE, empty)
        assert config_dirs_of() == []


def test_a_frozen_run_does_not_depend_on_it(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (spec,) = freeze_grid([*WORDS, "hardware=lab_x1"]).specs
    assert str(site) not in json.dumps(spec.config)
    monkeypatch.setenv(SITE_VARIABLE, "/no/such/folder")
    assert with_changes(spec.typed(), ["hardware.num_nodes=2"]).hardware.time_limit_min == 11


def test_eval_finds_data_of_the_site_and_of_the_project(site: Path, tmp_path: Path) -> None:
    (spec,) = freeze_grid(WORDS).specs
    project = tmp_path / "project" / "conf"
    for folder, name in ((site, "lab_digits"), (project, "my_digits")):
        (folder / "data").mkdir(parents=True)
        (folder / "data" / f"{name}.yaml").write_text("defaults:\n  - digits@_here_\n  - _self_\nnum_eval: 99\n")
    Path("hpc_trainer.yaml").write_text("config_dir: [conf]\n")
    for name in ("lab_digits", "my_digits"):
        changed, given = with_data(spec.typed(), [f"data={name}"])
        assert "num_eval" in given
        assert getattr(changed.data, "num_eval", None) == 99


# --- what it may name ---


@pytest.mark.parametrize(
    ("named", "rule"),
    [
        ("{site}/nowhere", r"names {site}/nowhere, which cannot be read as a folder: No such file or directory\. "),
        ("{site}/hardware/lab_x1.yaml", r"lab_x1\.yaml, which cannot be read as a folder: Not a directory\. "),
        ("{site}:conf", r"names conf, which would be another folder wherever a command is given\. Write full paths"),
        ("~/conf", r"names ~/conf, .* Write full paths, separated by colons\."),
        (f"/{'x' * 300}", r"which cannot be read as a folder: File name too long\. "),
    ],
)
def test_what_is_no_folder_is_refused_with_its_name(
    site: Path, monkeypatch: pytest.MonkeyPatch, named: str, rule: str
) -> None:
    monkeypatch.setenv(SITE_VARIABLE, named.replace("{site}", str(site)))
    with pytest.raises(ConfigError, match=rule.replace("{site}", re.escape(str(site)))):
        _minutes("cpu_x1")


def test_verbs_that_read_runs_do_without_it(
    site: Path, monkeypatch: pytest.MonkeyPatch, cli: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.setenv(SITE_VARIABLE, str(site / "nowhere"))
    for words in (("sweeps",), ("status",)):
        assert SITE_VARIABLE not in "".join(map(str, cli(*words)))
    code, _, err = cli("hardware", "list")
    assert (code, err.startswith(f"error: {SITE_VARIABLE} names {site}/nowhere")) == (2, True)


def test_a_choice_that_no_folder_has_is_told_with_the_sites_folder(site: Path) -> None:
    (site / "hardwares").mkdir()  # a group that does not exist
    (site / "hardware" / "lab_x1.yaml").rename(site / "hardwares" / "lab_x4.yaml")
    with pytest.raises(ConfigError) as caught:
        _minutes("lab_x4")
    assert str(caught.value).startswith("hardware=lab_x4: no such choice. Did you mean ")
    assert "pass the folder that has hardware/lab_x4.yaml with --config-dir. " in str(caught.value)
    assert str(caught.value).endswith(f"{SITE_VARIABLE}={site} has no hardware/lab_x4.yaml.")
    with pytest.raises(ConfigError, match=r"hardwares.*Did you mean hardware\?"):
        freeze_grid([*WORDS, "hardwares=lab_x4"])


def test_a_damaged_file_stops_those_who_choose_it_alone(
    site: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:  # fmt: skip
    (site / "hardware" / "bad.yaml").write_text("a: [\n")
    assert _minutes("lab_x1") == 11
    with pytest.raises(ConfigError, match=r"(?s)cannot be read as YAML.*site/conf/hardware/bad\.yaml"):
        _minutes("bad")
    code, out, err = cli("hardware", "list", "lab_x1")
    assert (code, "A node of the lab." in out) == (0, True)
    assert err.startswith(f"Note: {site}/hardware/bad.yaml cannot be read: ")
    assert err.count("\n") == 1
    (note,) = json.loads(cli("hardware", "list", "--json")[1])["notes"]
    assert f"Note: {note}\n" == err


def test_a_file_with_the_name_of_a_shipped_one_is_refused_where_it_is_chosen(site: Path) -> None:
    _profile(site, "cpu_x1", 77)
    assert _minutes("lab_x1") == 11
    with pytest.raises(ConfigError, match=r"two files have this name.* Rename the second: mv .*/site/conf/"):
        _minutes("cpu_x1")
    if os.getuid() == 0:  # a user of the site cannot rename its files
        for path in (site, *site.rglob("*")):
            path.chmod(0o755)
        assert _error_of_another_user(site, lambda: _minutes("cpu_x1")).endswith(
            "Ask user 0, who owns the second, to rename it."
        )


def test_a_name_that_two_own_folders_have_is_noted_where_it_is_chosen(site: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    first, second = _profile(own, "lab_x1", 22), site / "hardware" / "lab_x1.yaml"
    _profile(own, "other_x1", 5)

    def notes(*words: str) -> tuple[str, ...]:
        return freeze_grid([*WORDS, *words], config_dirs=[own]).notes

    told = f"hardware=lab_x1: {first} is read, and {second}, which has other values, is not. Rename one of them."
    assert notes("hardware=lab_x1") == notes("cluster=slurm", "hardware=first:other_x1,lab_x1") == (told,)
    assert _minutes("lab_x1", own) == 22
    assert notes("hardware=other_x1") == ()
    second.write_text(first.read_text())
    assert notes("hardware=lab_x1") == ()


# --- whose it is ---


def test_files_that_others_may_write_are_refused_and_the_doctor_tells(site: Path) -> None:
    (site / "hardware" / "lab_x1.yaml").chmod(0o666)
    rule = rf"^{SITE_VARIABLE}: {site}: {site}/hardware/lab_x1\.yaml has mode 666, so others can write to it"
    with pytest.raises(UntrustedFileError, match=rule):
        _minutes("cpu_x1")
    (finding,) = (each for each in machine_findings() if each.check == "settings")
    assert finding.what.startswith(f"{SITE_VARIABLE}: {site}: ")


@needs_root
def test_the_folder_may_be_anothers_and_its_files_theirs_alone(site: Path) -> None:
    for path in (site, *site.rglob("*")):
        os.chown(path, ANOTHER_USER, ANOTHER_USER)
    assert _minutes("lab_x1") == 11
    os.chown(site / "hardware" / "lab_x1.yaml", ANOTHER_USER + 1, -1)
    with pytest.raises(UntrustedFileError, match=f"lab_x1.yaml belongs to user {ANOTHER_USER + 1}, who is neither you"):
        _minutes("lab_x1")


@needs_root
def test_a_folder_that_is_closed_to_the_user_is_told(site: Path) -> None:
    site.chmod(0o700)
    said = _error_of_another_user(site, config_dirs_of)
    assert said.startswith(f"{SITE_VARIABLE} names {site}, which cannot be read as a folder: Permission denied. ")
