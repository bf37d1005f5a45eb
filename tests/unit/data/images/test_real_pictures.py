"""A residual network learns to tell real photographs apart, from jpgs in an image folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.data.images.real_pictures import ALL, FEW, write_tiles
from tests.unit.training.train_here import config_of, train_here

RESNET = ["model=resnet18", "data=image_folder", "data.resize=32", "data.image_size=32", "optim.lr=0.003"]


def accuracy(folder: Path, *words: str) -> float:
    config = config_of(*RESNET, *words)
    train_here(config, folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["eval_accuracy"] for line in lines if "eval_accuracy" in line][-1]


@pytest.mark.long
def test_a_small_resnet_tells_four_photographs_apart(tmp_path: Path) -> None:
    counts = write_tiles(tmp_path / "tiles", FEW, size=32, most=50)
    assert counts[1] >= 30
    found = accuracy(
        tmp_path / "run", f"data.path={tmp_path / 'tiles'}", "model.width=8", "train.num_steps=32",
        "train.global_batch_size=32", "train.eval_every_steps=0",
    )  # fmt: skip
    print(f"accuracy {found:.3f} on {counts[1]} held-out tiles of {len(FEW)} photographs, {counts[0]} to train on")
    assert found > 0.7  # by chance 0.25


@pytest.mark.long
def test_resnet18_tells_seventeen_photographs_apart(tmp_path: Path) -> None:
    counts = write_tiles(tmp_path / "tiles", ALL, size=32, most=300)
    found = accuracy(
        tmp_path / "run", f"data.path={tmp_path / 'tiles'}", "model.width=16", "train.num_steps=200",
        "train.global_batch_size=64", "train.eval_every_steps=0",
    )  # fmt: skip
    print(f"accuracy {found:.3f} on {counts[1]} held-out tiles of {len(ALL)} photographs, {counts[0]} to train on")
    assert found > 0.75  # 0.826 was measured; by chance 0.06
