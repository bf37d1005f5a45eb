"""Random draws for each sample, on the host: which operators change it, and by what numbers. No pixel changes here.

Uniform numbers come from raw bits, which numpy promises not to change (NEP 19). Each operator has its own places among
a sample's numbers, so turning one on changes nothing of what the others draw.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpc_trainer.features.augment import AugmentConfig, Crop
from hpc_trainer.training.data.protocol import bits_of

Numbers = NDArray[np.float64]

OPERATORS = (
    "identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate", "brightness", "saturation", "contrast",
    "sharpness", "posterize", "solarize", "autocontrast", "equalize",
)  # fmt: skip
_MOVES = ("shear_x", "shear_y", "translate_x", "translate_y", "rotate")
_FACTORS = ("brightness", "saturation", "contrast", "sharpness")
_LARGEST = 30  # the magnitude at which each operator is strongest
_SHEAR, _MOVE, _ANGLE, _FACTOR = 0.3, 150 / 331, np.deg2rad(30.0), 0.9
_BITS, _FEWEST_BITS = 8, 4


def of_one_round(
    u_operator: Numbers, u_sign: Numbers, magnitude: int, height: int, width: int, *, has_colours: bool
) -> Iterator[tuple[str, NDArray[np.int64], Numbers]]:
    """Yield (operator, rows that drew it, their numbers [k, width]) of one round; each row draws one operator.

    Args:
        u_operator: [n] in [0, 1), chooses the operator.
        u_sign: [n] in [0, 1), chooses the direction of a change.
        magnitude: 0 to 30.
        height: of the images, pixels.
        width: of the images, pixels.
        has_colours: False for grey images, whose saturation cannot change.
    """
    chosen = np.floor(u_operator * len(OPERATORS)).astype(np.int64)
    sign, share = np.where(u_sign < 0.5, -1.0, 1.0), magnitude / _LARGEST
    strengths = {
        "shear_x": _SHEAR, "shear_y": _SHEAR, "rotate": _ANGLE, "translate_x": _MOVE * width,
        "translate_y": _MOVE * height,
    }  # fmt: skip
    moves = np.tile([1.0, 0.0, 0.0, 0.0, 1.0, 0.0], (len(chosen), 1))
    for name in _MOVES:
        rows = np.flatnonzero(chosen == OPERATORS.index(name))
        moves[rows] = _matrices(name, strengths[name] * share * sign[rows])
    are_moved = np.flatnonzero(np.isin(chosen, [OPERATORS.index(name) for name in _MOVES]))
    yield "move", are_moved, moves[are_moved]
    for name in OPERATORS:
        rows = np.flatnonzero(chosen == OPERATORS.index(name))
        if name in _FACTORS and (has_colours or name != "saturation"):
            yield name, rows, 1.0 + _FACTOR * share * sign[rows, None]
        elif name == "posterize":
            yield name, rows, np.full((len(rows), 1), float(_BITS - round(share * (_BITS - _FEWEST_BITS))))
        elif name == "solarize":
            yield name, rows, np.full((len(rows), 1), 1.0 - share)
        elif name in ("autocontrast", "equalize"):
            yield name, rows, np.empty((len(rows), 0))


def _matrices(name: str, strength: Numbers) -> Numbers:
    """Return matrices [k, 6] that map a pixel (x, y) of the new image to the old one.

    x' = a x + b y + c, y' = d x + e y + f, in pixels from the middle.
    """
    matrices = np.tile([1.0, 0.0, 0.0, 0.0, 1.0, 0.0], (len(strength), 1))
    if name == "rotate":
        matrices[:, 0] = matrices[:, 4] = np.cos(strength)
        matrices[:, 1], matrices[:, 3] = np.sin(strength), -np.sin(strength)
    else:
        matrices[:, {"shear_x": 1, "shear_y": 3, "translate_x": 2, "translate_y": 5}[name]] = strength
    return matrices


Rows = NDArray[np.int64]

_PIXELS, _LABEL, _WEIGHT = 1, 2, 3
"""Random streams of a sample; stream 0 is for its data set's own `augment`."""
_TRIES = 10
"""Number of boxes that are drawn to find one that fits, as torchvision does."""
_BOX = 2 * _TRIES + 2
_CROP = slice(0, _BOX)
_FLIP = _CROP.stop
_COLOURS = slice(_FLIP + 1, _FLIP + 5)
_ERASE = slice(_COLOURS.stop, _COLOURS.stop + _BOX)
_IS_ERASED, _IS_MIXED, _IS_CUT, _CUT_Y, _CUT_X = range(_ERASE.stop, _ERASE.stop + 5)
_FIRST_OP = _CUT_X + 1
_ERASED_AREA, _ERASED_ASPECT = (0.02, 0.33), (math.log(0.3), math.log(3.3))
"""Zhong et al. 2020, as torchvision's defaults."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of loaded images, and of those that the model sees, in pixels."""

    height: int
    width: int
    out_height: int
    out_width: int


