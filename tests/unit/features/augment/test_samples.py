"""Augmented batches: the same bits however they are cut, wherever they are made, and after a resume."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hpc_trainer.config.schema.data import DigitsConfig
from hpc_trainer.data.generated import SyntheticImagesConfig
from hpc_trainer.data.generated import dataset as synthetic_images
from hpc_trainer.errors import ConfigError
from hpc_trainer.features.augment import AugmentConfig, Crop, RunOn, draw
from hpc_trainer.features.augment.augment import AugmentedSamples, Cropped
from hpc_trainer.features.augment.draw import Drawn
from hpc_trainer.training.data import digits
from hpc_trainer.training.data.loader import train_batches
from hpc_trainer.training.data.order import BatchOrder
from hpc_trainer.training.data.protocol import EpochDataset, generator_of

ALL: dict[str, Any] = {
    "crop": Crop.resized, "size": 12, "flip": 0.5, "brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1,
    "randaugment_ops": 2, "erasing": 0.5, "mixup_alpha": 0.3, "cutmix_alpha": 1.0, "mix_share": 0.7,
    "label_noise": 0.2,
}  # fmt: skip
# With one operator a round there are batches in which nobody draws a change of colours.
SOME: dict[str, Any] = {"randaugment_ops": 1, "crop": Crop.padded, "flip": 0.5}
NUM_SAMPLES, BATCH, STEPS = 40, 16, 5
ORDER = BatchOrder(NUM_SAMPLES, BATCH, 3)
Rows = dict[tuple[int, int], tuple[Tensor, Tensor]]


@functools.cache
def _images() -> synthetic_images.SyntheticImages:
    return synthetic_images.build(SyntheticImagesConfig(image_size=15, num_samples=NUM_SAMPLES), "train")


def _rows(keys: dict[str, Any], world_size: int = 1, accum: int = 1, *, workers: int = 0, first_step: int = 0) -> Rows:
    """(step, place in the global batch) -> (image, target), as all ranks together have them."""
    dataset = AugmentedSamples(_images(), AugmentConfig(**keys))
    size, found = BATCH // world_size // accum, {}
    for rank in range(world_size):
        with train_batches(
            dataset, ORDER, first_step=first_step, num_steps=STEPS, rank=rank, world_size=world_size,
            micro_batch_size=size, grad_accum_steps=accum, num_workers=workers,
        ) as batches:  # fmt: skip
            for index, (inputs, targets) in enumerate(batches):
                step, part = divmod(index, accum)
                images = inputs
                if isinstance(inputs, Drawn):
                    assert dataset.operators is not None
                    images = dataset.operators(inputs)
                for row, (image, target) in enumerate(zip(images, targets, strict=True)):
                    found[first_step + step, (part * world_size + rank) * size + row] = image.clone(), target.clone()
    return found


@functools.cache
def _expected(name: str) -> Rows:
    return _rows({"all": ALL, "some": SOME}[name])


def _assert_same(found: Rows, expected: Rows) -> None:
    assert found.keys() == expected.keys()
    for place, (image, target) in expected.items():
        assert torch.equal(found[place][1], target), place
        assert torch.equal(found[place][0], image), place


@pytest.mark.few(3)
@pytest.mark.parametrize("name", ["all", "some"])
@pytest.mark.parametrize(("world_size", "accum"), [(1, 16), (2, 1), (2, 4), (4, 2)])
def test_ranks_and_micro_batches_change_no_bit(name: str, world_size: int, accum: int) -> None:
    _assert_same(_rows({"all": ALL, "some": SOME}[name], world_size, accum), _expected(name))


@pytest.mark.few(1)
@pytest.mark.parametrize("threads", [1, 2])
def test_neither_do_workers_nor_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        _assert_same(_rows(ALL, 2, workers=2), _expected("all"))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("first_step", [1, 3, 4])
def test_nor_does_a_resume(first_step: int) -> None:
    expected = {place: row for place, row in _expected("all").items() if place[0] >= first_step}
    _assert_same(_rows(ALL, first_step=first_step), expected)


@pytest.mark.parametrize("name", ["all", "some"])
def test_on_the_device_the_same_is_drawn(name: str) -> None:
    keys = {"all": ALL, "some": SOME}[name]
    found, expected = _rows({**keys, "run_on": RunOn.device}, 2, 2), _expected(name)
    assert found.keys() == expected.keys()
    for place, (image, target) in expected.items():
        assert torch.equal(found[place][1], target), place
        assert torch.allclose(found[place][0], image, rtol=0, atol=1e-6), place


def test_each_epoch_changes_a_sample_anew_but_not_its_noisy_label() -> None:
    dataset = AugmentedSamples(_images(), AugmentConfig(crop=Crop.resized, label_noise=0.3))
    assert isinstance(dataset, EpochDataset)
    pairs = [dataset.training_batch([(epoch, sample) for sample in range(NUM_SAMPLES)], 3) for epoch in range(3)]
    for (one, labels), (other, others) in itertools.pairwise(pairs):
        assert not any(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        assert torch.equal(labels, others)
    assert 4 < (pairs[0][1] != _images().__getitems__(range(NUM_SAMPLES))[1]).sum() < 20
    assert not torch.equal(dataset.training_batch([(0, 1)], 4)[0], pairs[0][0][1:2])


def test_a_mixed_sample_is_made_of_two_as_they_are_in_this_epoch() -> None:
    keys: dict[str, Any] = {"crop": Crop.padded, "flip": 0.5, "label_noise": 0.2}
    samples = [(2, sample) for sample in range(NUM_SAMPLES)]
    images, labels = AugmentedSamples(_images(), AugmentConfig(**keys)).training_batch(samples, 3)
    config = AugmentConfig(**keys, mixup_alpha=1.0, mix_share=0.6)
    mixed, shares = AugmentedSamples(_images(), config).training_batch(samples, 3)
    u, words = draw.uniforms(config, 3, samples)
    found = draw.mixes(config, 3, samples, u, words, NUM_SAMPLES, draw.Shape(15, 15, 15, 15))
    partner = dict(zip(found.rows.tolist(), zip(found.partners.tolist(), found.weights, strict=True), strict=True))
    assert 15 < len(partner) < 33
    for row in range(NUM_SAMPLES):
        other, weight = partner.get(row, (row, 1.0))
        assert torch.allclose(mixed[row], images[row] * weight + images[other] * (1 - weight), atol=1e-6), row
        wanted = torch.zeros(10)
        wanted[labels[row]] += weight
        wanted[labels[other]] += 1 - weight
        assert torch.allclose(shares[row], wanted, atol=1e-6), row


def test_what_has_no_class_is_mixed_with_nothing_and_gets_none() -> None:
    class Unlabelled(synthetic_images.SyntheticImages):
        all_targets_count = False

        def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
            images, targets = super().__getitems__(indices)
            return images, torch.where(torch.tensor(list(indices)) % 2 == 0, -100, targets)

    source = Unlabelled(SyntheticImagesConfig(image_size=8, num_samples=NUM_SAMPLES), "train")
    dataset = AugmentedSamples(source, AugmentConfig(mixup_alpha=1.0, label_noise=0.5))
    assert not dataset.all_targets_count
    images, shares = dataset.training_batch([(0, sample) for sample in range(NUM_SAMPLES)], 0)
    plain = source.__getitems__(range(NUM_SAMPLES))[0]
    assert not shares[::2].any()
    assert torch.equal(images[::2], plain[::2])
    assert torch.allclose(shares[1::2].sum(1), torch.ones(NUM_SAMPLES // 2))
    is_mixed = (shares[1::2] == 1).sum(1) == 0
    assert 2 < is_mixed.sum() < NUM_SAMPLES // 2, "half of the partners have no class"


def test_a_data_set_that_augments_by_itself_goes_first_and_draws_apart() -> None:
    moving = digits.build(DigitsConfig(max_shift=2), "train")
    samples = [(1, sample) for sample in range(30)]
    images, _ = AugmentedSamples(moving, AugmentConfig(flip=1.0)).training_batch(samples, 4)
    plain, _ = moving.__getitems__([sample for _, sample in samples])
    moved = moving.augment(plain, [generator_of(4, *each) for each in samples])  # type: ignore[attr-defined]
    assert torch.equal(images, moved.flip(-1))


def test_evaluations_see_the_middle_and_estimates_too() -> None:
    config = AugmentConfig(**ALL)
    for dataset in (Cropped(_images(), config), AugmentedSamples(_images(), config)):
        assert dataset.input_shape == (3, 12, 12)
        assert dataset.num_classes == 10
        assert dataset.all_targets_count
        images, targets = dataset.__getitems__([3, 5])
        whole, wanted = _images().__getitems__([3, 5])
        assert torch.equal(images, whole[:, :, 1:13, 1:13])
        assert torch.equal(targets, wanted)
    assert Cropped(_images(), AugmentConfig(flip=1.0)).__getitems__([0])[0].shape == (1, 3, 15, 15)
    fingerprint = Cropped(digits.build(DigitsConfig(), "eval"), AugmentConfig(flip=1.0)).fingerprint()
    assert fingerprint == digits.build(DigitsConfig(), "eval").fingerprint()


class _Own:
    num_classes = 3

    def __init__(self, *shape: int, **attributes: object) -> None:
        self.input_shape = shape
        vars(self).update(attributes)

    def __len__(self) -> int:
        return 4

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        return torch.zeros(len(indices), *self.input_shape), torch.tensor(list(indices)) % 3


@pytest.mark.parametrize(
    ("source", "keys", "told"),
    [
        (_Own(16), {"flip": 0.5}, r"input_shape is \(16,\)\. Use augment=none"),
        (_Own(3, 20, 16), {"crop": Crop.resized, "size": 17}, "augment.size=17 must be at most 16, the smaller side"),
        (_Own(3, 8, 8), {"hue": 0.1}, "do not say what black and white are. Give the data set attributes pixel_mean"),
        (_Own(1, 8, 8, pixel_mean=[0], pixel_std=[1]), {"hue": 0.1}, "for images of 3 channels, and these have 1"),
        (_Own(3, 8, 8, stream=object()), {"flip": 0.5}, "a stream has none. Use augment=none"),
    ],
)  # fmt: skip
def test_data_that_cannot_be_augmented_are_refused_by_what_they_lack(
    source: Any, keys: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        AugmentedSamples(source, AugmentConfig(**keys))


def test_batches_of_another_form_are_refused_when_they_come() -> None:
    class Doubles(_Own):
        def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
            images, targets = super().__getitems__(indices)
            return images.double(), targets.unsqueeze(1)

    source = Doubles(3, 8, 8)
    with pytest.raises(ConfigError, match=r"float32, \[3, 8, 8\] .* these are torch.float64 \[3, 8, 8\]"):
        AugmentedSamples(source, AugmentConfig(flip=0.5)).training_batch([(0, 0)], 0)
    with pytest.raises(ConfigError, match=r"one class a sample, and these targets are \[1, 1\]"):
        AugmentedSamples(source, AugmentConfig(label_noise=0.5)).training_batch([(0, 0)], 0)


def test_labels_alone_need_no_images() -> None:
    dataset = AugmentedSamples(_Own(5), AugmentConfig(label_noise=0.9))
    inputs, targets = dataset.training_batch([(0, sample % 4) for sample in range(4)], 1)
    assert inputs.shape == (4, 5)
    assert not torch.equal(targets, torch.arange(4) % 3)
    assert np.isin(targets, (0, 1, 2)).all()
