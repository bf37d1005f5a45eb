"""Augmentation of training samples where they are read or on the device: data sets around the run's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpc_trainer.errors import ConfigError
from hpc_trainer.features.augment import AugmentConfig, RunOn, draw
from hpc_trainer.features.augment.draw import Drawn, Shape
from hpc_trainer.features.augment.operators import Operators
from hpc_trainer.tasks.cross_entropy import IGNORED
from hpc_trainer.training.ability import Ability
from hpc_trainer.training.data.protocol import MapDataset, Split, by_epoch, hand_on

_CACHED_BYTES = 2**21
"""Bytes of images that are read and changed at a time on a CPU, so that they stay in its cache."""


class Cropped:
    """Samples of `source` with images cropped to the centre [C, size, size], as evaluations see them.

    Raises:
        ConfigError: the samples are not images, or too small.
    """

    def __init__(self, source: MapDataset, config: AugmentConfig) -> None:
        self._source, self._config = source, config
        self.input_shape = source.input_shape
        self.num_classes = source.num_classes
        hand_on(source, self, "fingerprint", "all_targets_count")
        self._shape = _shape(source, config) if config.changes_images else None
        if self._shape is not None and source.input_shape is not None:
            self.input_shape = (source.input_shape[0], self._shape.out_height, self._shape.out_width)
            made = getattr(source, "preprocessing", None)
            if made is not None and self.input_shape != tuple(source.input_shape):
                self.preprocessing = {**made, "then_crop": list(self.input_shape[1:])}

    def __len__(self) -> int:
        return len(self._source)

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return a batch of `source`, cropped; nothing is drawn."""
        inputs, targets = self._source.__getitems__(indices)
        return self._middle(inputs), targets

    def _middle(self, inputs: Tensor) -> Tensor:
        shape = self._shape
        if shape is None or (shape.height, shape.width) == (shape.out_height, shape.out_width):
            return inputs
        top, left = (shape.height - shape.out_height) // 2, (shape.width - shape.out_width) // 2
        return inputs[..., top : top + shape.out_height, left : left + shape.out_width].contiguous()


