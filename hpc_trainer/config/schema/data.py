"""`data/`: the base class of data sets, and the two that need nothing of `hpc_trainer/data/`.

A builder, which `_target_` names, is called as `build(config, split)` with split `train` or `eval` and returns a
map-style data set. The core asks a kind of data set through the methods of its class, which need no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hpc_trainer.config.schema.key import ALWAYS, APART, COUNTS, ONCE_SET, SAFE, SCHEDULE, key

if TYPE_CHECKING:
    from hpc_trainer.config.schema.task import TargetKind

PICTURE, TABLE, TOKENS, ARRAY = "picture", "table", "tokens", "array"
"""Kinds of preprocessing (`training/data/preprocessing.py`)."""
TOKENIZER = "tokenizer.json"
"""Name of the tokenizer's file, beside the parts of a prepared folder and in an export."""
BYTES = "bytes"
"""Tokenizer name for text without a tokenizer: a token is a byte."""
_NUM_DIGITS = 1797


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Base class of every data set; not a choice itself."""

    takes_task: ClassVar[bool] = False
    """True if the task decides how targets are read: the builder is called as `build(config, split, task)`."""
    takes_fed: ClassVar[bool] = False
    """True if the builder takes `fed`, the preprocessing of a trained model's inputs
    (`training/data/preprocessing.py`)."""
    kept_keys: ClassVar[tuple[str, ...]] = ()
    """Keys that new data of this kind take from the run's configuration, even if no preprocessing is recorded."""
    encodes_by_rows: ClassVar[bool] = False
    """True if the training rows decide how inputs are encoded, so that other rows give other inputs."""
    is_text: ClassVar[bool | None] = None
    """True if inputs are tokens, False if they are images or rows of numbers; None if another key or the builder
    decides."""
    name: str = key("???", ALWAYS, COUNTS)
    _target_: str = key("???", ALWAYS, COUNTS)
    num_workers: int = key(0, ALWAYS, APART, SAFE, limits="≥ 0")
    """Loader processes for each rank; 0 loads in the rank itself."""

    # Before a run, on the login node.

    def num_train_samples(self) -> int | None:
        """Return the number of training samples; None or 0 if only reading gives it, or if something is wrong."""
        return None

    def vocabulary(self) -> int | None:
        """Return the number of token ids that a model distinguishes; None for other data, or if it is unknown."""
        return None

    def problems(self) -> Iterable[str]:
        """Return the problems with keys and files, a line each. What this machine cannot see is left to the builder."""
        return ()

    def check(self, targets: TargetKind) -> None:
        """Check the files as far as their headers allow, for targets of the type `targets`.

        Raises:
            ConfigError: a key is wrong, or does not fit the file.
            DataError: a file is missing or damaged.
        """

    def model_facts(self) -> dict[str, Any]:
        """Return the facts on which a model depends, as far as keys and small files give them.

        The names are shape, num_classes, classes and tokenizer.
        """
        facts: dict[str, Any] = {}
        size, channels = getattr(self, "image_size", None), getattr(self, "num_channels", None)
        if size is not None:
            facts["shape"] = (channels, size, size)
        if getattr(self, "seq_len", None) is not None:
            facts["shape"] = (getattr(self, "seq_len", 0),)
        for name in ("num_classes", "vocab_size"):
            if getattr(self, name, None) is not None:
                facts["num_classes"] = getattr(self, name)
        return facts

    # When a trained model gets new data.

    def preprocessing(self, mean: Any = None, std: Any = None) -> dict[str, Any] | None:
        """Return the preprocessing that follows from the keys (`training/data/preprocessing.py`).

        Earlier versions recorded no more than that.

        Args:
            mean: mean of each channel of images, if the earlier version recorded it.
            std: standard deviation of each channel of images, if the earlier version recorded it.
        """
        return None

    def unknown_facts(self, made: Mapping[str, Any] | None) -> str | None:
        """Name the facts on a model's inputs that neither the keys nor the preprocessing `made` state, if any."""
        return None

    def keys_as(self, kind: str | None, was: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
        """Return the keys, with values, that make inputs as a trained model's were made; None for an unknown value.

        Args:
            kind: kind of the model's preprocessing; None if it is not known.
            was: the model's preprocessing; empty if it is not known.
            given: keys that the user gave.
        """
        return {"seq_len": was.get("seq_len")} if kind == TOKENS and hasattr(self, "seq_len") else {}

    def tokenizer_files(self) -> Iterable[Path]:
        """Return the places where the tokenizer's file of these data may be."""
        return ()


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
    """Largest number of pixels by which a training image is moved, vertically and horizontally, drawn again in each
    epoch."""

    def num_train_samples(self) -> int:
        return _NUM_DIGITS - self.num_eval

    def model_facts(self) -> dict[str, Any]:
        return {"shape": (1, 8, 8), "num_classes": 10}


@dataclass(kw_only=True, slots=True)
class CustomDataConfig(DataConfig):
    name: str = "custom"
    kwargs: dict[str, Any] = key({}, ALWAYS, COUNTS)
    """Keyword arguments of the builder named by `_target_`."""

    def model_facts(self) -> dict[str, Any]:
        return {}
