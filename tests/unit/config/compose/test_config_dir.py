"""Folders of configurations of one's own: they add choices, and only where they were named."""

from __future__ import annotations

import grp
import os
import pwd
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_trainer.config.compose.fast_compose import GridComposer
from hpc_trainer.config.compose.own_files import conf_dir, read_user_config
from hpc_trainer.errors import ConfigError, UntrustedFileError
from tests.composed import expand


def _own_conf(folder: Path) -> Path:
    (folder / "experiment").mkdir(parents=True)
    (folder / "hardware").mkdir()
    (folder / "experiment" / "my_study.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /model: cnn\nexperiment_name: my_study\nseed: 41\n"
    )
    (folder / "hardware" / "own_node.yaml").write_text("name: own_node\ncpus_per_task: 3\n")
    return folder


@pytest.mark.parametrize("name", ["conf", "my conf, [v1]=x"])
def test_a_folder_of_ones_own_adds_choices(tmp_path: Path, name: str) -> None:
    with GridComposer([_own_conf(tmp_path / name)]) as composer:
        config = composer.compose(["experiment=my_study", "hardware=own_node", "optim=sgd"])
    assert (config.seed, config.model.name, config.hardware.cpus_per_task) == (41, "cnn", 3)


def test_a_wrong_choice_lists_those_of_ones_own_folder_too(tmp_path: Path) -> None:
    with GridComposer([_own_conf(tmp_path / "conf")]) as composer:
        with pytest.raises(ConfigError, match=r"Did you mean my_study\?.*digits.*my_study"):
            composer.compose(["experiment=my_studdy"])
        assert "own_node" in composer.choices("hardware")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("# @package _global_\ntrain:\n  nun_steps: 5\n",
         r"^experiment/mine\.yaml: train\.nun_steps: no such key in train\. Did you mean num_steps\? Valid: "),
        ("# @package _global_\ntrain:\n  num_steps: many\n",
         r"^experiment/mine\.yaml: train\.num_steps.* must be a whole number"),
        ("defaults:\n  - override /model: mlp\n",
         r"^experiment/mine\.yaml .*Begin the file with the line `# @package _global_`\."),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file_of_ones_own_is_said_with_its_name(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    with GridComposer([tmp_path]) as composer, pytest.raises(ConfigError, match=told):
        composer.compose(["experiment=mine"])


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config-dir .*nowhere: there is no such folder"):
        GridComposer([tmp_path / "nowhere"])


def test_one_composer_after_another_sees_only_its_own_folders(tmp_path: Path) -> None:
    with GridComposer([_own_conf(tmp_path / "conf")]) as composer:
        composer.compose(["experiment=my_study"])
    with GridComposer() as composer, pytest.raises(ConfigError, match="no such choice"):
        composer.compose(["experiment=my_study"])


@pytest.mark.usefixtures("fake_slurm")
def test_glob_sees_ones_own_folder(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    for name in ("study_a", "study_b"):
        (tmp_path / "experiment" / f"{name}.yaml").write_text(f"# @package _global_\nexperiment_name: {name}\n")
    with GridComposer([tmp_path]) as composer:
        points = expand(composer, ["experiment=glob(study_*)"])
    assert [point.axes["experiment"] for point in points] == ["study_a", "study_b"]


# --- whose it is ---

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
ANOTHER_USER, ANOTHER_GROUP = 54321, 43210


@pytest.mark.few(5)
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777, 0o2775, 0o757])
@pytest.mark.parametrize("name", ["", "experiment", "experiment/my_study.yaml"])
def test_what_others_may_write_is_refused(tmp_path: Path, name: str, mode: int) -> None:
    conf = _own_conf(tmp_path / "conf")
    (conf / name).chmod(mode if name != "experiment/my_study.yaml" else mode & 0o666)
    with pytest.raises(UntrustedFileError, match=rf"others can write to it.*chmod -R go-w {conf} .*cp -r {conf}"):
        GridComposer([conf])
    subprocess.run(["chmod", "-R", "go-w", conf], check=True)
    with GridComposer([conf]) as composer:
        assert composer.compose(["experiment=my_study"]).seed == 41


def test_a_folder_above_that_everybody_may_write_is_refused(tmp_path: Path) -> None:
    conf = _own_conf(tmp_path / "project" / "conf")
    (tmp_path / "project").chmod(0o777)
    with pytest.raises(UntrustedFileError, match=f"chmod o-w {tmp_path}/project"):
        GridComposer([conf])
    (tmp_path / "project").chmod(0o1777)
    GridComposer([conf])
    (tmp_path / "project").chmod(0o2775)  # a team's: whoever puts a folder of their own there fails by its owner
    GridComposer([conf])


