"""What is drawn: within its limits, as often as asked, and each operator apart from all others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hpc_trainer.features.augment import AugmentConfig, Crop, draw
from hpc_trainer.training.data.protocol import bits_of

LOADED = draw.Shape(40, 60, 24, 24)
SAMPLES = [(epoch, sample) for epoch in range(3) for sample in range(400)]


def _steps(shape: draw.Shape = LOADED, **keys: Any) -> dict[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Of each operator (rows, numbers); of RandAugment's rounds the last."""
    config = AugmentConfig(**keys)
    u, _ = draw.uniforms(config, 5, SAMPLES)
    build = draw.Builder()
    draw.add_images(config, u, shape, build, has_colours=True)
    return {name: (rows, numbers) for name, rows, numbers in build.steps}


def test_numbers_are_uniform_and_a_function_of_seed_epoch_and_sample() -> None:
    config = AugmentConfig()
    u, words = draw.uniforms(config, 5, SAMPLES)
    assert u.min() >= 0.0
    assert u.max() < 1.0
    assert abs(u.mean() - 0.5) < 0.005
    assert abs(u.var() - 1 / 12) < 0.002
    assert len(np.unique(words)) == len(SAMPLES)
    again, _ = draw.uniforms(config, 5, SAMPLES[7:8])
    assert np.array_equal(again[0], u[7])
    assert not np.array_equal(draw.uniforms(config, 6, SAMPLES[7:8])[0], again)
    # A data set's own `augment` draws from another stream.
    first = bits_of(5, *SAMPLES[7]).random_raw(1)
    assert first != words[7]


def test_resized_crops_lie_in_the_image_and_have_the_area_and_the_aspect_asked_for() -> None:
    rows, numbers = _steps(crop=Crop.resized, crop_area=0.25, crop_aspect=1.5, flip=0.5)["resized_crop"]
    a, b, c, d, e, f = numbers.T
    assert len(rows) == len(SAMPLES)
    assert not b.any()
    assert not d.any()
    width, height = np.abs(a) * 24, e * 24
    left, top = c + 30 - width / 2, f + 20 - height / 2
    for low, size, whole in ((left, width, 60), (top, height, 40)):
        assert np.allclose(low, np.rint(low))
        assert low.min() >= -1e-9
        assert (low + size).max() <= whole + 1e-9
    area, aspect = width * height / (40 * 60), width / height
    assert 0.24 < area.min() < 0.27, "rounded to whole pixels"
    assert 0.9 < area.max() <= 1.0
    assert 1 / 1.6 < aspect.min() < 0.7
    assert 1.4 < aspect.max() < 1.6
    assert 0.45 < (a < 0).mean() < 0.55


def test_where_no_box_fits_the_middle_is_taken() -> None:
    """All of an image that is six times as wide as high has no legal aspect ratio."""
    shape = draw.Shape(10, 60, 10, 10)
    _, numbers = _steps(shape, crop=Crop.resized, crop_area=1.0, crop_aspect=1.2)["resized_crop"]
    assert np.unique(numbers, axis=0).tolist() == [[1.2, 0.0, 0.0, 0.0, 1.0, 0.0]]


def test_padded_crops_begin_anywhere_in_the_border() -> None:
    _, numbers = _steps(crop=Crop.padded, crop_padding=3)["padded_crop"]
    top, left, is_flipped = numbers.T
    assert set(top) == set(range(40 + 6 - 24 + 1))
    assert set(left) == set(range(60 + 6 - 24 + 1))
    assert not is_flipped.any()


def test_flips_erasing_and_colours_are_as_often_and_as_strong_as_asked() -> None:
    rows, _ = _steps(flip=0.3)["flip"]
    assert 0.26 < len(rows) / len(SAMPLES) < 0.34
    found = _steps(brightness=0.4, contrast=0.2, saturation=1.0, hue=0.1)
    assert list(found) == ["brightness", "contrast", "saturation", "hue"]
    for name, strength in (("brightness", 0.4), ("contrast", 0.2), ("saturation", 1.0)):
        factors = found[name][1]
        assert abs(factors.min() - (1 - strength)) < 0.02 * strength
        assert abs(factors.max() - (1 + strength)) < 0.02 * strength
    assert abs(np.abs(found["hue"][1]).max() - 0.2 * np.pi) < 0.01
    _, boxes = _steps(erasing=0.25)["erase"]
    assert len(boxes) == len(SAMPLES)
    boxes = boxes[boxes[:, 2] > 0]
    assert 0.21 < len(boxes) / len(SAMPLES) < 0.29
    area = boxes[:, 2] * boxes[:, 3] / 24**2
    assert 0.01 < area.min() < 0.04
    assert 0.28 < area.max() < 0.35
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, :2] + boxes[:, 2:] <= 24).all()


