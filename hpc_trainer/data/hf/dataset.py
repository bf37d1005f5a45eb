"""Data set from a folder of Hugging Face's `save_to_disk` (`data=hf_dataset`): images, numbers or tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpc_trainer.config.packages import optional
from hpc_trainer.config.schema.data import PICTURE
from hpc_trainer.config.schema.task import TargetKind, TaskConfig
from hpc_trainer.data.files import digest_of_files, part_of
from hpc_trainer.data.hf import CLASSES, IMAGE, WHOLE, HfDatasetConfig, HfParts, check_hf_folder
from hpc_trainer.data.images.dataset import Normalisation
from hpc_trainer.data.images.pictures import decode, resize_and_crop, resized, to_array
from hpc_trainer.errors import BrokenPictureError, ConfigError, DataError
from hpc_trainer.tasks.cross_entropy import IGNORED
from hpc_trainer.training.data.preprocessing import array, class_numbers, kind_of, picture, tokens
from hpc_trainer.training.data.protocol import Split, index_array

_FIX = "Correct the data set and save it again."


class HfDataset:
    """Rows of one split. A pickled copy opens the folder itself at its first batch."""

    def __init__(
        self, folder: Path, parts: HfParts, config: HfDatasetConfig, kind: TargetKind, split: Split,
        fed: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._folder, self._parts, self._config, self._kind = folder, parts, config, kind
        self._source: Any = None
        self._fed = fed or {}
        self.preprocessing = self._described()
        mean, std = self.preprocessing.get("mean", []), self.preprocessing.get("std", [])
        self._normalisation = (
            Normalisation(mean, std) if any(mean) or any(deviation != 1 for deviation in std) else None
        )
        self._numbers: NDArray[np.int64] | None = None
        count = len(self._open())
        is_part = config.eval_split is None
        if count < 1 + is_part:
            raise ConfigError(f"{folder} has {count} rows, and training and evaluation need one each. Add rows.")
        self._rows = part_of(count, config.eval_fraction, split) if is_part else np.arange(count)
        self.classes = None if parts.target is None else parts.target.classes
        self.all_targets_count = parts.target is not None
        self.input_shape: tuple[int, ...] = ()
        self.input_shape = (config.seq_len,) if config.seq_len else tuple(self._inputs([int(self._rows[0])]).shape[1:])
        self.num_classes = self._count_classes()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return inputs and targets.

        Inputs are images float32 [batch, channels, height, width], normalised or in 0..1, numbers float32 [batch, ...],
        or tokens int64 [batch, seq_len].

        Raises:
            DataError: an image cannot be decoded or has another size, or a value is missing or not finite; the message
                has the row.
        """
        rows = self._rows[index_array(indices, len(self))].tolist()
        if self._parts.target is None:
            return self._tokens(rows)
        targets = self._column(rows, self._parts.target.name)
        is_whole = self._kind is TargetKind.classes
        if self._kind is TargetKind.any:
            is_whole = self._parts.target.kind in (CLASSES, WHOLE)
        if is_whole and self._numbers is not None:
            targets = np.where(targets == IGNORED, IGNORED, self._numbers[np.maximum(targets, 0)])
        wanted = torch.from_numpy(targets.astype(np.int64 if is_whole else np.float32))
        return torch.from_numpy(self._inputs(rows)), wanted

    def fingerprint(self) -> str:
        """Return the SHA-256 (16 hex digits) of blocks spread over the arrow files, and of the keys that read them."""
        config, files = self._config, [Path(file["filename"]) for file in self._open().cache_files]
        facts = (config.input, config.target, config.image_size, config.num_channels, config.seq_len, config.vocab_size)
        return digest_of_files(files, (facts, self._kind.value, len(self._rows), int(self._rows[0])))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_source": None}

    def _open(self) -> Any:
        """Return the needed columns, memory-mapped, with images as bytes: our own decoding uses no network."""
        if self._source is None:
            datasets = optional("datasets", f"data.path={self._folder}")
            try:
                dataset = datasets.load_from_disk(str(self._folder), keep_in_memory=False)
            except (OSError, ValueError) as error:
                raise DataError(f"{self._folder} cannot be read: {error}. Save the data set again.") from error
            target = self._parts.target
            dataset = dataset.select_columns([self._parts.input.name, *([] if target is None else [target.name])])
            if self._parts.input.kind == IMAGE:
                dataset = dataset.cast_column(self._parts.input.name, datasets.Image(decode=False))
            self._source = dataset.with_format(None)
        return self._source

    def _described(self) -> dict[str, Any]:
        """Return the preprocessing of the model if `fed` states it, else that of the configuration."""
        config = self._config
        if config.seq_len is not None:
            return tokens(seq_len=config.seq_len, vocab_size=config.vocab_size)
        if self._parts.input.kind != IMAGE:
            return array()
        size, channels = config.image_size, config.num_channels
        resize = None if size is None else [size, size]
        own = picture(num_channels=channels, resize=resize, crop=None, mean=[0.0] * channels, std=[1.0] * channels)
        was = self._fed.get("preprocessing") or {}
        if kind_of(was) != PICTURE:
            return own
        of_model = {name: was[name] for name in ("mean", "std") if was.get(name) and len(was[name]) == channels}
        if was.get("resize") is not None:
            of_model |= {"resize": was["resize"], "crop": was.get("crop")}
        return own | of_model

    def _count_classes(self) -> int | None:
        """Check all targets, and return the number of classes; for other tasks the number of values in a target.

        Raises:
            ConfigError: a target is not a class, or all are one class.
        """
        target, config = self._parts.target, self._config
        if target is None:
            return config.vocab_size
        if self._kind is not TargetKind.classes:
            first = self._column([int(self._rows[0])], target.name)
            return int(np.prod(first.shape[1:], dtype=np.int64))
        labels = self._open().data.column(target.name).to_numpy()
        num_classes = len(target.classes) if target.classes else int(np.nanmax(labels)) + 1
        # A column with texts or None does not have integers; a missing value in it is NaN.
        is_wrong = ~((labels >= 0) & (labels < num_classes) | (labels == IGNORED))
        if is_wrong.any():
            row = int(is_wrong.argmax())
            raise ConfigError(
                f"{self._folder}: {target.name} is {labels[row]} in row {row} (in the order of the files), and classes "
                f"are 0 to {num_classes - 1}. {_FIX}"
            )
        self.all_targets_count = not bool((labels == IGNORED).any())
        if self._fed.get("classes") and target.classes:
            used = {target.classes[label] for label in np.unique(labels[labels != IGNORED]).tolist()}
            numbers = class_numbers(self._fed["classes"], target.classes, used, str(self._folder))
            if numbers is not None:
                self._numbers, self.classes = np.array(numbers, dtype=np.int64), list(self._fed["classes"])
                return len(self.classes)
        if num_classes < 2:
            raise ConfigError(f"{self._folder}: all of {target.name} is one class, and two are needed. {_FIX}")
        return num_classes

    def _column(self, rows: list[int], name: str) -> NDArray[Any]:
        """Return numbers [rows, ...].

        Raises:
            DataError: shapes differ, or a value is missing or not finite.
        """
        values = self._open()[rows][name]
        try:
            numbers = np.array(values, dtype=np.float64 if any(value is None for value in values) else None)
        except ValueError:
            numbers = np.array([], dtype=object)
        if numbers.dtype == object:
            raise DataError(f"{self._folder}: {name} has rows of different shapes, or a missing value. {_FIX}")
        if numbers.dtype.kind == "f" and not np.isfinite(numbers).all():
            wrong = np.flatnonzero(~np.isfinite(numbers.reshape(len(rows), -1)).all(axis=1))[0]
            raise DataError(f"{self._folder}: {name} is missing or not finite in row {rows[wrong]}. {_FIX}")
        return numbers

    def _inputs(self, rows: list[int]) -> NDArray[np.float32]:
        name = self._parts.input.name
        if self._parts.input.kind != IMAGE:
            inputs = self._column(rows, name).astype(np.float32)
            inputs = inputs[:, None] if inputs.ndim == 1 else inputs
        else:
            images = [self._image(row, cell) for row, cell in zip(rows, self._open()[rows][name], strict=True)]
            inputs = np.stack(images)
        if self.input_shape and inputs.shape[1:] != self.input_shape:
            raise DataError(
                f"{self._folder}: {name} has the shape {list(inputs.shape[1:])} in rows {rows[:3]}.., and "
                f"{list(self.input_shape)} in the first one. {_FIX}"
            )
        return inputs

    def _image(self, row: int, cell: Any) -> NDArray[np.float32]:
        """Return an image [channels, height, width], normalised or in 0..1.

        Raises:
            DataError: the image cannot be decoded, or has another size.
        """
        optional("PIL.Image", f"data.path={self._folder}")
        config = self._config
        where = f"{self._folder}: {self._parts.input.name} of row {row}"
        content = (cell or {}).get("bytes")
        if content is None:
            raise DataError(f"{where} has no bytes of an image in it. Save the data set with the images embedded.")
        try:
            image = decode(content, where, config.num_channels, formats=None)
        except BrokenPictureError as error:
            raise DataError(f"{error}. {_FIX}") from error
        resize, crop = self.preprocessing["resize"], self.preprocessing["crop"]
        if isinstance(resize, int):
            pixels = resize_and_crop(image, resize, crop[0])
        else:
            pixels = to_array(image) if resize is None else resized(image, *resize)
        height, width = pixels.shape[:2]
        if self.input_shape and (height, width) != self.input_shape[1:]:
            raise DataError(
                f"{where} is {width} x {height} pixels, and the first one {self.input_shape[2]} x "
                f"{self.input_shape[1]}. Use data.image_size, to which all are resized."
            )
        if self._normalisation is not None:
            return self._normalisation(torch.from_numpy(pixels.copy())[None])[0].numpy()
        return np.ascontiguousarray((pixels.astype(np.float32) / np.float32(255)).transpose(2, 0, 1))

    def _tokens(self, rows: list[int]) -> tuple[Tensor, Tensor]:
        """Return inputs and targets from rows that are cut after seq_len + 1 tokens.

        Shorter rows are padded with token 0, and with targets that do not count.
        """
        name, (seq_len,) = self._parts.input.name, self.input_shape
        inputs = np.zeros((len(rows), seq_len), dtype=np.int64)
        targets = np.full((len(rows), seq_len), IGNORED, dtype=np.int64)
        for slot, (row, cell) in enumerate(zip(rows, self._open()[rows][name], strict=True)):
            tokens = np.array((cell or [])[: seq_len + 1], dtype=np.int64)
            if tokens.size and not 0 <= tokens.min() <= tokens.max() < (self._config.vocab_size or 0):
                raise DataError(
                    f"{self._folder}: {name} of row {row} has tokens {tokens.min()} to {tokens.max()}, and "
                    f"data.vocab_size={self._config.vocab_size}. Use the vocabulary of its tokenizer."
                )
            inputs[slot, : len(tokens[:-1])] = tokens[:-1]
            targets[slot, : len(tokens[1:])] = tokens[1:]
        return torch.from_numpy(inputs), torch.from_numpy(targets)


def build(config: HfDatasetConfig, split: Split, task: TaskConfig, fed: Mapping[str, Any] | None = None) -> HfDataset:
    """Build the train or the eval rows, with targets as `task` takes them.

    Args:
        fed: `classes` and `preprocessing` of the model that is evaluated on the rows.

    Raises:
        ConfigError: a package, split or column is missing, or targets do not fit the task.
        DataError: the folder is missing or damaged.
    """
    kind = task.targets
    parts = check_hf_folder(config, kind)
    return HfDataset(parts.train if split == "train" else parts.evaluation, parts, config, kind, split, fed)
