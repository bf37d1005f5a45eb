"""What is wrong with pictures is told by plan, as far as folders and an index say it; nothing is read of pictures."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from hpc_trainer.config.rules.validate import find_problems, validate
from hpc_trainer.data.images import ImageFolderConfig, ImageShardsConfig
from hpc_trainer.data.images.index import build_index
from tests.unit.data.images.making import make_shards, samples
from tests.unit.record.builders import make_config

CNN = ["model=cnn", "train.global_batch_size=8"]


@pytest.fixture
def flowers(tmp_path: Path) -> Path:
    for split in ("train", "eval"):
        for name in ("rose", "lily"):
            (tmp_path / split / name).mkdir(parents=True)
    return tmp_path


def problems(*words: str) -> list[str]:
    return list(find_problems(make_config(*CNN, *words)))


def test_what_can_be_is_taken_and_its_path_made_absolute(flowers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(flowers.parent)
    config = make_config(
        *CNN, "data=image_folder", f"data.path={flowers.name}", "data.mean=[0.5,0.4,0.3]", "data.std=[0.2,0.2,1]",
        "data.on_broken=skip", "data.resize=224",
    )  # fmt: skip
    assert list(find_problems(config)) == []
    validate(config)
    assert isinstance(config.data, ImageFolderConfig)
    assert config.data.path == str(flowers)
    assert problems("data=image_folder", f"data.path={flowers}/train", "data.eval_fraction=0.1") == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "data=image_folder needs data.path"),
        (["data.path=/no/such"], "data.path=/no/such must be a readable folder; there is none."),
        (["data.path='~nobody-known/x'"], "begins with the home of a user whom this machine does not know"),
        (["data.path={}", "data.resize=200"], "data.resize=200 is less than data.image_size=224"),
        (["data.path={}", "data.mean=[0.5]"], "data.mean has 1 numbers, and must have one for each of data.num_ch"),
        (["data.path={}", "data.std=[1,1,0]"], "data.std holds 0; it must be finite, and greater than 0. Use 0.5."),
        (["data.path={}", "data.mean=[1,1,nan]"], "data.mean holds nan; it must be finite. Use 0.5."),
        (["data.path={}", "data.eval_fraction=1.5"], "data.eval_fraction=1.5 must be in (0, 1)"),
        (["data.path={}", "data.num_channels=4"], "data.num_channels=4 must be 1 or 3"),
        (["data.path={}/train"], "must hold the folders train and eval (data.eval_fraction=null); eval is not there"),
        (["data.path={}/train/rose", "data.eval_fraction=0.1"], "a folder for each class, two or more; it has 0"),
    ],
)  # fmt: skip
def test_it_is_refused_with_the_reason(flowers: Path, words: list[str], message: str) -> None:
    (problem,) = problems("data=image_folder", *(word.format(flowers) for word in words))
    assert message in problem


def test_text_models_are_refused() -> None:
    (problem,) = [line for line in problems("data=image_folder", "model=gpt") if "model=gpt" in line]
    assert problem.startswith("model=gpt does not go with data=image_folder: it reads text. Use data=text_bytes")


def test_a_package_that_is_missing_is_named(flowers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "PIL" else real(name, *rest))
    (problem,) = problems("data=image_folder", f"data.path={flowers}")
    assert problem == "data=image_folder needs the package PIL: pip install 'hpc_trainer[images]'"


def test_shards_need_their_index_which_tells_how_many_there_are(flowers: Path) -> None:
    words = ["data=image_shards", f"data.path={flowers}"]
    (first, second) = problems(*words)
    assert (
        "train must hold tar shards and their index; index.json is not there. Write it once with: hpc-trainer" in first
    )
    assert f"data index {flowers}/eval" in second
    for split in ("train", "eval"):
        build_index(make_shards(flowers / split, samples(7)))
    (problem,) = problems(*words)
    assert "the 7 training samples" in problem
    assert problems(*words, "train.global_batch_size=7", "data.stage_dir=$TMPDIR/mine") == []
    (problem,) = problems(*words, "train.global_batch_size=7", "data.stage_dir=scratch")
    assert "data.stage_dir=scratch must be a folder on each node, written out" in problem
    data = ImageShardsConfig(path=str(flowers))
    assert data.num_train_samples() == 7
    build_index(make_shards(flowers / "train", samples(9)))
    assert data.num_train_samples() == 9
    (flowers / "train/index.json").write_text(json.dumps({"num_samples": None}))
    assert data.num_train_samples() is None
