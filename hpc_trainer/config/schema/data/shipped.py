"""`data/`: data sets, one dataclass each; `_target_` names the builder in `hpc_trainer.datasets`.

A builder is called as `build(config, split)` with split `train` or `eval` and returns a map-style data set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from hpc_trainer.config.schema.key import ALWAYS, APART, COUNTS, ONCE_SET, SAFE, SCHEDULE, key


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Base class of every data set; not a choice itself."""

    takes_task: ClassVar[bool] = False
    """True if the task decides how targets are read: the builder is called as `build(config, split, task)`."""
    takes_fed: ClassVar[bool] = False
    """True if the builder takes `fed`, the preprocessing of a trained model's inputs
    (`training/data/preprocessing.py`)."""
    is_text: ClassVar[bool | None] = None
    """True if inputs are tokens, False if they are images or rows of numbers; None if another key or the builder
    decides."""
    name: str = key("???", ALWAYS, COUNTS)
    _target_: str = key("???", ALWAYS, COUNTS)
    num_workers: int = key(0, ALWAYS, APART, SAFE, limits="≥ 0")
    """Loader processes for each rank; 0 loads in the rank itself."""


@dataclass(kw_only=True, slots=True)
class DigitsConfig(DataConfig):
    """1,797 handwritten digits, 8x8 (scikit-learn, UCI Optical Recognition of Handwritten Digits)."""

    takes_fed: ClassVar[bool] = True
    is_text: ClassVar[bool | None] = False
    name: str = "digits"
    _target_: str = "hpc_trainer.datasets.digits.build"
    num_eval: int = key(360, ALWAYS, COUNTS, limits="1 to 1796")
    """Images held out for evaluation, by a fixed shuffle."""
    max_shift: int = key(0, ALWAYS, ONCE_SET, SCHEDULE, limits="0 to 7")
    """Most pixels by which a training image is moved, up or down and sideways, drawn anew in each epoch."""


@dataclass(kw_only=True, slots=True)
class SyntheticImagesConfig(DataConfig):
    """Images generated from (index, data_seed) alone: a class pattern under noise; for speed and shape tests."""

    is_text: ClassVar[bool | None] = False
    name: str = "synthetic_images"
    _target_: str = "hpc_trainer.datasets.synthetic_images.build"
    num_samples: int = key(10_000, ALWAYS, COUNTS, limits="≥ 1")
    """Training images."""
    num_eval: int = key(1_000, ALWAYS, COUNTS, limits="≥ 1")
    """Evaluation images."""
    image_size: int = key(32, ALWAYS, COUNTS, limits="8 to 224")
    """Height and width in pixels."""
    num_channels: int = key(3, ALWAYS, COUNTS, limits="1 or 3")
    """Colour channels."""
    num_classes: int = key(10, ALWAYS, COUNTS, limits="≥ 2")
    """Classes."""
    data_seed: int = key(0, ALWAYS, COUNTS, limits="0 to 9,223,372,036,854,775,807")
    """Seed of the class patterns and the noise, independent of the run's seed."""
    keep_in_memory: bool = key(False, ALWAYS, APART, SAFE)
    """Each rank (with num_workers, each loader process) keeps the images that it has made: 4 bytes a value, so 1,000
    images of 224 pixels take 0.6 GB. For runs that must not wait for images, such as benchmarks. The images are the
    same."""


@dataclass(kw_only=True, slots=True)
class SyntheticTokensConfig(DataConfig):
    """Windows of random tokens made from (index, data_seed) alone; for speed and shape tests of language models."""

    is_text: ClassVar[bool | None] = True
    name: str = "synthetic_tokens"
    _target_: str = "hpc_trainer.datasets.synthetic_tokens.build"
    num_samples: int = key(10_000, ALWAYS, COUNTS, limits="≥ 1")
    """Training windows."""
    num_eval: int = key(100, ALWAYS, COUNTS, limits="≥ 1")
    """Evaluation windows."""
    seq_len: int = key(1024, ALWAYS, COUNTS, limits="≥ 2")
    """Tokens that a window predicts."""
    vocab_size: int = key(50_257, ALWAYS, COUNTS, limits="2 to 2,147,483,648")
    """Number of tokens in the vocabulary; GPT-2's has 50,257."""
    data_seed: int = key(0, ALWAYS, COUNTS, limits="0 to 9,223,372,036,854,775,807")
    """Seed of the tokens, independent of the run's seed."""


@dataclass(kw_only=True, slots=True)
class TextBytesConfig(DataConfig):
    """Windows of bytes of one file, memory-mapped: next-byte prediction on any text."""

    is_text: ClassVar[bool | None] = True
    name: str = "text_bytes"
    _target_: str = "hpc_trainer.datasets.text_bytes.build"
    path: str | None = key(None, ALWAYS, COUNTS, SAFE)
    """Text file; null: the language reference text that ships inside Python (pydoc_data)."""
    seq_len: int = key(128, ALWAYS, COUNTS, limits="≥ 2")
    """Bytes that a sample predicts."""
    eval_fraction: float = key(0.1, ALWAYS, COUNTS, limits="(0, 1)")
    """Share of the file, at its end, held out for evaluation."""


@dataclass(kw_only=True, slots=True)
class CustomDataConfig(DataConfig):
    name: str = "custom"
    kwargs: dict[str, Any] = key({}, ALWAYS, COUNTS)
    """Keyword arguments of the builder named by `_target_`."""
