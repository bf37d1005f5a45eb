"""Runs with augmentation: interrupted and undisturbed ones are the same, evaluations see no augmented sample."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hpc_trainer.record.metrics import read_metrics
from tests.unit.training.train_here import config_of, saved_bytes, train_here

# 147 samples of training: two epochs and a part of a third.
WORDS = ("data.num_eval=1650", "train.num_steps=22", "train.global_batch_size=16", "train.eval_every_steps=0",
         "monitor.log_every_steps=1")  # fmt: skip
KINDS = {
    "mixed": ("model=mlp", "model.hidden_dim=16", "augment=flip_crop", "augment.mixup_alpha=0.4",
              "augment.cutmix_alpha=1", "augment.label_noise=0.1", "train.label_smoothing=0.1",
              "train.grad_accum_steps=2"),
    "workers": ("model=cnn", "model.num_channels=4", "augment=randaugment", "augment.size=8", "data.num_workers=2"),
    "device": ("model=cnn", "model.num_channels=4", "augment=randaugment", "augment.run_on=device",
               "augment.mixup_alpha=0.4", "train.channels_last=true"),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _global_switches() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the worker does: several on a busy machine wait for each other
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


def _losses(folder: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line}


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_stopped_twice_has_the_bits_of_one_that_is_not(kind: str, tmp_path: Path) -> None:
    config = config_of(*WORDS, *KINDS[kind])
    whole = train_here(config, tmp_path / "whole")
    stopped = tmp_path / "stopped"
    for attempt, stop_at in enumerate((4, 13, None)):
        run = train_here(config, stopped, attempt=attempt, stop_at=stop_at)
    assert saved_bytes(run) == saved_bytes(whole)
    assert _losses(stopped) == _losses(tmp_path / "whole")
    assert len(_losses(stopped)) == 22


def test_device_and_workers_train_alike(tmp_path: Path) -> None:
    """On a CPU pixels have the same bits, so all that follows has."""
    words = (*WORDS, *KINDS["device"])
    one = train_here(config_of(*words), tmp_path / "device")
    other = train_here(config_of(*words, "augment.run_on=workers"), tmp_path / "workers")
    assert saved_bytes(one)["state.safetensors"] == saved_bytes(other)["state.safetensors"]


def test_evaluations_see_images_as_they_are(tmp_path: Path) -> None:
    """With no step that changes weights, an evaluation tells the same as without augmentation."""
    words = (*WORDS, "model=mlp", "model.hidden_dim=16", "optim.lr=1e-30", "train.num_steps=2")
    found = {}
    for name, more in (("plain", ()), ("changed", KINDS["mixed"][2:])):
        train_here(config_of(*words, *more), tmp_path / name)
        lines = read_metrics(tmp_path / name / "metrics.jsonl")
        found[name] = [line["eval_loss"] for line in lines if "eval_loss" in line], _losses(tmp_path / name)
    assert found["plain"][0] == found["changed"][0]
    assert len(found["plain"][0]) == 1
    assert found["plain"][1] != found["changed"][1]


def test_a_cropped_model_takes_smaller_images(tmp_path: Path) -> None:
    words = ("model=resnet18", "model.width=2", "data=synthetic_images", "data.image_size=12", "data.num_samples=32",
             "data.num_eval=8", "augment=imagenet", "augment.size=8", "train.num_steps=2", "train.global_batch_size=8",
             "train.eval_every_steps=0")  # fmt: skip
    train_here(config_of(*words), tmp_path / "run")
    assert len(_losses(tmp_path / "run")) > 0


@pytest.mark.long
def test_digits_are_learned_in_a_few_seconds(tmp_path: Path) -> None:
    """The whole of it, to 0.985 and more, is tests/integration/grids/test_digits_augmented.py."""
    words = ("model=cnn", "model.num_channels=16", "train.num_steps=120", "train.global_batch_size=64",
             "train.eval_every_steps=0", "optim.lr=0.005", "augment.crop=padded", "augment.crop_padding=1")  # fmt: skip
    train_here(config_of(*words), tmp_path / "run")
    (accuracy,) = [
        line["eval_accuracy"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "eval_accuracy" in line
    ]
    assert accuracy >= 0.96