def test_to_turn_one_operator_on_changes_nothing_of_what_others_draw() -> None:
    alone = _steps(flip=0.3)["flip"]
    beside = _steps(flip=0.3, brightness=0.5, randaugment_ops=3, erasing=0.5)["flip"]
    assert np.array_equal(alone[0], beside[0])
    one = _steps(erasing=0.5)["erase"]
    other = _steps(erasing=0.5, randaugment_ops=2, crop=Crop.padded)["erase"]
    assert np.array_equal(one[1], other[1])


@pytest.mark.parametrize("magnitude", [0, 9, 30])
def test_each_operator_of_randaugment_is_drawn_as_often_as_another(magnitude: int) -> None:
    u = np.random.Generator(np.random.PCG64(1)).random((2, 7000))
    found = {
        name: (rows, numbers)
        for name, rows, numbers in draw.of_one_round(u[0], u[1], magnitude, 24, 24, has_colours=True)
    }
    assert 2300 < len(found["move"][0]) < 2700, "five of fourteen"
    single = {name: len(rows) for name, (rows, _) in found.items() if name != "move"}
    assert sorted(single) == sorted(set(draw.OPERATORS[6:]))
    assert all(400 < count < 600 for count in single.values()), single
    share = magnitude / 30
    assert set(np.round(found["contrast"][1][:, 0], 6)) == {round(1 - 0.9 * share, 6), round(1 + 0.9 * share, 6)}
    assert set(found["posterize"][1][:, 0]) == {8.0 - round(4 * share)}
    assert np.allclose(found["solarize"][1], 1 - share)
    moves = found["move"][1]
    assert np.isclose(np.abs(moves[:, 2]).max(), 24 * 150 / 331 * share)
    assert np.isclose(np.degrees(np.arccos(moves[:, 0].min())), 30 * share)
    grey = [name for name, *_ in draw.of_one_round(u[0], u[1], magnitude, 24, 24, has_colours=False)]
    assert "saturation" not in grey


def test_partners_come_from_all_the_data_and_weights_from_a_beta_distribution() -> None:
    shape = draw.Shape(16, 16, 16, 16)
    config = AugmentConfig(mixup_alpha=0.4, cutmix_alpha=1.0, mix_share=0.8)
    u, words = draw.uniforms(config, 5, SAMPLES)
    found = draw.mixes(config, 5, SAMPLES, u, words, 50, shape)
    assert 0.76 < len(found.rows) / len(SAMPLES) < 0.84
    assert set(found.partners) == set(range(50))
    assert 0.45 < found.is_cut.mean() < 0.55
    weights = found.weights[~found.is_cut]
    assert abs(weights.mean() - 0.5) < 0.04
    assert abs(weights.var() - 0.25 / (2 * 0.4 + 1)) < 0.02, "that of Beta(0.4, 0.4)"
    boxes = found.boxes[found.is_cut]
    assert np.allclose(found.weights[found.is_cut], 1 - boxes[:, 2] * boxes[:, 3] / 256)
    assert (boxes >= 0).all()
    assert (boxes[:, :2] + boxes[:, 2:] <= 16).all()
    assert set(draw.mixes(AugmentConfig(mixup_alpha=1.0), 5, SAMPLES, u, words, 50, shape).is_cut) == {False}
    assert set(draw.mixes(AugmentConfig(cutmix_alpha=1.0), 5, SAMPLES, u, words, 50, shape).is_cut) == {True}


def test_noisy_labels_are_a_share_and_any_other_class_whatever_the_epoch() -> None:
    new = np.array([draw.new_class(3, sample, 0.2, 5, sample % 5) for sample in range(4000)])
    old = np.arange(4000) % 5
    is_noisy = new != old
    assert 0.18 < is_noisy.mean() < 0.22
    steps = (new - old)[is_noisy] % 5
    assert all(0.2 < (steps == step).mean() < 0.3 for step in (1, 2, 3, 4))
    assert [draw.new_class(3, sample, 0.2, 5, sample % 5) for sample in range(50)] == new[:50].tolist()
    assert [draw.new_class(4, sample, 0.2, 5, sample % 5) for sample in range(400)] != new[:400].tolist()
    assert all(draw.new_class(3, sample, 0.0, 5, 2) == 2 for sample in range(50))
