"""`augment`: random changes of training samples (docs/augment.md)."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_trainer.config.packages import missing
from hpc_trainer.config.schema.data import DigitsConfig
from hpc_trainer.config.schema.key import ALWAYS, INCOMPATIBLE, ONCE_SET, RULED, SCHEDULE, key, only_with, section
from hpc_trainer.config.schema.model import Trait
from hpc_trainer.config.table.feature import OF_SHARED_LOOP, Feature, Row, datasets, models

if TYPE_CHECKING:
    from hpc_trainer.config.schema.train import TrainConfig


class RunOn(str, enum.Enum):
    """Place where pixels are changed."""

    workers = "workers"
    device = "device"


class Crop(str, enum.Enum):
    """Part of an image that is used."""

    none = "none"
    resized = "resized"
    padded = "padded"


OF_IMAGES = (
    "augment.crop", "augment.flip", "augment.brightness", "augment.contrast", "augment.saturation", "augment.hue",
    "augment.randaugment_ops", "augment.erasing", "augment.mixup_alpha", "augment.cutmix_alpha",
)  # fmt: skip
"""Keys that change pixels unless they are at their default."""

OF_COLOURS = ("brightness", "contrast", "saturation", "hue")

_WITH_CROP = only_with("augment.crop=resized", "augment.crop=padded")

_WITH_MIXES = only_with("augment.mixup_alpha", "augment.cutmix_alpha")


@dataclass(kw_only=True, slots=True)
class AugmentConfig:
    """Random changes that follow from (seed, epoch, sample): the same on any number of ranks, and after a resume."""

    run_on: RunOn = key(RunOn.workers, RULED)
    """workers: in loader processes (`data.num_workers`; with 0 in the rank), on the CPU. device: on the model's device,
    a micro-batch at a time. Both draw the same changes."""
    crop: Crop = key(Crop.none, ALWAYS)
    """resized: a part of random area and aspect ratio, resized to `size`. padded: `size` pixels of the image with a
    border of `crop_padding` around it."""
    size: int | None = key(None, _WITH_CROP, resume=INCOMPATIBLE, in_graph=True, limits="≥ 1")
    """Side of the model's images in pixels; evaluations use the middle of the loaded images. null: as loaded."""
    crop_area: float = key(0.08, only_with("augment.crop=resized"), limits="(0, 1]")
    """Smallest share of the image's area that a resized crop takes; the largest is the whole area."""
    crop_aspect: float = key(4 / 3, only_with("augment.crop=resized"), limits="[1, 10]")
    """Largest ratio of width to height, or of height to width, of a resized crop before it is resized."""
    crop_padding: int = key(4, only_with("augment.crop=padded"), limits="≥ 0")
    """Pixels of border on each side: black if the data set defines black, else 0."""
    flip: float = key(0.0, ALWAYS, limits="[0, 1]")
    """Share of images that are turned left to right."""
    brightness: float = key(0.0, ALWAYS, limits="[0, 1]")
    """Pixels are multiplied by a random factor from 1 - brightness to 1 + brightness. 0: off."""
    contrast: float = key(0.0, ALWAYS, limits="[0, 1]")
    """Distances from the image's mean grey are multiplied by a random factor from 1 - contrast to 1 + contrast. 0:
    off."""
    saturation: float = key(0.0, ALWAYS, limits="[0, 1]")
    """Distances from each pixel's grey are multiplied by a random factor from 1 - saturation to 1 + saturation. 0:
    off. For colour images."""
    hue: float = key(0.0, ALWAYS, limits="[0, 0.5]")
    """Largest turn of hues in either direction, as a share of the colour circle. For colour images."""
    randaugment_ops: int = key(0, ALWAYS, limits="0 to 10")
    """RandAugment: number of its 14 operators that are drawn for each image and applied one after the other. 0: off."""
    randaugment_magnitude: int = key(9, only_with("augment.randaugment_ops"), limits="0 to 30")
    """Strength of the operators."""
    erasing: float = key(0.0, ALWAYS, limits="[0, 1]")
    """Share of images in which a rectangle, 2 to 33 % of the area, becomes 0, after all other changes except mixes."""
    mixup_alpha: float = key(0.0, ALWAYS, in_graph=True, limits="[0, 100]")
    """Images and targets are mixed with those of another sample, by a weight from Beta(mixup_alpha, mixup_alpha). 0:
    off."""
    cutmix_alpha: float = key(0.0, ALWAYS, in_graph=True, limits="[0, 100]")
    """A rectangle is taken from another sample, with its share of the area from Beta(cutmix_alpha, cutmix_alpha). If
    both mixes are on, each mixed sample gets one of them with equal probability. 0: off."""
    mix_share: float = key(1.0, _WITH_MIXES, limits="(0, 1]")
    """Share of samples that are mixed."""
    label_noise: float = key(0.0, ALWAYS, limits="[0, 1)")
    """Share of training samples whose class is replaced by another one, the same in each epoch."""

    @property
    def has_mixes(self) -> bool:
        """True if targets are shares of classes."""
        return bool(self.mixup_alpha or self.cutmix_alpha)

    @property
    def changes_colours(self) -> bool:
        """True if colours are changed by value, so that the values of black and white must be known."""
        return bool(self.randaugment_ops or any(getattr(self, name) for name in OF_COLOURS))

    @property
    def changes_images(self) -> bool:
        """True if a key of `OF_IMAGES` is on."""
        of_place = self.crop is not Crop.none or self.flip or self.erasing
        return bool(of_place or self.changes_colours or self.has_mixes)


