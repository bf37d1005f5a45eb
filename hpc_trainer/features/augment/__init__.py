"""`augment`: random changes of training samples (docs/augment.md)."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_trainer.config.packages import missing
from hpc_trainer.config.schema.data import DigitsConfig
from hpc_trainer.config.schema.features.augment import OF_COLOURS, OF_IMAGES, AugmentConfig, RunOn
from hpc_trainer.config.schema.model import Trait
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.feature import OF_SHARED_LOOP, Feature, Row
from hpc_trainer.config.table.kinds import datasets, models

_IMAGES = " or ".join(OF_IMAGES)
_MIXES = "augment.mixup_alpha or augment.cutmix_alpha"
_ON_DEVICE = "augment.run_on=device"


def _problems(config: TrainConfig) -> Iterator[str]:
    augment = config.augment
    side, channels = _side(config), _channels(config)
    if augment.run_on is RunOn.device and not augment.changes_images:
        yield (
            "augment.run_on=device is where images are changed, and nothing changes them. Use augment.run_on=workers, "
            "or augment=flip_crop augment.run_on=device."
        )
    if augment.size is not None and side is not None and augment.size > side:
        yield (
            f"augment.size={augment.size} must be at most {side}, the side of the images of data={config.data.name}: "
            f"evaluations take the middle of them. Use augment.size={side}."
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
    """Return the side of loaded images in pixels; None if the configuration does not tell."""
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
        Row(datasets(of_text=True), "it is for images, and these are tokens"),
        Row("data=table", "it is for images, and these are columns", when=_IMAGES, use="data=image_folder"),
        Row(models(having=[Trait.reads_tokens]), "it is for images, and such a model reads tokens"),
        Row("task=custom", "nobody knows which of your batch are images and classes"),
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
            "FSDP hands targets over in it too, and weights would be rounded",
            when=_MIXES,
        ),
        Row(
            "parallel.pipeline_parallel",
            "stages take images as they are",
            when=_ON_DEVICE,
            use="augment.run_on=workers",
        ),
        Row(
            "train.micro_batch_size=auto",
            "it looks for the room of the model alone",
            when=_ON_DEVICE,
            use="augment.run_on=workers",
        ),
        Row("hardware.device=mps|xla", "nobody has tried both", when=_ON_DEVICE, use="augment.run_on=workers"),
    ),
    before=("channels_last",),
    problems=_problems,
)
