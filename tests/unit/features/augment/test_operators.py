"""Pixels: each operator beside another way to the same image, and each row as if it were alone."""

from __future__ import annotations

import math
from collections.abc import Iterator

import kornia.enhance
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hpc_trainer.features.augment import AugmentConfig, Crop, draw
from hpc_trainer.features.augment.operators import Operators, by_index, by_slices, warped

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
SHAPE = draw.Shape(12, 16, 12, 16)


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    """A mean over many pixels is added up otherwise by two threads, unless somebody sees to it."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == 2, "as it was"
    torch.set_num_threads(before)


def _images(count: int, height: int = 12, width: int = 16) -> Tensor:
    pixels = torch.rand(count, 3, height, width, generator=torch.Generator().manual_seed(1))
    return (pixels - torch.tensor(MEAN).view(1, 3, 1, 1)) / torch.tensor(STD).view(1, 3, 1, 1)


def _pixels(values: Tensor) -> Tensor:
    return values * torch.tensor(STD).view(1, 3, 1, 1) + torch.tensor(MEAN).view(1, 3, 1, 1)


def _after(
    images: Tensor, *steps: tuple[str, list[int], list[list[float]]], num_samples: int = 0, shape: draw.Shape = SHAPE,
    config: AugmentConfig | None = None,
) -> Tensor:  # fmt: skip
    build = draw.Builder()
    for name, rows, numbers in steps:
        build.add(name, np.array(rows), np.array(numbers, dtype=np.float64))
    config = config or AugmentConfig(randaugment_ops=1)
    before = images.clone()
    found = Operators(config, shape, (MEAN, STD))(build.drawn(images, num_samples or len(images)))
    assert torch.equal(images, before), "they may be the data set's own"
    return found


@pytest.mark.parametrize(
    ("name", "numbers", "wanted"),
    [
        ("brightness", [1.4], lambda x: (x * 1.4).clamp(0, 1)),
        ("contrast", [0.5], lambda x: 0.5 * x + 0.5 * _grey(x).mean()),
        ("saturation", [0.25], lambda x: 0.25 * x + 0.75 * _grey(x)),
        ("hue", [2 * math.pi / 3], lambda x: x[:, [2, 0, 1]]),
        ("solarize", [0.6], lambda x: torch.where(x < 0.6, x, 1 - x)),
        ("posterize", [2.0], lambda x: (x * 255).floor().div(64).floor() * 64 / 255),
        ("autocontrast", [], lambda x: (x - x.amin((2, 3), True)) / (x.amax((2, 3), True) - x.amin((2, 3), True))),
        ("sharpness", [1.0], lambda x: x),
        ("equalize", [], kornia.enhance.equalize),
    ],
)
def test_colours_are_as_the_operator_says_on_its_rows_alone(name: str, numbers: list[float], wanted: object) -> None:
    images = _images(3)
    found = _after(images, (name, [1], [numbers]))
    expected = wanted(_pixels(images[1:2]).clamp(0, 1))  # type: ignore[operator]
    assert torch.allclose(_pixels(found)[1:2], expected, atol=2e-5)
    assert torch.allclose(found[[0, 2]], images[[0, 2]], atol=1e-5)


def test_autocontrast_leaves_a_channel_of_one_value_as_it_is() -> None:
    """As torchvision does; it was black."""
    images = _images(2)
    images[:, 1] = 0.7
    found = _after(images, ("autocontrast", [0, 1], [[], []]))
    assert torch.allclose(found[:, 1], images[:, 1], atol=1e-6)
    assert torch.allclose(_pixels(found)[:, 0].amax((-2, -1)), torch.ones(2), atol=2e-5)


def _grey(pixels: Tensor) -> Tensor:
    return (pixels * torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)).sum(1, keepdim=True)


OF_ALL = (
    "brightness", "contrast", "saturation", "hue", "sharpness", "posterize", "solarize", "autocontrast", "equalize",
    "move",
)  # fmt: skip


@pytest.mark.few(10)
@pytest.mark.parametrize("side", [7, 33, 192])
@pytest.mark.parametrize("name", OF_ALL)
def test_a_row_has_the_same_bits_alone_and_beside_others(name: str, side: int) -> None:
    """192² pixels are more than what torch cuts up among threads (32,768)."""
    width = {"autocontrast": 0, "equalize": 0, "move": 6}.get(name, 1)
    numbers = [[0.9 + 0.1 * row + 0.01 * place for place in range(width)] for row in range(3)]
    if name == "posterize":
        numbers = [[4.0], [5.0], [6.0]]
    images, shape = _images(3, side, side), draw.Shape(side, side, side, side)
    together = _after(images, (name, [0, 1, 2], numbers), shape=shape)
    for row in range(3):
        assert torch.equal(_after(images[row : row + 1], (name, [0], [numbers[row]]), shape=shape)[0], together[row])
        assert torch.equal(_after(images, (name, [row], [numbers[row]]), shape=shape)[row], together[row])


def test_a_resized_crop_is_that_part_resized() -> None:
    images = _images(2, 20, 24)
    shape = draw.Shape(20, 24, 14, 18)
    # 10 rows from 3 on, 12 columns from 5 on, and the same mirrored.
    numbers = [[12 / 18, 0, 5 + 6 - 12, 0, 10 / 14, 3 + 5 - 10], [-12 / 18, 0, 5 + 6 - 12, 0, 10 / 14, 3 + 5 - 10]]
    found = _after(images, ("resized_crop", [0, 1], numbers), shape=shape, config=AugmentConfig(crop=Crop.resized))
    part = functional.interpolate(images[:, :, 3:13, 5:17], (14, 18), mode="bilinear", align_corners=False)
    inside = (..., slice(1, -1), slice(1, -1))  # at its edge the part itself has no neighbours
    assert torch.allclose(found[0][inside], part[0][inside], atol=1e-5)
    assert torch.allclose(found[1][inside], part[1].flip(-1)[inside], atol=1e-5)
    whole = _after(images, ("resized_crop", [0, 1], [[24 / 18, 0, 0, 0, 20 / 14, 0]] * 2), shape=shape,
                   config=AugmentConfig(crop=Crop.resized))  # fmt: skip
    assert torch.allclose(
        whole, functional.interpolate(images, (14, 18), mode="bilinear", align_corners=False), atol=1e-5
    )


def test_a_padded_crop_moves_pixels_as_they_are_and_its_border_is_black() -> None:
    images = _images(3)
    config = AugmentConfig(crop=Crop.padded, crop_padding=2)
    found = _after(images, ("padded_crop", [0, 1, 2], [[2, 2, 0], [0, 4, 0], [2, 2, 1]]), config=config)
    assert torch.equal(found[0], images[0])
    assert torch.equal(found[2], images[2].flip(-1))
    assert torch.equal(found[1, :, 2:, :-2], images[1, :, :-2, 2:])
    assert _pixels(found[1:2])[0, :, :2].abs().max() < 1e-6
    assert _pixels(found[1:2])[0, :, :, -2:].abs().max() < 1e-6


def test_slices_and_indices_take_the_same_pixels() -> None:
    images, black = _images(40), -torch.tensor(MEAN).view(1, 3, 1, 1) / torch.tensor(STD).view(1, 3, 1, 1)
    for size, border in (((12, 16), 3), ((7, 5), 0), ((12, 4), 20)):
        draw_from = np.random.Generator(np.random.PCG64(1))
        tops = draw_from.integers(0, 12 + 2 * border - size[0] + 1, 40)
        lefts = draw_from.integers(0, 16 + 2 * border - size[1] + 1, 40)
        numbers = torch.tensor(np.stack([tops, lefts, draw_from.integers(0, 2, 40)], 1), dtype=torch.float32)
        one, other = (copy(images, numbers, size, border, black) for copy in (by_slices, by_index))
        assert one.shape == (40, 3, *size)
        assert torch.equal(one, other)


def test_flips_and_moves_go_where_they_should() -> None:
    images = _images(2)
    assert torch.equal(_after(images, ("flip", [1], [[]]), config=AugmentConfig(flip=1.0))[1], images[1].flip(-1))
    moved = warped(images, torch.tensor([[1.0, 0, 3, 0, 1, -2]] * 2), (12, 16), padding_mode="zeros")
    assert torch.allclose(moved[:, :, 2:, :-3], images[:, :, :-2, 3:], atol=1e-5)
    assert not moved[:, :, :1].any()
    square = images[:, :, :12, :12]
    turned = warped(square, torch.tensor([[0.0, 1, 0, -1, 0, 0]] * 2), (12, 12), padding_mode="zeros")
    assert torch.allclose(turned, square.rot90(-1, (2, 3)), atol=1e-5)


def test_erasing_and_mixes() -> None:
    images = _images(4)
    erased = _after(images, ("erase", [1], [[2, 3, 4, 5]]), config=AugmentConfig(erasing=1.0))
    box = torch.zeros(12, 16, dtype=torch.bool)
    box[2:6, 3:8] = True
    assert not erased[1][:, box].any()
    assert torch.equal(erased[1][:, ~box], images[1][:, ~box])
    assert torch.equal(erased[[0, 2, 3]], images[[0, 2, 3]])
    mixed = _after(
        images, ("mixup", [0, 2], [[0.25]]), ("cutmix", [1, 3], [[2, 3, 4, 5]]), num_samples=2,
        config=AugmentConfig(mixup_alpha=1.0),
    )  # fmt: skip
    assert len(mixed) == 2
    assert torch.allclose(mixed[0], 0.25 * images[0] + 0.75 * images[2])
    assert torch.equal(mixed[1][:, box], images[3][:, box])
    assert torch.equal(mixed[1][:, ~box], images[1][:, ~box])
