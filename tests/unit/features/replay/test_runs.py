"""Runs that go on with new data: what they forget with and without replay, and the same bits after a stop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.record.metrics import read_metrics
from tests.unit.training.train_here import config_of, saved_bytes, train_here

_STEPS = 100


@pytest.fixture(scope="module", autouse=True)
def _global_switches() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digits 0 to 4, and 5 to 9: files of arrays, the same ten classes in both."""
    folder = tmp_path_factory.mktemp("halves")
    images, digits = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    for name, mask in (("low", digits < 5), ("high", digits >= 5)):
        np.savez(folder / f"{name}.npz", inputs=images[mask], targets=digits[mask])
    return {name: str(folder / f"{name}.npz") for name in ("low", "high")}


def _config(path: str, *words: str) -> TrainConfig:
    return config_of(
        "data=arrays", f"data.path={path}", "data.num_classes=10", "data.eval_fraction=0.2", "model=cnn",
        "model.num_channels=8", f"train.num_steps={_STEPS}", "train.global_batch_size=64", "train.eval_every_steps=0",
        "optim.lr=0.005", "monitor.log_every_steps=1", *words,
    )  # fmt: skip


def _ends(folder: Path) -> dict[str, float]:
    (found,) = [line for line in read_metrics(folder / "metrics.jsonl") if "eval_loss" in line]
    return {name: float(value) for name, value in found.items() if name.startswith("eval_")}


def _losses(folder: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line}


@pytest.mark.long
def test_without_replay_the_old_is_forgotten_and_with_it_it_holds(halves: dict[str, str], tmp_path: Path) -> None:
    """A run of its own on the old half; its spec is not needed where the old data are written out."""
    base = train_here(_config(halves["low"]), tmp_path / "base")
    before = _ends(tmp_path / "base")
    newest = max(base.paths.checkpoints.glob("step-*"))
    old = f"replay.data=[{{name: arrays, path: {halves['low']}, num_classes: 10, eval_fraction: 0.2}}]"
    ends = {}
    for share in (0, 0.25):
        folder = tmp_path / f"share-{share}"
        train_here(_config(halves["high"], f"init_from.path={newest}", f"replay.share={share}", old), folder)
        ends[share] = _ends(folder)
    print(before, ends)
    assert before["eval_accuracy"] > 0.95
    assert ends[0]["eval_old_accuracy"] < 0.5
    assert ends[0.25]["eval_old_accuracy"] > 0.85
    assert all(each["eval_accuracy"] > 0.9 for each in ends.values())
    # The old set is the one that the first run was evaluated on: its model, not trained on, tells the same of it.
    idle = _config(
        halves["high"], f"init_from.path={newest}", "replay.share=0", old, "optim.lr=1e-30", "train.num_steps=1"
    )
    train_here(idle, tmp_path / "idle")
    assert _ends(tmp_path / "idle")["eval_old_loss"] == pytest.approx(before["eval_loss"], rel=1e-6)


def test_a_share_of_nothing_trains_as_without_the_feature(halves: dict[str, str], tmp_path: Path) -> None:
    old = f"replay.data=[{{name: arrays, path: {halves['low']}, num_classes: 10}}]"
    for name, words in (("plain", ()), ("told", ("replay.share=0", old))):
        train_here(_config(halves["high"], "train.num_steps=6", *words), tmp_path / name)
    assert _losses(tmp_path / "plain") == _losses(tmp_path / "told")


@pytest.mark.long
@pytest.mark.parametrize("words", [("data.num_workers=2",), ("augment=flip_crop", "augment.mixup_alpha=0.4")])
def test_a_run_that_is_stopped_twice_has_the_bits_of_one_that_is_not(
    words: tuple[str, ...], halves: dict[str, str], tmp_path: Path
) -> None:
    """Three epochs: of 717 new ones and 717 places for old ones 22 batches each."""
    old = (
        f"replay.data=[{{name: arrays, path: {halves['low']}, num_classes: 10, eval_fraction: 0.2}}, {{name: digits}}]"
    )
    config = _config(halves["high"], "replay.share=0.5", old, "train.num_steps=50", *words)
    whole = train_here(config, tmp_path / "whole")
    for attempt, stop_at in enumerate((9, 31, None)):
        run = train_here(config, tmp_path / "stopped", attempt=attempt, stop_at=stop_at)
    assert saved_bytes(run) == saved_bytes(whole)
    assert _losses(tmp_path / "stopped") == _losses(tmp_path / "whole")
    assert len(_losses(tmp_path / "stopped")) == 50


def test_cropped_images_are_cropped_in_the_old_set_too(tmp_path: Path) -> None:
    words = ("model=cnn", "model.num_channels=4", "data=synthetic_images", "data.image_size=12", "data.num_samples=32",
             "data.num_eval=8", "augment.crop=padded", "augment.size=8", "train.num_steps=2",
             "train.global_batch_size=8", "train.eval_every_steps=0", "replay.share=0.4",
             "replay.data=[{name: synthetic_images, image_size: 12, num_samples: 20, num_eval: 6}]")  # fmt: skip
    train_here(config_of(*words), tmp_path / "run")
    assert _ends(tmp_path / "run").keys() >= {"eval_loss", "eval_old_loss", "eval_old_accuracy"}
