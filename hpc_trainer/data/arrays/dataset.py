"""Inputs and targets from array files: .npy memory-mapped, .npz and .parquet read into memory (`data=arrays`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpc_trainer.config.packages import optional
from hpc_trainer.config.schema.task import TargetKind, TaskConfig
from hpc_trainer.data.arrays import ArraysConfig, check_headers
from hpc_trainer.data.files import digest_of_files, part_of
from hpc_trainer.errors import ConfigError, DataError, HpcTrainerError
from hpc_trainer.tasks.cross_entropy import IGNORED
from hpc_trainer.training.data.preprocessing import array
from hpc_trainer.training.data.protocol import Split, index_array

_BLOCK_BYTES = 1 << 24
_CHECKED_AT_START = 1 << 28
"""Most bytes of inputs that are checked completely before the first step; of larger inputs each batch is checked."""


class Arrays:
    """Rows of two arrays. A pickled copy maps or reads the files itself at its first batch."""

    def __init__(
        self, path: Path, config: ArraysConfig, kind: TargetKind, rows: NDArray[Any] | None, num_classes: int | None,
        pair: tuple[NDArray[Any], NDArray[Any]],
    ) -> None:  # fmt: skip
        self._path, self._config, self._kind, self._rows = path, config, kind, rows
        self._pair: tuple[NDArray[Any], NDArray[Any]] | None = pair
        inputs, targets = pair
        self.input_shape: tuple[int, ...] = tuple(inputs.shape[1:])
        self.num_classes = num_classes
        self.preprocessing = array(config.input_scale)
        self.all_targets_count = kind is not TargetKind.classes or not _has(targets, IGNORED)
        self._is_checked = inputs.nbytes <= _CHECKED_AT_START

    def __len__(self) -> int:
        return len(self._arrays()[1]) if self._rows is None else len(self._rows)

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return inputs float32 [batch, *input_shape], times `data.input_scale`, and targets.

        Targets are int64 if they are classes, else float32.

        Raises:
            DataError: an input is not finite.
        """
        inputs, targets = self._arrays()
        rows = index_array(indices, len(self))
        if self._rows is not None:
            rows = self._rows[rows]
        taken = _as_float32(inputs[rows])
        if not self._is_checked and not np.isfinite(taken).all():
            wrong = int(rows[np.flatnonzero(~np.isfinite(taken.reshape(len(rows), -1)).all(axis=1))[0]])
            raise DataError(_not_finite(self._path, self._config.inputs, wrong))
        if self._config.input_scale != 1.0:
            taken = taken * np.float32(self._config.input_scale)
        wanted = np.float32
        if self._kind is TargetKind.classes or (self._kind is TargetKind.any and targets.dtype.kind != "f"):
            wanted = np.int64  # type: ignore[assignment]
        return torch.from_numpy(taken), torch.from_numpy(targets[rows].astype(wanted, copy=False))

    def fingerprint(self) -> str:
        """Return the SHA-256 (16 hex digits) of blocks spread over the files, and of the keys that read them."""
        config = self._config
        facts = (config.inputs, config.targets, config.input_scale, self._kind.value, self.num_classes)
        rows = None if self._rows is None else (len(self._rows), self._rows[:1].tolist())
        return digest_of_files(_files(self._path, config), (facts, rows))

    def __getstate__(self) -> dict[str, Any]:
        # A pickled memmap is a copy of all its bytes.
        return {**self.__dict__, "_pair": None}

    def _arrays(self) -> tuple[NDArray[Any], NDArray[Any]]:
        if self._pair is None:
            self._pair = _read(self._path, self._config)
        return self._pair


def build(config: ArraysConfig, split: Split, task: TaskConfig) -> Arrays:
    """Build the train or the eval rows, with targets as `task` takes them.

    Raises:
        ConfigError: shapes, dtypes or values do not fit; the message has the file and the row.
        DataError: a file is missing or damaged.
    """
    kind = task.targets
    check_headers(config, kind)
    assert config.path is not None
    train = Path(config.path).expanduser()
    path = train if config.eval_path is None or split == "train" else Path(config.eval_path).expanduser()
    inputs, targets = _read(path, config)
    if len(inputs) != len(targets):  # for files whose headers do not have the length
        raise ConfigError(f"{path}: {config.inputs} has {len(inputs)} rows, {config.targets} {len(targets)}.")
    others, first = (inputs, targets) if path == train else _read(train, config)
    num_classes = _num_classes(config, first, kind, train)
    _check_targets(targets, kind, num_classes, path, config)
    if inputs.shape[1:] != others.shape[1:]:
        raise ConfigError(f"data.eval_path={path}: {config.inputs} has another shape than in data.path={train}.")
    if inputs.nbytes <= _CHECKED_AT_START and (split == "train" or path != train):
        _check_finite(inputs, path, config.inputs)
    rows = None if config.eval_path is not None else part_of(len(targets), config.eval_fraction, split)
    return Arrays(path, config, kind, rows, num_classes, (inputs, targets))