class Keys:
    """Section `augment` at the root."""

    augment: AugmentConfig = section(AugmentConfig, ONCE_SET, SCHEDULE, in_graph=False)


_IMAGES = " or ".join(OF_IMAGES)
_MIXES = "augment.mixup_alpha or augment.cutmix_alpha"
_ON_DEVICE = "augment.run_on=device"


def _problems(config: TrainConfig) -> Iterator[str]:
    augment = config.augment
    side, channels = _side(config), _channels(config)
    if augment.run_on is RunOn.device and not augment.changes_images:
        yield (
            "augment.run_on=device has no effect: no augmentation is set. Use augment.run_on=workers, or "
            "augment=flip_crop augment.run_on=device."
        )
    if augment.size is not None and side is not None and augment.size > side:
        yield (
            f"augment.size={augment.size} must be at most {side}, the side of the images of data={config.data.name}: "
            f"evaluations crop their centre. Use augment.size={side}."
        )
    if channels == 1:
        for name in ("saturation", "hue"):
            if getattr(augment, name):
                yield (
                    f"augment.{name}={getattr(augment, name):g} is for colour images, and those of "
                    f"data={config.data.name} are grey. Use augment.{name}=0."
                )
    yield from _package(augment)


def _side(config: TrainConfig) -> int | None:
    """Return the side of loaded images in pixels; None if the configuration does not say."""
    side = 8 if isinstance(config.data, DigitsConfig) else getattr(config.data, "image_size", None)
    return side if isinstance(side, int) else None


def _channels(config: TrainConfig) -> int | None:
    channels = 1 if isinstance(config.data, DigitsConfig) else getattr(config.data, "num_channels", None)
    return channels if isinstance(channels, int) else None


def _package(augment: AugmentConfig) -> Iterator[str]:
    chosen = [name for name in (*OF_COLOURS, "randaugment_ops") if getattr(augment, name)]
    problem = missing(f"augment.{chosen[0]}", "kornia") if chosen else None
    if problem is not None:
        yield f"{problem}, or {' '.join(f'augment.{name}=0' for name in chosen)}."


FEATURE = Feature(
    on=f"{_IMAGES} or augment.label_noise",
    example="augment.crop=padded augment.crop_padding=1 augment.flip=0.5 augment.mixup_alpha=0.2",
    excludes=(
        OF_SHARED_LOOP,
        Row(datasets(of_text=True), "it is for images, and the data are tokens"),
        Row("data=table", "it is for images, and the data are columns", when=_IMAGES, use="data=image_folder"),
        Row(models(having=[Trait.reads_tokens]), "it is for images, and the model reads tokens"),
        Row("task=custom", "a custom batch does not say which values are images and classes"),
        Row(
            "task=language_model|regression|multi_label", "it mixes two classes", when=_MIXES, use="task=classification"
        ),
        Row(
            "task=language_model|regression|multi_label",
            "it replaces a class by another one",
            when="augment.label_noise",
            use="task=classification",
        ),
        Row("train.loss_chunk_size", "it computes the loss of one class a sample", when=_MIXES),
        Row(
            "parallel.param_dtype=bf16|fp16",
            "FSDP converts targets to it too, which would round their weights",
            when=_MIXES,
        ),
        Row(
            "parallel.pipeline_parallel",
            "pipeline stages take images unchanged",
            when=_ON_DEVICE,
            use="augment.run_on=workers",
        ),
        Row(
            "train.micro_batch_size=auto",
            "it measures only the memory of the model",
            when=_ON_DEVICE,
            use="augment.run_on=workers",
        ),
        Row("hardware.device=mps|xla", "the combination is untested", when=_ON_DEVICE, use="augment.run_on=workers"),
    ),
    before=("channels_last",),
    problems=_problems,
    problems_if_off=_problems,
)
