"""µs a sample of each operator, beside a loop by hand over samples that calls kornia's functional operators."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import kornia.enhance
import kornia.geometry
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hpc_trainer.features.augment import AugmentConfig, Crop
from hpc_trainer.features.augment.augment import AugmentedSamples
from hpc_trainer.features.augment.draw import OPERATORS

REPEATS, SIDES = 9, {32: 128, 224: 16}
"""Side in pixels: samples of a batch."""
_COLOURS = {
    "brightness": kornia.enhance.adjust_brightness_accumulative,
    "contrast": kornia.enhance.adjust_contrast_with_mean_subtraction,
    "saturation": kornia.enhance.adjust_saturation_with_gray_subtraction,
    "hue": kornia.enhance.adjust_hue,
}
_Change = Callable[[Tensor, np.random.Generator], Tensor]
"""Of one image [1, C, H, W], as one writes it in a data set's __getitem__."""


class Images:
    """In memory, normalised; by hand from pixels, as one has them there."""

    num_classes = 10
    pixel_mean, pixel_std = (0.45,) * 3, (0.25,) * 3

    def __init__(self, side: int) -> None:
        self.input_shape = (3, side, side)
        self.pixels = torch.rand(256, *self.input_shape)
        self.images = _normalised(self.pixels)

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        rows = torch.tensor(list(indices))
        return self.images[rows], rows % self.num_classes


def _normalised(image: Tensor, draw: np.random.Generator | None = None) -> Tensor:
    return kornia.enhance.normalize(image, torch.tensor(Images.pixel_mean), torch.tensor(Images.pixel_std))


def _resized(image: Tensor, draw: np.random.Generator) -> Tensor:
    side = image.shape[-1]
    for _ in range(10):
        area, aspect = side * side * draw.uniform(0.08, 1.0), math.exp(draw.uniform(math.log(3 / 4), math.log(4 / 3)))
        width, height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if width <= side and height <= side:
            break
    top, left = int(draw.integers(side - height + 1)), int(draw.integers(side - width + 1))
    part = image[:, :, top : top + height, left : left + width]
    return kornia.geometry.resize(part, (side, side), align_corners=False)


def _padded(image: Tensor, draw: np.random.Generator) -> Tensor:
    side = image.shape[-1]
    top, left = draw.integers(9, size=2).tolist()
    return functional.pad(image, (4, 4, 4, 4))[:, :, top : top + side, left : left + side]


def _flipped(image: Tensor, draw: np.random.Generator) -> Tensor:
    return kornia.geometry.hflip(image) if draw.random() < 0.5 else image


def _three_colours(image: Tensor, draw: np.random.Generator) -> Tensor:
    for name in ("brightness", "contrast", "saturation"):
        image = _COLOURS[name](image, draw.uniform(0.6, 1.4))
    return image


def _four_colours(image: Tensor, draw: np.random.Generator) -> Tensor:
    for name, change in _COLOURS.items():
        factor = draw.uniform(-0.1, 0.1) * 2 * math.pi if name == "hue" else draw.uniform(0.6, 1.4)
        image = change(image, factor)
    return image


def _randaugment(image: Tensor, draw: np.random.Generator) -> Tensor:
    for _ in range(2):
        name, share, sign = OPERATORS[draw.integers(14)], 0.3, float(draw.choice([-1.0, 1.0]))
        if name in _COLOURS:
            image = _COLOURS[name](image, 1 + 0.9 * share * sign)
        elif name == "sharpness":
            image = kornia.enhance.sharpness(image, 1 + 0.9 * share * sign)
        elif name == "posterize":
            image = kornia.enhance.posterize(image, 7)
        elif name == "solarize":
            image = kornia.enhance.solarize(image, 1 - share)
        elif name == "autocontrast":
            image = kornia.enhance.normalize_min_max(image)
        elif name == "equalize":
            image = kornia.enhance.equalize(image)
        elif name == "rotate":
            image = kornia.geometry.rotate(image, torch.tensor([30 * share * sign]))
        elif name.startswith("shear"):
            image = kornia.geometry.shear(image, torch.tensor([[0.3 * share * sign, 0.0]]))
        elif name.startswith("translate"):
            image = kornia.geometry.translate(image, torch.tensor([[0.45 * image.shape[-1] * share * sign, 0.0]]))
    return image


