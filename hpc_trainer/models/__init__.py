"""Small, readable reference models, and their common checks of the data's shapes.

The values of a configuration were checked when the run was planned (`config/rules/declared_rules.py`).

Each file holds one class, built as `Class(config, input_shape=..., num_classes=...)`; both values come
from the data set. `forward(inputs)` returns logits:

    images  float32 [batch, channels, height, width]  ->  [batch, num_classes]            all but
    numbers float32 [batch, ...]                      ->  [batch, num_classes]            Mlp
    tokens  int64   [batch, seq_len]                  ->  [batch, seq_len, num_classes]   Gpt

No model uses an operation whose CUDA backward pass is nondeterministic (adaptive pooling to more than 1x1,
for instance), so that a resumed run can equal the uninterrupted one bit for bit.
"""

from __future__ import annotations

from hpc_trainer.errors import ConfigError


def check_num_classes(value: int) -> None:
    """Raise ConfigError unless there is at least one output: a class, or a number of a regression."""
    if value < 1:
        raise ConfigError(f"data.num_classes={value!r} must be ≥ 1; nearest legal: data.num_classes=1.")


def image_shape(model: str, input_shape: tuple[int, ...], *, smallest: int) -> tuple[int, int, int]:
    """Return (channels, height, width) of an image data set.

    Raises:
        ConfigError: the data set holds no images, or images below `smallest` pixels on a side.
    """
    if len(input_shape) != 3:
        raise ConfigError(
            f"model={model} reads images, so the data's input_shape must be (channels, height, width), "
            f"but it is {input_shape}. Choose data=digits or data=synthetic_images; for tokens, model=gpt."
        )
    channels, height, width = input_shape
    if channels < 1 or height < smallest or width < smallest:
        nearest = (max(channels, 1), max(height, smallest), max(width, smallest))
        raise ConfigError(
            f"model={model} reads images of ≥ 1 channel and ≥ {smallest} pixels a side, but the data's "
            f"input_shape is {input_shape}. Choose larger images; nearest legal: {nearest}."
        )
    return channels, height, width