class Program:
    """Operators that change rows of a batch, in order: (name, number of rows, numbers a row) each.

    A plain class, so that code that walks a batch for its tensors (`batches.py`) passes over it.
    """

    __slots__ = ("steps",)

    def __init__(self, steps: tuple[tuple[str, int, int], ...]) -> None:
        self.steps = steps


@dataclass(slots=True)
class Drawn:
    """Images and the random numbers drawn for them, before their pixels are changed.

    The numbers of all operators are in two small tensors: each further tensor would cost a GPU copy's start-up time.

    `images`: the batch's, then partners of mixed ones. `rows` (int64) and `numbers` (float32): inputs of the operators
    of `program`, one after the other. `num_samples`: images of the batch.
    """

    images: Tensor
    rows: Tensor
    numbers: Tensor
    program: Program
    num_samples: int


@dataclass(frozen=True, slots=True)
class Mixes:
    """Samples of a batch that are mixed.

    `rows`: their rows in the batch. `partners`: the index of each one's partner in the data set. `places`: rows of the
    partners among the images that are read. `weights`: weight of the sample itself. `boxes`: (top, left, height, width)
    that come from the partner, if `is_cut`.
    """

    rows: Rows
    partners: Rows
    places: Rows
    weights: Numbers
    boxes: Numbers
    is_cut: NDArray[np.bool_]

    def only(self, kept: NDArray[np.bool_]) -> Mixes:
        """Return the mixes for which `kept` is true."""
        return Mixes(*(getattr(self, field.name)[kept] for field in dataclasses.fields(self)))


