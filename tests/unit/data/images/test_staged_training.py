"""A training stages both splits before the data are opened, and only if the key asks for it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.data.images import ImageFolderConfig, ImagesConfig, ImageShardsConfig
from hpc_trainer.data.images.dataset import prepare_node
from hpc_trainer.data.images.index import build_index, read_index
from hpc_trainer.data.images.shards import ShardSource
from tests.unit.data.images.making import make_shards, samples
from tests.unit.training.train_here import config_of, train_here


def begin(data: ImagesConfig, *, is_stopped: bool = False) -> None:
    for line in prepare_node(data, lambda: None, lambda: is_stopped):
        print(line)


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


def test_nothing_is_staged_without_the_key_or_after_a_stop(root: Path) -> None:
    begin(ImageFolderConfig(path="nowhere"))
    begin(ImageShardsConfig(path=str(root / "shared")))
    begin(ImageShardsConfig(path=str(root / "shared"), stage_dir=str(root / "local")), is_stopped=True)
    assert staged(root) == set()


def test_a_training_stages_before_it_opens_the_data(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[str]] = []
    opened = ShardSource.__init__

    def look(source: ShardSource, *args: Any) -> None:
        seen.append(staged(root))
        opened(source, *args)

    monkeypatch.setattr(ShardSource, "__init__", look)
    config = config_of(
        "model=cnn", "data=image_shards", f"data.path={root / 'shared'}", f"data.stage_dir={root / 'local'}",
        "data.image_size=8", "train.num_steps=1", "train.global_batch_size=2",
    )  # fmt: skip
    train_here(config, root / "run")
    both = {read_index(root / "shared" / split).digest for split in ("train", "val")}
    assert seen == [both, both]