def _erased(image: Tensor, draw: np.random.Generator) -> Tensor:
    side = image.shape[-1]
    area, aspect = side * side * draw.uniform(0.02, 0.33), math.exp(draw.uniform(math.log(0.3), math.log(3.3)))
    height, width = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
    if height < side and width < side:
        top, left = int(draw.integers(side - height + 1)), int(draw.integers(side - width + 1))
        image = image.clone()
        image[:, :, top : top + height, left : left + width] = 0.0
    return image


CASES: dict[str, tuple[dict[str, Any], list[_Change]]] = {
    "crop=resized": ({"crop": Crop.resized}, [_resized]),
    "crop=padded": ({"crop": Crop.padded}, [_padded]),
    "flip=0.5": ({"flip": 0.5}, [_flipped]),
    "four colours": ({"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1}, [_four_colours]),
    "randaugment_ops=2": ({"randaugment_ops": 2}, [_randaugment]),
    "erasing=1": ({"erasing": 1.0}, [_erased]),
    "mixup_alpha=0.2": ({"mixup_alpha": 0.2}, []),
    "augment=imagenet": (
        {"crop": Crop.resized, "flip": 0.5, "brightness": 0.4, "contrast": 0.4, "saturation": 0.4},
        [_resized, _flipped, _three_colours],
    ),
    "augment=randaugment": (
        {"crop": Crop.resized, "flip": 0.5, "randaugment_ops": 2, "erasing": 0.25},
        [_resized, _flipped, _randaugment, _erased],
    ),
}


def _by_hand(source: Images, changes: Sequence[_Change], indices: Sequence[int], draw: np.random.Generator) -> Tensor:
    """One sample after the other, stacked as a loader collates them."""
    found = []
    for index in indices:
        image = source.pixels[index : index + 1]
        for change in changes:
            image = change(image, draw)
        if not changes:  # mixup
            weight, other = draw.beta(0.2, 0.2), int(draw.integers(len(source)))
            image = image * weight + source.pixels[other : other + 1] * (1 - weight)
        image = _normalised(image)
        found.append(image[0])
    return torch.stack(found)


def _us_a_sample(make: Callable[[], object], count: int) -> float:
    begin = time.process_time()
    make()
    return (time.process_time() - begin) / count * 1e6


def run() -> None:
    """Prints the table: medians and range of processor time, one thread, both ways in turn."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    print(f"\naugmentation, processor time in µs a sample, 3 channels, {REPEATS} batches each\n")
    print("| operator | pixels | ours | by hand | ours / by hand |\n|---|---|---|---|---|")
    for side, size in SIDES.items():
        source, draw, indices = Images(side), np.random.Generator(np.random.PCG64(0)), list(range(size))
        for name, (keys, changes) in CASES.items():
            ours = AugmentedSamples(source, AugmentConfig(**keys))
            seen: dict[str, list[float]] = {"ours": [], "by hand": []}
            for epoch in range(REPEATS + 2):
                samples = [(epoch, index) for index in indices]
                found = {
                    "ours": _us_a_sample(lambda: ours.training_batch(samples, 0), size),  # noqa: B023
                    "by hand": _us_a_sample(lambda: _by_hand(source, changes, indices, draw), size),  # noqa: B023
                }
                if epoch >= 2:  # the first ones fill caches
                    for way, value in found.items():
                        seen[way].append(value)
            told = [f"{statistics.median(each):.0f} ({min(each):.0f} to {max(each):.0f})" for each in seen.values()]
            ratio = statistics.median(seen["ours"]) / statistics.median(seen["by hand"])
            print(f"| {name} | {side} | {told[0]} | {told[1]} | {ratio:.2f} |", flush=True)
    torch.set_num_threads(threads)


if __name__ == "__main__":
    run()