@needs_root
def test_a_folder_of_the_sites_or_a_projects_owner_is_taken(tmp_path: Path) -> None:
    conf = _own_conf(tmp_path / "conf")
    for path in (conf, *conf.rglob("*")):
        os.chown(path, ANOTHER_USER, ANOTHER_GROUP)
    with GridComposer([conf]) as composer:
        assert composer.compose(["experiment=my_study"]).seed == 41


@needs_root
def test_what_a_third_user_put_there_is_refused(tmp_path: Path) -> None:
    conf = _own_conf(tmp_path / "conf")
    os.chown(conf / "hardware" / "own_node.yaml", ANOTHER_USER, -1)
    with pytest.raises(UntrustedFileError, match=rf"own_node.yaml belongs to user {ANOTHER_USER}, who is neither you"):
        GridComposer([conf])


@needs_root
def test_a_group_of_one_account_alone_is_that_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conf = _own_conf(tmp_path / "conf")
    for path in (conf, *conf.rglob("*")):
        os.chown(path, ANOTHER_USER, ANOTHER_USER)
        path.chmod(path.stat().st_mode | 0o020)
    members: list[str] = []
    account = SimpleNamespace(pw_name="alice", pw_gid=ANOTHER_USER)
    group = SimpleNamespace(gr_name="alice", gr_gid=ANOTHER_USER, gr_mem=members)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: account)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: group)
    GridComposer([conf])
    members.append("bob")
    with pytest.raises(UntrustedFileError, match="others can write to it"):
        GridComposer([conf])


def test_a_file_of_ones_own_defaults_that_others_may_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    own = tmp_path / "hpc_trainer" / "config.yaml"
    own.parent.mkdir()
    own.write_text("seed: 3\n")
    assert read_user_config() == {"seed": 3}
    own.chmod(0o664)
    with pytest.raises(UntrustedFileError, match=f"chmod go-w {own}"):
        read_user_config()


def test_what_lies_behind_a_link_is_looked_at_too(tmp_path: Path) -> None:
    there = tmp_path / "elsewhere"
    there.mkdir()
    (there / "theirs.yaml").write_text("name: theirs\n")
    own = _own_conf(tmp_path / "conf")
    (own / "cluster").symlink_to(there)
    (there / "back").symlink_to(own)
    with GridComposer([own]):
        pass
    (there / "theirs.yaml").chmod(0o666)
    with pytest.raises(UntrustedFileError, match=r"theirs\.yaml has mode 666"):
        GridComposer([own])


def test_a_file_with_the_name_of_a_shipped_one_is_refused_in_place_of_not_being_read(tmp_path: Path) -> None:
    own = _own_conf(tmp_path / "conf")
    twin = own / "hardware" / "gpu_x1.yaml"
    twin.write_text("name: gpu_x1\ngpus_per_node: 1\ntime_limit_min: 99\n")
    with GridComposer([own]) as composer:
        with pytest.raises(ConfigError, match=r"two files have this name.*mv .*gpu_x1\.yaml .*gpu_x1_own\.yaml, then"):
            composer.compose_point(["hardware=gpu_x1"])
        composer.compose(["hardware=gpu_x2"])
    twin.write_bytes((conf_dir() / "hardware" / "gpu_x1.yaml").read_bytes())
    with GridComposer([own]) as composer:
        assert composer.compose(["hardware=gpu_x1"]).hardware.time_limit_min == 60, "a copy"


def test_of_two_own_folders_the_first_counts(tmp_path: Path) -> None:
    one, two = _own_conf(tmp_path / "one"), _own_conf(tmp_path / "two")
    (two / "hardware" / "own_node.yaml").write_text("name: own_node\ntime_limit_min: 7\n")
    limits = []
    for folders in ([one, two], [two, one]):
        with GridComposer(folders) as composer:
            limits.append(composer.compose(["hardware=own_node"]).hardware.time_limit_min)
    assert limits[0] != limits[1] == 7


def test_a_figure_with_a_unit_in_a_profile_is_refused_with_its_value(tmp_path: Path) -> None:
    own = _own_conf(tmp_path / "conf")
    (own / "hardware" / "own_node.yaml").write_text("name: own_node\ntime_limit_min: 24h\n")
    rule = r"without a unit\. Use .*time_limit_min=1440"
    with GridComposer([own]) as composer, pytest.raises(ConfigError, match=rule):
        composer.compose(["hardware=own_node"])
