"""`data/`: data sets, one dataclass each; `_target_` names the builder in `hpc_trainer.datasets`.

A builder is called as `build(config, split)` with split `train` or `eval` and returns a map-style data set.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """What every data set has. Not chosen itself."""

    name: str = "???"
    _target_: str = "???"
    num_workers: int = 0
    """Loader processes for each rank, ≥ 0; 0 loads in the rank itself."""


@dataclass(kw_only=True, slots=True)
class DigitsConfig(DataConfig):
    """1,797 handwritten digits, 8x8 (scikit-learn, UCI Optical Recognition of Handwritten Digits)."""

    name: str = "digits"
    _target_: str = "hpc_trainer.datasets.digits.build"
    num_eval: int = 360
    """Images held out for evaluation, by a fixed shuffle; 1 to 1796."""
    max_shift: int = 0
    """Pixels by which a training image is moved at most, up or down and sideways, anew in each epoch, 0 to 7"""


@dataclass(kw_only=True, slots=True)
class SyntheticImagesConfig(DataConfig):
    """Images made from (index, data_seed) alone: a class pattern under noise; for speed and shape tests."""

    name: str = "synthetic_images"
    _target_: str = "hpc_trainer.datasets.synthetic_images.build"
    num_samples: int = 10_000
    """Training images, ≥ 1."""
    num_eval: int = 1_000
    """Evaluation images, ≥ 1."""
    image_size: int = 32
    """Height and width in pixels, 8 to 224."""
    num_channels: int = 3
    """Colour channels, 1 or 3."""
    num_classes: int = 10
    """Classes, ≥ 2."""
    data_seed: int = 0
    """Seed of the class patterns and the noise, ≥ 0; apart from the run's seed."""
    keep_in_memory: bool = False
    """Each rank (with num_workers, each loader process) keeps the images that it has made: 4 bytes a value, so 1,000
    images of 224 pixels are 0.6 GB. For what cannot wait for them, as benchmarks; the same images."""


@dataclass(kw_only=True, slots=True)
class SyntheticTokensConfig(DataConfig):
    """Windows of random tokens made from (index, data_seed) alone; for speed and shape tests of language models."""

    name: str = "synthetic_tokens"
    _target_: str = "hpc_trainer.datasets.synthetic_tokens.build"
    num_samples: int = 10_000
    """Training windows, ≥ 1."""
    num_eval: int = 100
    """Evaluation windows, ≥ 1."""
    seq_len: int = 1024
    """Tokens a window predicts, ≥ 2."""
    vocab_size: int = 50_257
    """Tokens to tell apart, 2 to 2**31; GPT-2's are 50,257."""
    data_seed: int = 0
    """Seed of the tokens, ≥ 0; apart from the run's seed."""


@dataclass(kw_only=True, slots=True)
class TextBytesConfig(DataConfig):
    """Windows of bytes of one file, memory-mapped: next-byte prediction on any text."""

    name: str = "text_bytes"
    _target_: str = "hpc_trainer.datasets.text_bytes.build"
    path: str | None = None
    """The file; null: the language reference text that ships inside Python (pydoc_data)."""
    seq_len: int = 128
    """Bytes a sample predicts, ≥ 2."""
    eval_fraction: float = 0.1
    """Share of the file, at its end, held out for evaluation; in (0, 1)."""


@dataclass(kw_only=True, slots=True)
class CustomDataConfig(DataConfig):
    name: str = "custom"
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the builder named by `_target_`."""