class AugmentedSamples(Cropped):
    """Training samples, augmented.

    Raises:
        ConfigError: as `Cropped`, or colours or classes are not as the operators need them.
    """

    def __init__(self, source: MapDataset, config: AugmentConfig) -> None:
        super().__init__(source, config)
        if getattr(source, "stream", None) is not None:
            raise ConfigError(
                "augment draws by a sample's number, and a stream has none. Use augment=none, and change samples in "
                "the stream itself, by a generator whose state is in its state_dict()."
            )
        self._by_epoch = by_epoch(source)
        self.operators = self._made_operators() if self._shape is not None else None
        """Operators that change pixels; None if nothing does."""

    def training_batch(self, samples: Sequence[tuple[int, int]], seed: int) -> tuple[Any, Tensor]:
        """Return a training batch, as the protocol says.

        With `run_on=device` inputs are `Drawn`. With mixes, targets are shares of classes [batch, num_classes],
        float32; a row of zeros does not count.

        A sample's partner is any sample of the data set, with the changes of this epoch. The partner is a function of
        (seed, epoch, sample) too, so it must be read in addition.
        """
        shape, operators = self._shape, self.operators
        if shape is None or operators is None:
            inputs, targets = self._read(samples, seed)
            return inputs, self._noisy(targets, samples, seed)
        if self._config.run_on is RunOn.device:
            return self._drawn(samples, seed, shape)
        channels = (self.input_shape or (1,))[0]
        images = torch.empty(len(samples), channels, shape.out_height, shape.out_width)
        at_once = max(1, _CACHED_BYTES // (4 * channels * shape.height * shape.width))
        parts = []
        for start in range(0, len(samples), at_once):
            drawn, targets = self._drawn(samples[start : start + at_once], seed, shape)
            images[start : start + at_once] = operators(drawn)
            parts.append(targets)
        return images, torch.cat(parts)

    def _drawn(self, samples: Sequence[tuple[int, int]], seed: int, shape: Shape) -> tuple[Drawn, Tensor]:
        config, num = self._config, len(samples)
        u, words = draw.uniforms(config, seed, samples)
        mixes = None
        if config.has_mixes:
            mixes = draw.mixes(config, seed, samples, u, words, len(self), shape)
            partners = [
                (samples[row][0], other)
                for row, other in zip(mixes.rows.tolist(), mixes.partners.tolist(), strict=True)
            ]
            samples = [*samples, *partners]
            u = np.concatenate([u, draw.uniforms(config, seed, partners)[0]])
        inputs, targets = self._read(samples, seed)
        targets = self._noisy(targets, samples, seed)
        build = draw.Builder()
        draw.add_images(config, u, shape, build, has_colours=inputs.shape[1] > 1)
        if mixes is not None:
            # A sample without a class is mixed with nothing.
            mixes = mixes.only((targets[mixes.rows] != IGNORED).numpy() & (targets[mixes.places] != IGNORED).numpy())
            draw.add_mixes(mixes, build)
            targets = self._shares(targets, num, mixes)
        return build.drawn(inputs, num), targets

    def _read(self, samples: Sequence[tuple[int, int]], seed: int) -> tuple[Tensor, Tensor]:
        if self._by_epoch is not None:
            inputs, targets = self._by_epoch.training_batch(samples, seed)
        else:
            inputs, targets = self._source.__getitems__([sample for _, sample in samples])
        self._check(inputs, targets)
        return inputs, targets

    def _check(self, inputs: Tensor, targets: Tensor) -> None:
        shape, said = list(inputs.shape[1:]), list(self._source.input_shape or ())
        if self._shape is not None and (inputs.dtype is not torch.float32 or shape != said):
            raise ConfigError(
                f"augment changes images of float32, {said} as the data's input_shape says, and these are "
                f"{inputs.dtype} {shape}. Convert them in the data set, or use augment=none."
            )
        if (self._config.has_mixes or self._config.label_noise) and targets.ndim != 1:
            raise ConfigError(
                f"augment.mixup_alpha, cutmix_alpha and label_noise are for one class a sample, and these targets are "
                f"{list(targets.shape)}. Use augment.mixup_alpha=0 augment.cutmix_alpha=0 augment.label_noise=0."
            )

    def _noisy(self, targets: Tensor, samples: Sequence[tuple[int, int]], seed: int) -> Tensor:
        share, num_classes = self._config.label_noise, self.num_classes
        if not share:
            return targets
        assert num_classes is not None
        labels = [
            label if label == IGNORED else draw.new_class(seed, sample, share, num_classes, label)
            for (_, sample), label in zip(samples, targets.tolist(), strict=True)
        ]
        return torch.tensor(labels)

    def _shares(self, targets: Tensor, num_samples: int, mixes: draw.Mixes) -> Tensor:
        """Return shares of classes [num_samples, num_classes], mixed with those of partners.

        Args:
            targets: classes of the samples, then of the partners that `mixes` names.
        """
        assert self.num_classes is not None
        mixed, weights = torch.from_numpy(mixes.rows), torch.from_numpy(mixes.weights).float()
        own = torch.ones(num_samples)
        own[mixed] = weights
        shares = torch.zeros(num_samples, self.num_classes)
        (counted,) = torch.where(targets[:num_samples] != IGNORED)
        shares[counted, targets[counted]] = own[counted]
        shares[mixed, targets[mixes.places]] += 1.0 - weights
        return shares

    def _made_operators(self) -> Operators:
        config, shape = self._config, self._shape
        assert shape is not None
        assert self.input_shape is not None
        pixels = None
        if hasattr(self, "pixel_mean") and hasattr(self, "pixel_std"):
            pixels = tuple(map(float, self.pixel_mean)), tuple(map(float, self.pixel_std))
        if config.changes_colours and pixels is None:
            raise ConfigError(
                "augment changes colours (brightness, contrast, saturation, hue, randaugment_ops), and the data do not "
                "say what black and white are. Give the data set attributes pixel_mean and pixel_std, a number for "
                "each channel: values × pixel_std + pixel_mean are pixels from 0 to 1 (docs/augment.md)."
            )
        if (config.saturation or config.hue) and self.input_shape[0] != 3:
            raise ConfigError(
                f"augment.saturation and augment.hue are for images of 3 channels, and these have "
                f"{self.input_shape[0]}. Use augment.saturation=0 augment.hue=0."
            )
        return Operators(config, shape, pixels)


def _shape(source: MapDataset, config: AugmentConfig) -> Shape:
    if source.input_shape is None or len(source.input_shape) != 3:
        raise ConfigError(
            f"augment changes images, [channels, height, width], and the data's input_shape is {source.input_shape}. "
            "Use augment=none."
        )
    _, height, width = source.input_shape
    smallest = min(height, width)
    if config.size is not None and config.size > smallest:
        raise ConfigError(
            f"augment.size={config.size} must be at most {smallest}, the smaller side of the loaded images: "
            f"evaluations crop their centre. Use augment.size={smallest}."
        )
    return Shape(height, width, config.size or height, config.size or width)


class AugmentAbility(Ability):
    _operators: Operators | None = None
    """Operators for `run_on=device`; None otherwise."""

    def samples(self, dataset: MapDataset, split: Split) -> MapDataset:
        if split == "eval":
            return Cropped(dataset, self.config.augment)
        made = AugmentedSamples(dataset, self.config.augment)
        if self.config.augment.run_on is RunOn.device:
            self._operators = made.operators
        return made

    def inputs(self, inputs: Any) -> torch.Tensor:
        if not isinstance(inputs, Drawn):
            return inputs  # type: ignore[no-any-return]
        assert self._operators is not None
        return self._operators(inputs)


ABILITY = AugmentAbility