class Builder:
    """Builder of a program from its steps, (operator, rows, numbers) each."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, Rows, Numbers]] = []

    def add(self, name: str, rows: Rows, numbers: Numbers) -> None:
        """Add operator `name` with `numbers` [k, width] for `rows` [k]; [2 k] if the operator takes partners too."""
        if len(numbers):
            self.steps.append((name, rows, numbers))

    def drawn(self, images: Tensor, num_samples: int) -> Drawn:
        """Return `images` together with all inputs of the operators."""
        rows = np.concatenate([np.empty(0, dtype=np.int64), *(rows for _, rows, _ in self.steps)])
        numbers = np.concatenate([np.empty(0), *(numbers.ravel() for *_, numbers in self.steps)]).astype(np.float32)
        program = Program(tuple((name, *numbers.shape) for name, _, numbers in self.steps))
        return Drawn(images, torch.from_numpy(rows), torch.from_numpy(numbers), program, num_samples)


def uniforms(
    config: AugmentConfig, seed: int, samples: Sequence[tuple[int, int]]
) -> tuple[Numbers, NDArray[np.uint64]]:
    """Return for each (epoch, sample) its numbers in [0, 1), [n, count], and one more 64-bit word, [n]."""
    count = _FIRST_OP + 2 * config.randaugment_ops
    words = np.empty((len(samples), 1 + count), dtype=np.uint64)
    for row, (epoch, sample) in enumerate(samples):
        words[row] = bits_of(seed, epoch, sample, _PIXELS).random_raw(1 + count)
    numbers: Numbers = (words[:, 1:] >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers, words[:, 0]


def new_class(seed: int, sample: int, share: float, num_classes: int, label: int) -> int:
    """Return `label`, or for a share of samples another class: a function of (seed, sample), alike in all epochs."""
    first, second = map(int, bits_of(seed, 0, sample, _LABEL).random_raw(2))
    if (first >> 11) * 2.0**-53 >= share:
        return label
    return (label + 1 + second % (num_classes - 1)) % num_classes


def mixes(
    config: AugmentConfig, seed: int, samples: Sequence[tuple[int, int]], u: Numbers, words: NDArray[np.uint64],
    num_samples: int, shape: Shape,
) -> Mixes:  # fmt: skip
    """Draw the partners that samples of a batch are mixed with.

    Args:
        num_samples: samples of the data set, any of which may be a partner.
    """
    rows = np.flatnonzero(u[:, _IS_MIXED] < config.mix_share)
    is_cut = u[rows, _IS_CUT] >= (0.5 if config.mixup_alpha else 0.0)
    if not config.cutmix_alpha:
        is_cut[:] = False
    weights = np.empty(len(rows))
    for place, row in enumerate(rows.tolist()):
        alpha = config.cutmix_alpha if is_cut[place] else config.mixup_alpha
        epoch, sample = samples[row]
        weights[place] = np.random.Generator(bits_of(seed, epoch, sample, _WEIGHT)).beta(alpha, alpha)
    boxes = _cut_boxes(weights, u[rows, _CUT_Y], u[rows, _CUT_X], shape)
    kept = 1.0 - boxes[:, 2] * boxes[:, 3] / (shape.out_height * shape.out_width)
    partners = (words[rows] % np.uint64(num_samples)).astype(np.int64)
    return Mixes(
        rows=rows, partners=partners, places=len(samples) + np.arange(len(rows)),
        weights=np.where(is_cut, kept, weights), boxes=boxes, is_cut=is_cut,
    )  # fmt: skip


def add_images(config: AugmentConfig, u: Numbers, shape: Shape, build: Builder, *, has_colours: bool) -> None:
    """Add the operators that change each image by itself: crop, flip, RandAugment, colours, erasing."""
    everyone = np.arange(len(u))
    _add_crop(config, u, shape, build, everyone)
    if config.randaugment_ops:
        for number in range(config.randaugment_ops):
            first = _FIRST_OP + 2 * number
            operators = of_one_round(
                u[:, first], u[:, first + 1], config.randaugment_magnitude, shape.out_height, shape.out_width,
                has_colours=has_colours,
            )  # fmt: skip
            for name, rows, numbers in operators:
                build.add(name, rows, numbers)
    around = 2.0 * u[:, _COLOURS] - 1.0
    for place, name in enumerate(("brightness", "contrast", "saturation")):
        strength = getattr(config, name)
        if strength:
            build.add(name, everyone, 1.0 + strength * around[:, [place]])
    if config.hue:
        build.add("hue", everyone, 2.0 * math.pi * config.hue * around[:, [3]])
    if config.erasing:
        boxes, fits = _boxes(u[:, _ERASE], shape.out_height - 1, shape.out_width - 1, _ERASED_AREA, _ERASED_ASPECT)
        boxes = _placed(boxes, u[:, _ERASE], shape.out_height, shape.out_width)
        boxes[~(fits & (u[:, _IS_ERASED] < config.erasing))] = 0.0
        build.add("erase", everyone, boxes)


def add_mixes(mixes: Mixes, build: Builder) -> None:
    """Add the operators that mix two images."""
    for name, chosen, numbers in (
        ("mixup", ~mixes.is_cut, mixes.weights[:, None]),
        ("cutmix", mixes.is_cut, mixes.boxes),
    ):
        build.add(name, np.concatenate([mixes.rows[chosen], mixes.places[chosen]]), numbers[chosen])


def _add_crop(config: AugmentConfig, u: Numbers, shape: Shape, build: Builder, everyone: Rows) -> None:
    is_flipped = u[:, _FLIP] < config.flip
    if config.crop is Crop.resized:
        log_aspect = math.log(config.crop_aspect)
        boxes, fits = _boxes(u[:, _CROP], shape.height, shape.width, (config.crop_area, 1.0), (-log_aspect, log_aspect))
        boxes[~fits, 2:] = _middle(shape, config.crop_aspect)
        boxes = _placed(boxes, u[:, _CROP], shape.height, shape.width)
        boxes[~fits, :2] = (np.array([shape.height, shape.width]) - boxes[~fits, 2:]) // 2
        top, left, height, width = boxes.T
        # Position of a new image's pixel in the old one, both measured from the middle.
        zero, sign = np.zeros(len(u)), np.where(is_flipped, -1.0, 1.0)
        across = [sign * width / shape.out_width, zero, left + width / 2 - shape.width / 2]
        down = [zero, height / shape.out_height, top + height / 2 - shape.height / 2]
        build.add("resized_crop", everyone, np.stack([*across, *down], axis=1))
    elif config.crop is Crop.padded:
        border = 2 * config.crop_padding
        top = np.floor(u[:, _CROP.stop - 2] * (shape.height + border - shape.out_height + 1))
        left = np.floor(u[:, _CROP.stop - 1] * (shape.width + border - shape.out_width + 1))
        build.add("padded_crop", everyone, np.stack([top, left, is_flipped], axis=1))
    else:
        build.add("flip", np.flatnonzero(is_flipped), np.empty((int(is_flipped.sum()), 0)))


def _boxes(
    u: Numbers, height: int, width: int, area: tuple[float, float], log_aspect: tuple[float, float]
) -> tuple[Numbers, NDArray[np.bool_]]:
    """Return (the first drawn box that fits, [n, 4], at place 0; True for rows where a box fits)."""
    areas = height * width * (area[0] + (area[1] - area[0]) * u[:, :_TRIES])
    aspects = np.exp(log_aspect[0] + (log_aspect[1] - log_aspect[0]) * u[:, _TRIES : 2 * _TRIES])
    widths, heights = np.rint(np.sqrt(areas * aspects)), np.rint(np.sqrt(areas / aspects))
    fit = np.logical_and.reduce([widths >= 1, widths <= width, heights >= 1, heights <= height])
    everyone, first = np.arange(len(u)), fit.argmax(axis=1)
    boxes = np.zeros((len(u), 4))
    boxes[:, 2], boxes[:, 3] = heights[everyone, first], widths[everyone, first]
    return boxes, fit[everyone, first]


def _placed(boxes: Numbers, u: Numbers, height: int, width: int) -> Numbers:
    """Move the boxes to random places inside an image, in place, and return them."""
    boxes[:, 0] = np.floor(u[:, -2] * (height - boxes[:, 2] + 1))
    boxes[:, 1] = np.floor(u[:, -1] * (width - boxes[:, 3] + 1))
    return boxes


def _middle(shape: Shape, aspect: float) -> tuple[float, float]:
    """Return (height, width) of the largest box of a legal aspect ratio."""
    return min(shape.height, round(shape.width * aspect)), min(shape.width, round(shape.height * aspect))


def _cut_boxes(weights: Numbers, u_y: Numbers, u_x: Numbers, shape: Shape) -> Numbers:
    """Return the boxes (top, left, height, width) that partners fill: around a drawn place, cut to the image."""
    spans = []
    for u, size in ((u_y, shape.out_height), (u_x, shape.out_width)):
        side, middle = np.floor(size * np.sqrt(1.0 - weights)), np.floor(u * size)
        low = np.maximum(middle - side // 2, 0)
        spans.append((low, np.minimum(middle - side // 2 + side, size) - low))
    (top, height), (left, width) = spans
    return np.stack([top, left, height, width], axis=1)