def _num_classes(config: ArraysConfig, targets: NDArray[Any], kind: TargetKind, path: Path) -> int | None:
    """Return the number of classes; for other tasks the numbers of a target, or None.

    Raises:
        ConfigError: all targets are one class.
    """
    if kind in (TargetKind.numbers, TargetKind.labels):
        return int(np.prod(targets.shape[1:], dtype=np.int64))
    if kind is TargetKind.any and targets.dtype.kind == "f":
        return config.num_classes
    count = max(int(block.max()) for block in _blocks(targets)) + 1
    if config.num_classes is None and count < 2 and kind is TargetKind.classes:
        raise ConfigError(
            f"{path}: all of {config.targets} is one class, and classification needs two or more. Save samples of "
            "others too, or set data.num_classes."
        )
    return config.num_classes or count


def _check_targets(
    targets: NDArray[Any], kind: TargetKind, num_classes: int | None, path: Path, config: ArraysConfig
) -> None:
    """Check that the task can take each target.

    Raises:
        ConfigError: a value does not fit; the message has the row.
    """
    start = 0
    for block in _blocks(targets):
        flat = block.reshape(len(block), -1)
        if flat.dtype.kind == "f" and not np.isfinite(flat).all():
            row = start + int(np.flatnonzero(~np.isfinite(flat).all(axis=1))[0])
            raise ConfigError(_not_finite(path, config.targets, row))
        is_wrong = np.zeros(flat.shape, dtype=bool)
        if kind is TargetKind.classes and num_classes is not None:
            is_wrong = ((flat < 0) & (flat != IGNORED)) | (flat >= num_classes)
        elif kind is TargetKind.labels:
            is_wrong = (flat != 0) & (flat != 1)
        if is_wrong.any():
            row, column = (int(indices[0]) for indices in np.nonzero(is_wrong))
            value = flat[row, column].item()
            rule = (
                "labels are 0 or 1 each" if kind is TargetKind.labels else f"classes are 0 to {(num_classes or 0) - 1}"
            )
            fix = "" if kind is TargetKind.labels or value < 0 else f", or use data.num_classes={value + 1}"
            raise ConfigError(
                f"{path}: {config.targets} has {value} in row {start + row}, and {rule}. Correct it{fix}."
            )
        start += len(block)


def _check_finite(inputs: NDArray[Any], path: Path, name: str) -> None:
    if inputs.dtype.kind != "f":
        return
    start = 0
    for block in _blocks(inputs):
        is_finite = np.isfinite(_as_float32(block).reshape(len(block), -1)).all(axis=1)
        if not is_finite.all():
            raise ConfigError(_not_finite(path, name, start + int(np.flatnonzero(~is_finite)[0])))
        start += len(block)


def _as_float32(values: NDArray[Any]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # a value that overflows becomes infinite, which is checked
        return values.astype(np.float32, copy=False)


def _not_finite(path: Path, name: str, row: int) -> str:
    return f"{path}: {name} has a value in row {row} that is not finite (NaN, or too large for float32). Correct it."


def _blocks(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Yield blocks of some MB, so that a memory-mapped array is never in memory as a whole."""
    rows = max(1, _BLOCK_BYTES // max(1, array[:1].nbytes))
    for start in range(0, len(array), rows):
        yield array[start : start + rows]


def _has(targets: NDArray[Any], value: int) -> bool:
    return any(bool((block == value).any()) for block in _blocks(targets))


def _files(path: Path, config: ArraysConfig) -> list[Path]:
    return [path / f"{name}.npy" for name in (config.inputs, config.targets)] if path.is_dir() else [path]


def _read(path: Path, config: ArraysConfig) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return inputs and targets; .npy files are mapped, not read.

    Raises:
        DataError: a file is damaged.
    """
    names = (config.inputs, config.targets)
    try:
        if path.is_dir():
            # Plain arrays over the maps, because slicing np.memmap itself makes a memmap object each time.
            arrays = [np.asarray(np.load(file, mmap_mode="r", allow_pickle=False)) for file in _files(path, config)]
        elif path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                arrays = [file[name] for name in names]
        else:
            arrays = _columns(path, names)
    except HpcTrainerError:
        raise
    except (OSError, ValueError, EOFError, KeyError) as error:
        raise DataError(f"{path} cannot be read: {error}. Write it again, or name another.") from error
    return arrays[0], arrays[1]


def _columns(path: Path, names: Sequence[str]) -> list[NDArray[Any]]:
    table = optional("pyarrow.parquet", str(path)).read_table(path, columns=list(names), memory_map=True)
    return [_column(table.column(name).combine_chunks(), path, name) for name in names]


def _column(column: Any, path: Path, name: str) -> NDArray[Any]:
    """Return numbers [rows], or [rows, ...] for lists of one length.

    Raises:
        ConfigError: lengths differ, or a value is missing.
    """
    if column.null_count:
        row = column.is_null().to_numpy(zero_copy_only=False).argmax()
        raise ConfigError(f"{path}: {name} has no value in row {row}. Fill it in.")
    if not hasattr(column, "flatten"):
        values: NDArray[Any] = column.to_numpy(zero_copy_only=False)
        return values
    flat = _column(column.flatten(), path, name)
    length, rest = divmod(len(flat), max(1, len(column)))
    lengths = np.full(len(column), length)
    if hasattr(column, "value_lengths"):
        lengths = column.value_lengths().to_numpy(zero_copy_only=False)
    if rest or (lengths != length).any():
        row = int((lengths != lengths[0]).argmax())
        raise ConfigError(
            f"{path}: {name} has {lengths[row]} values in row {row}, and {lengths[0]} in row 0. Give all rows the same "
            "number of values."
        )
    return flat.reshape(len(column), length, *flat.shape[1:])
