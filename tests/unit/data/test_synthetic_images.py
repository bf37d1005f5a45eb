"""Synthetic images depend on seed, split and index alone, and can be learned."""

from __future__ import annotations

import hashlib
import pickle

import pytest
import torch

from hpc_trainer.data.generated import SyntheticImagesConfig
from hpc_trainer.data.generated import dataset as synthetic_images
from hpc_trainer.datasets import MapDataset


def build(split="train", **values):
    return synthetic_images.build(SyntheticImagesConfig(**values), split)


@pytest.mark.parametrize("size", [8, 13, 32, 224])
@pytest.mark.parametrize("num_channels", [1, 3])
def test_shape_and_scale(size, num_channels):
    data = build(image_size=size, num_channels=num_channels)
    assert isinstance(data, MapDataset)
    assert data.input_shape == (num_channels, size, size)
    images, targets = data.__getitems__(range(20))
    assert (images.shape, images.dtype) == ((20, num_channels, size, size), torch.float32)
    assert targets.dtype == torch.int64
    assert abs(images.mean().item()) < 0.15
    assert 0.85 < images.std().item() < 1.15
    pixels = images * data.pixel_std[0] + data.pixel_mean[0]
    assert -1e-6 < pixels.min().item() < 0.2
    assert 0.8 < pixels.max().item() < 1 + 1e-6
    assert len(data.pixel_mean) == len(data.pixel_std) == num_channels


@pytest.mark.parametrize("size", [9, 32])
def test_an_image_is_the_same_in_any_batch_and_process(size):
    data = build(image_size=size)
    images, targets = data.__getitems__([5, 9_999, 0, 7, 5])
    copy = pickle.loads(pickle.dumps(build(image_size=size)))
    for slot, index in enumerate([5, 9_999, 0, 7, 5]):
        image, target = copy.__getitems__([index])
        assert torch.equal(image[0], images[slot])
        assert target[0] == targets[slot] == index % 10


def test_images_that_are_kept_are_the_same_ones():
    data, kept = build(image_size=13), build(image_size=13, keep_in_memory=True)
    for indices in ([5, 3, 5], [3, 9_999, 5, 0], [0]):
        images, targets = kept.__getitems__(indices)
        expected = data.__getitems__(indices)
        assert torch.equal(images, expected[0])
        assert torch.equal(targets, expected[1])
        images.zero_()  # the batch is the step's own


def test_what_is_kept_is_made_once(monkeypatch):
    kept, made = build(keep_in_memory=True), []
    random_bytes = synthetic_images.random_bytes
    monkeypatch.setattr(synthetic_images, "random_bytes", lambda *args: made.append(args[2]) or random_bytes(*args))
    for indices in ([1, 2, 1], [2, 3], [1]):
        kept.__getitems__(indices)
    assert made == [1, 2, 3]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpus_host_a_batch_is_pinned_already():
    torch.cuda.init()
    images, _ = build(keep_in_memory=True).__getitems__([0, 1])
    assert images.is_pinned()
    assert torch.equal(images, build().__getitems__([0, 1])[0])


def test_an_image_does_not_depend_on_how_many_there_are():
    few, many = build(num_samples=10), build(num_samples=1000)
    assert torch.equal(few.__getitems__([9])[0], many.__getitems__([9])[0])


def test_the_bits_are_the_same_for_ever():
    images, _ = build(image_size=8).__getitems__([0, 1])
    assert (
        hashlib.sha256(images.numpy().tobytes()).hexdigest()
        == "e59a751aae6d9250aa145a84903b31ef19b4fe683ee7ffe1c5fab41eb88fd142"
    )


def test_seed_split_and_index_each_change_the_noise():
    image = build().__getitems__([0])[0]
    assert not torch.equal(image, build().__getitems__([10])[0])  # the same class
    assert not torch.equal(image, build("eval").__getitems__([0])[0])
    assert not torch.equal(image, build(data_seed=1).__getitems__([0])[0])


def test_eval_has_its_own_length_and_the_same_patterns():
    train, held_out = build(num_samples=2000), build("eval", num_samples=2000, num_eval=500)
    assert (len(train), len(held_out)) == (2000, 500)
    images, targets = train.__getitems__(range(500))
    means = torch.stack([images[targets == label].mean(0) for label in range(10)])
    images, targets = held_out.__getitems__(range(500))
    distances = torch.cdist(images.flatten(1), means.flatten(1))
    assert (distances.argmin(1) == targets).float().mean() > 0.99


@pytest.mark.parametrize("index", [-1, 1000])
def test_an_index_outside_is_refused(index):
    with pytest.raises(IndexError, match=rf"index {index} must be 0 to 999"):
        build("eval").__getitems__([index])
