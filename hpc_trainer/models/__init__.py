"""Small, readable reference models, and the checks that they share.

Each file holds one class, built as `Class(config, input_shape=..., num_classes=...)`; the two shapes come
from the data set. `forward(inputs)` returns logits:

    images  float32 [batch, channels, height, width]  ->  [batch, num_classes]            all but
    numbers float32 [batch, ...]                      ->  [batch, num_classes]            Mlp
    tokens  int64   [batch, seq_len]                  ->  [batch, seq_len, num_classes]   Gpt

No model uses an operation whose CUDA backward pass is nondeterministic (adaptive pooling to more than 1x1,
for instance), so that a resumed run can equal the uninterrupted one bit for bit.
"""

from __future__ import annotations

from hpc_trainer.errors import ConfigError

_LARGEST_DROPOUT_SHOWN = 0.9


def check_at_least(key: str, value: int, smallest: int) -> None:
    """Raise ConfigError unless `value` ≥ `smallest`."""
    if value < smallest:
        raise ConfigError(f"{key}={value!r} must be ≥ {smallest}; nearest legal: {key}={smallest}.")


def check_dropout(value: float) -> None:
    """Raise ConfigError unless `value` is a probability in [0, 1); 1 would drop everything."""
    if not 0.0 <= value < 1.0:
        nearest = _LARGEST_DROPOUT_SHOWN if value >= 1.0 else 0.0
        raise ConfigError(f"model.dropout={value!r} must be a probability in [0, 1); nearest: model.dropout={nearest}.")


def check_num_classes(value: int) -> None:
    """Raise ConfigError unless there is an output: a class, or a number of a regression."""
    check_at_least("data.num_classes", value, 1)


def check_heads(num_heads: int, embed_dim: int) -> None:
    """Raise ConfigError unless `num_heads` divides `embed_dim`, both ≥ 1."""
    check_at_least("model.num_heads", num_heads, 1)
    check_at_least("model.embed_dim", embed_dim, 1)
    if embed_dim % num_heads:
        divisors = [count for count in range(1, embed_dim + 1) if embed_dim % count == 0]
        nearest = min(divisors, key=lambda count: abs(count - num_heads))
        raise ConfigError(
            f"model.num_heads={num_heads} must divide model.embed_dim={embed_dim}; "
            f"nearest legal: model.num_heads={nearest}."
        )


def image_shape(model: str, input_shape: tuple[int, ...], *, smallest: int) -> tuple[int, int, int]:
    """(channels, height, width) of an image data set.

    Raises ConfigError where the data set holds no images, or images below `smallest` pixels on a side.
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
