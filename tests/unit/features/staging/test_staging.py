"""The feature stages both splits before data are opened, and only where the key asks for it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_trainer.config.schema.data.images import ImageFolderConfig, ImageShardsConfig
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.data.images.index import build_index, read_index
from hpc_trainer.features.staging.staging import StagingAbility
from tests.unit.data.images.making import make_shards, samples


def begin(data: Any, *, is_stopped: bool = False, is_estimate: bool = False) -> None:
    run: Any = SimpleNamespace(beat=lambda: None, stop=SimpleNamespace(is_set=is_stopped))
    mesh: Any = None  # this hook asks nothing of it
    StagingAbility(TrainConfig(data=data)).begin(mesh, None if is_estimate else run)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for split, count in (("train", 6), ("val", 3)):
        build_index(make_shards(tmp_path / "shared" / split, samples(count)))
    (tmp_path / "local").mkdir()
    return tmp_path


def staged(root: Path) -> set[str]:
    return {path.parent.name for path in (root / "local").glob("*/*/*.tar")}


@pytest.mark.parametrize("eval_fraction", [None, 0.3])
def test_both_splits_are_staged_once_each(
    root: Path, capsys: pytest.CaptureFixture[str], eval_fraction: float | None
) -> None:
    path = root / "shared" if eval_fraction is None else root / "shared" / "train"
    begin(ImageShardsConfig(path=str(path), eval_fraction=eval_fraction, stage_dir=str(root / "local")))
    folders = [root / "shared/train"] + [root / "shared/val"] * (eval_fraction is None)
    assert staged(root) == {read_index(folder).digest for folder in folders}
    assert capsys.readouterr().out.count("were copied to") == len(folders)
    assert (root / "local" / f"hpc_trainer-{os.getuid()}").stat().st_mode & 0o777 == 0o700


def test_nothing_is_staged_without_the_key_in_an_estimate_or_after_a_stop(root: Path) -> None:
    begin(ImageFolderConfig(path="nowhere"))
    begin(ImageShardsConfig(path=str(root / "shared")))
    begin(ImageShardsConfig(path=str(root / "shared"), stage_dir=str(root / "local")), is_estimate=True)
    begin(ImageShardsConfig(path=str(root / "shared"), stage_dir=str(root / "local")), is_stopped=True)
    assert staged(root) == set()
