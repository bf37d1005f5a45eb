"""Folders of configurations of one's own: they add choices, and only where they were named."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_trainer.config.compose import Composer
from hpc_trainer.config.grid import expand
from hpc_trainer.errors import ConfigError


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
    with Composer([_own_conf(tmp_path / name)]) as composer:
        config = composer.compose(["experiment=my_study", "hardware=own_node", "optim=sgd"])
    assert (config.seed, config.model.name, config.hardware.cpus_per_task) == (41, "cnn", 3)


def test_a_wrong_choice_lists_those_of_ones_own_folder_too(tmp_path: Path) -> None:
    with Composer([_own_conf(tmp_path / "conf")]) as composer:
        with pytest.raises(ConfigError, match=r"Did you mean my_study\?.*digits.*my_study"):
            composer.compose(["experiment=my_studdy"])
        assert "own_node" in composer.choices("hardware")


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config-dir .*nowhere must be a folder"):
        Composer([tmp_path / "nowhere"])


def test_one_composer_after_another_sees_only_its_own_folders(tmp_path: Path) -> None:
    with Composer([_own_conf(tmp_path / "conf")]) as composer:
        composer.compose(["experiment=my_study"])
    with Composer() as composer, pytest.raises(ConfigError, match="no such choice"):
        composer.compose(["experiment=my_study"])


@pytest.mark.usefixtures("fake_slurm")
def test_glob_sees_ones_own_folder(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    for name in ("study_a", "study_b"):
        (tmp_path / "experiment" / f"{name}.yaml").write_text(f"# @package _global_\nexperiment_name: {name}\n")
    with Composer([tmp_path]) as composer:
        points = expand(composer, ["experiment=glob(study_*)"])
    assert [point.axes["experiment"] for point in points] == ["study_a", "study_b"]
