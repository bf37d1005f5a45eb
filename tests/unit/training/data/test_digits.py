"""The digits: split, normalisation, and what happens without scikit-learn."""

from __future__ import annotations

import hashlib
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from hpc_trainer.config.schema.data import DigitsConfig
from hpc_trainer.datasets import MapDataset
from hpc_trainer.errors import DataError
from hpc_trainer.training.data import digits

pytest.importorskip("sklearn", reason="the digits ship with scikit-learn")


def sha256(array):
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def build(split, **values):
    return digits.build(DigitsConfig(**values), split)


def test_split_has_the_stated_sizes_and_shares_no_image():
    train, held_out = digits.split_indices(360)
    assert (len(train), len(held_out)) == (1437, 360)
    assert sorted([*train, *held_out]) == list(range(1797))


def test_split_is_the_same_for_ever():
    train, held_out = digits.split_indices(360)
    assert sha256(train.astype("<i8")) == "97a33b5ece10e8e7026bd2a6f8190102318e03911240a2d916bdced760b65335"
    assert sha256(held_out.astype("<i8")) == "6c75a6c0f415b5c0af392eac42effe55be0631de74b5597158b08f8ee629b890"


def test_a_smaller_eval_split_is_part_of_a_larger():
    assert set(digits.split_indices(100)[1]) < set(digits.split_indices(360)[1])


def test_normalised_with_train_statistics():
    train, held_out = build("train"), build("eval")
    pixels = train.images.double()
    assert pixels.mean().item() == pytest.approx(0, abs=1e-6)
    assert pixels.std(correction=0).item() == pytest.approx(1, abs=1e-6)
    # Black is the same value in both: the eval images have no statistics of their own.
    assert train.images.min() == held_out.images.min()
    assert held_out.images.double().mean().item() == pytest.approx(0.0020, abs=1e-4)


def test_normalised_images_are_the_same_for_ever():
    expected = {
        "train": "55ef2b881a3707c18ffba8ac0ccbebbf4854950e0ee0bbb3dd66833aca57c51d",
        "eval": "91446ed21955dc6fa44dc121518b0bc256ae47a80aa92300264b261738e2f2c3",
    }
    for split, checksum in expected.items():
        assert sha256(build(split).images.numpy()) == checksum


def test_images_and_targets_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    table = load_digits()
    held_out = build("eval")
    rows = digits.split_indices(360)[1]
    images, targets = held_out.__getitems__([0, 359])
    assert targets.tolist() == table.target[rows[[0, 359]]].tolist()
    for image, row in zip(images, rows[[0, 359]], strict=True):
        assert np.corrcoef(image.flatten(), table.images[row].ravel())[0, 1] == pytest.approx(1)


def test_follows_the_protocol_in_a_loader():
    train = build("train")
    assert isinstance(train, MapDataset)
    assert (train.input_shape, train.num_classes, len(train)) == ((1, 8, 8), 10, 1437)
    loader = DataLoader(train, batch_size=100, collate_fn=lambda batch: batch)
    batches = list(loader)
    assert len(batches) == 15
    images, targets = batches[0]
    assert (images.shape, images.dtype) == ((100, 1, 8, 8), torch.float32)
    assert (targets.shape, targets.dtype) == ((100,), torch.int64)
    assert set(torch.cat([labels for _, labels in batches]).tolist()) == set(range(10))


@pytest.mark.parametrize("index", [-1, 360])
def test_an_index_outside_is_refused(index):
    with pytest.raises(IndexError, match=rf"index {index} must be 0 to 359"):
        build("eval").__getitems__([0, index])


def test_the_table_is_the_one_that_scikit_learn_reads(monkeypatch):
    """Read as a file, because importing scikit-learn takes longer than torch; its own way if the file is elsewhere."""
    pixels, labels = digits._load.__wrapped__()
    monkeypatch.setattr(digits.importlib.util, "find_spec", lambda name: None)
    theirs = digits._load.__wrapped__()
    assert [(each.dtype, each.shape) for each in theirs] == [(each.dtype, each.shape) for each in (pixels, labels)]
    assert (pixels == theirs[0]).all()
    assert (labels == theirs[1]).all()


def test_without_scikit_learn_says_what_to_install(monkeypatch):
    monkeypatch.setattr(digits, "_load", digits._load.__wrapped__)  # what was read before is kept
    monkeypatch.setattr(digits.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError) as caught:
        build("train")
    assert "pip install scikit-learn" in str(caught.value)


@pytest.mark.parametrize("max_shift", [0, 1])
def test_values_are_pixels_by_the_mean_and_deviation_that_are_told(max_shift: int) -> None:
    dataset = digits.build(DigitsConfig(max_shift=max_shift), "eval")
    pixels = dataset.images * dataset.pixel_std[0] + dataset.pixel_mean[0]
    assert torch.allclose(pixels * 16, (pixels * 16).round(), atol=1e-4)
    assert abs(float(pixels.min())) < 1e-6
    assert abs(float(pixels.max()) - 1) < 1e-6
