"""Rows of a .csv or .parquet file, standardised and encoded by statistics of the training rows (`data=table`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpc_trainer.config.packages import optional
from hpc_trainer.config.schema.data import TABLE
from hpc_trainer.config.schema.task import TargetKind, TaskConfig
from hpc_trainer.data.files import digest_of_files, part_of
from hpc_trainer.data.tables import Columns, Encoding, Missing, TableConfig, check_table
from hpc_trainer.errors import ConfigError, DataError
from hpc_trainer.training.data.preprocessing import kind_of
from hpc_trainer.training.data.protocol import Split, index_array

LARGEST_ONE_HOT = 10_000
"""Most categories of a column that become one input each; a column with more is most likely a name or an id."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Columns of a file: numbers as float64, texts unchanged, None or NaN for a missing value."""

    path: Path
    columns: dict[str, NDArray[Any]]

    def part(self, rows: NDArray[Any]) -> dict[str, NDArray[Any]]:
        return {name: values[rows] for name, values in self.columns.items()}


class Table:
    """Rows of a table as inputs float32 [inputs]: numeric columns in their order, then categorical columns.

    Numeric columns have mean 0 and standard deviation 1 over the training rows.

    `input_names` has a name for each input, `classes` a name for each class. `preprocessing` has the columns and
    numbers that turn a row into inputs (`training/data/preprocessing.py`).
    """

    all_targets_count = True

    def __init__(
        self, numbers: NDArray[np.float32], codes: NDArray[np.int32], targets: Tensor, *, num_codes: Sequence[int],
        is_one_hot: bool, input_names: list[str], classes: list[str] | None, preprocessing: dict[str, Any], digest: str,
    ) -> None:  # fmt: skip
        self.preprocessing = preprocessing
        self.input_names, self.classes = input_names, classes
        self.input_shape = (len(input_names),)
        self.num_classes = 1 if classes is None else len(classes)
        self._numbers, self._codes, self._targets, self._digest = numbers, codes, targets, digest
        self._num_codes = np.array(num_codes, dtype=np.int64)
        self._starts = np.concatenate(([0], np.cumsum(self._num_codes)))[:-1] if is_one_hot else None

    def __len__(self) -> int:
        return len(self._targets)

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return inputs [batch, inputs] and targets [batch]: int64 for classes, float32 for numbers."""
        rows = index_array(indices, len(self))
        inputs = np.zeros((len(rows), *self.input_shape), dtype=np.float32)
        split = self._numbers.shape[1]
        inputs[:, :split] = self._numbers[rows]
        codes = self._codes[rows]
        if self._starts is None:
            inputs[:, split:] = codes / np.maximum(self._num_codes - 1, 1)
        else:
            inputs[np.arange(len(rows))[:, None], split + self._starts + codes] = 1.0
        return torch.from_numpy(inputs), self._targets[torch.from_numpy(rows)]

    def fingerprint(self) -> str:
        """Return the SHA-256 (16 hex digits) of blocks spread over the files, and of the keys that read them."""
        return self._digest


def build(config: TableConfig, split: Split, task: TaskConfig, fed: Mapping[str, Any] | None = None) -> Table:
    """Build the train or the eval rows. Statistics, categories and classes are those of the training rows.

    Args:
        fed: `preprocessing` of the model that is evaluated on the rows; columns are encoded as in its training.

    Raises:
        ConfigError: a column or a value does not fit; the message has the file, the column and the row.
        DataError: a file is missing or damaged.
    """
    kind = task.targets
    columns = check_table(config, kind)
    assert config.path is not None
    source = _read(Path(config.path).expanduser(), columns)
    count = len(source.columns[columns.target])
    if count < 2:
        raise ConfigError(f"{source.path} has {count} rows, and training and evaluation need one each. Add rows.")
    _check_values(source, columns, config)
    train_rows = np.arange(count) if config.eval_path else part_of(count, config.eval_fraction, "train")
    train = source.part(train_rows)
    files, mine = [source.path], train
    if split == "eval" and config.eval_path is not None:
        held_out = _read(Path(config.eval_path).expanduser(), columns)
        _check_values(held_out, columns, config)
        files.append(held_out.path)
        if not len(held_out.columns[columns.target]):
            raise ConfigError(f"data.eval_path={held_out.path} has no row. Add rows.")
        source, mine = held_out, held_out.columns
    elif split == "eval":
        mine = source.part(part_of(count, config.eval_fraction, "eval"))
    was = (fed or {}).get("preprocessing") or {}
    made = _encoding(train, columns, source.path, config, was if kind_of(was) == TABLE else {})
    parts = (train[columns.target], mine[columns.target])
    classes, targets = _targets(made["classes"], *parts, columns, kind, source.path)
    made["classes"] = classes
    names = list(columns.numeric)
    categories = {column["column"]: column["categories"] for column in made["categorical"]}
    for name, values in categories.items():
        is_one_hot = config.encoding is Encoding.one_hot
        names += [f"{name}={value}" for value in [*values, "?"]] if is_one_hot else [name]
    class_names = None if classes is None else _names(classes)
    facts = (columns, config.encoding.value, config.missing.value, class_names, split, len(targets))
    return Table(
        _stacked(
            [_standardised(mine[column["column"]], column["mean"], column["std"]) for column in made["numeric"]],
            len(targets), np.float32,
        ),
        _stacked([_codes(mine[name], values) for name, values in categories.items()], len(targets), np.int32),
        targets,
        num_codes=[len(values) + 1 for values in categories.values()],
        is_one_hot=config.encoding is Encoding.one_hot,
        input_names=names,
        classes=class_names,
        preprocessing=made,
        digest=digest_of_files(files, facts),
    )  # fmt: skip


def _encoding(
    train: dict[str, NDArray[Any]], columns: Columns, path: Path, config: TableConfig, was: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the preprocessing of rows: each column's encoding from `was`, else from the training rows."""
    numeric = {column["column"]: column for column in was.get("numeric", ())}
    categorical = {column["column"]: column for column in was.get("categorical", ())}
    return {
        "kind": TABLE, "target": columns.target, "classes": was.get("classes"),
        "numeric": [numeric.get(name) or {"column": name, **_statistics(train[name])} for name in columns.numeric],
        "categorical": [
            categorical.get(name) or {"column": name, "categories": _categories(train[name], name, path, config)}
            for name in columns.categorical
        ],
        "encoding": config.encoding.value, "missing": config.missing.value,
        "inputs": "(number - mean) / std of each numeric column, 0 if missing; then categories",
    }  # fmt: skip


def _read(path: Path, columns: Columns) -> _Rows:
    """Read the columns of a file.

    Raises:
        ConfigError: a value is not of its column's type.
        DataError: the file cannot be read.
    """
    arrow = optional("pyarrow", str(path))
    wanted = {name: arrow.float64() for name in columns.numeric} | {
        name: arrow.string() for name in columns.categorical
    }
    wanted[columns.target] = arrow.string() if columns.target_is_text else arrow.float64()
    try:
        if path.suffix == ".csv":
            csv = optional("pyarrow.csv", str(path))
            table = csv.read_csv(
                path,
                read_options=csv.ReadOptions(use_threads=False),  # with threads messages would lack the row
                convert_options=csv.ConvertOptions(
                    column_types=wanted, include_columns=list(wanted), strings_can_be_null=True
                ),
            )
        else:
            parquet = optional("pyarrow.parquet", str(path)).read_table(path, columns=list(wanted))
            table = arrow.table({name: parquet.column(name).cast(kind) for name, kind in wanted.items()})
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}. Write it again, or name another file.") from error
    except ValueError as error:  # pyarrow's ArrowInvalid
        raise ConfigError(
            f"{path} does not match the types at the start of its columns: {error}. Correct that row."
        ) from error
    return _Rows(path, {name: table.column(name).to_numpy() for name in wanted})


def _check_values(rows: _Rows, columns: Columns, config: TableConfig) -> None:
    """Check that no value is infinite, and that none is missing where it must not be.

    Raises:
        ConfigError: a value breaks this rule.
    """
    for name, values in rows.columns.items():
        is_number = values.dtype.kind == "f"
        is_missing = np.isnan(values) if is_number else np.array([value is None for value in values], dtype=bool)
        if is_missing.any() and (name == columns.target or config.missing is Missing.refuse):
            row = int(is_missing.argmax())
            fix = "" if name == columns.target else ", or use data.missing=mean"
            raise ConfigError(
                f"{rows.path}: column {name} has no value in row {row} (the first is 0; NaN counts as no value), one "
                f"of {int(is_missing.sum())}. Fill in what is missing, leave the column out{fix}."
            )
        if is_number and np.isinf(values).any():
            row = int(np.isinf(values).argmax())
            raise ConfigError(f"{rows.path}: column {name} is infinite in row {row} (the first is 0). Correct it.")


def _targets(
    was: Sequence[Any] | None, train: NDArray[Any], mine: NDArray[Any], columns: Columns, kind: TargetKind, path: Path
) -> tuple[list[Any] | None, Tensor]:
    """Return (values of the classes in order, targets); (None, targets) if targets are numbers.

    Args:
        was: classes of the model that is evaluated on the rows; None for those of the training rows.
    """
    if kind is not TargetKind.classes:
        return None, torch.from_numpy(mine.astype(np.float32))
    classes = list(was) if was else sorted(set(train.tolist()))
    numbers = {value: number for number, value in enumerate(classes)}
    unknown = next((row for row, value in enumerate(mine.tolist()) if value not in numbers), None)
    names = _names(classes)
    if unknown is not None:
        whose = "the model does not know" if was else "no training row has"
        raise ConfigError(
            f"{path}: a row that is held out has {columns.target}={mine[unknown]}, which {whose}. Classes are "
            f"{', '.join(names[:10])}{', ..' if len(names) > 10 else ''}. "
            f"{'Take such rows out.' if was else 'Add training rows of it, or leave it out.'}"
        )
    if len(classes) < 2:
        raise ConfigError(
            f"{path}: all training rows have {columns.target}={names[0]}; a classification needs two classes or more."
        )
    if not columns.target_is_text and any(value != int(value) for value in classes):
        raise ConfigError(
            f"{path}: column {columns.target} has {next(v for v in classes if v != int(v)):g}, and classes are whole "
            "numbers or texts. Use task=regression."
        )
    return classes, torch.tensor([numbers[value] for value in mine.tolist()], dtype=torch.int64)


def _names(classes: Sequence[Any]) -> list[str]:
    return [value if isinstance(value, str) else f"{value:g}" for value in classes]


def _statistics(train: NDArray[np.float64]) -> dict[str, float]:
    """Return mean and standard deviation of the training rows with a value; std is 1 for a column of one value."""
    present = train[~np.isnan(train)]
    # fsum rounds once, so the bits are the same on every machine, in whatever order numpy adds.
    mean = math.fsum(present) / len(present) if len(present) else 0.0
    std = math.sqrt(math.fsum((present - mean) ** 2) / len(present)) if len(present) else 0.0
    return {"mean": mean, "std": std or 1.0}


def _standardised(mine: NDArray[np.float64], mean: float, std: float) -> NDArray[np.float32]:
    """Return (value - mean) / std; a missing value becomes 0, the mean."""
    return np.nan_to_num((mine - mean) / std, nan=0.0).astype(np.float32)


def _categories(train: NDArray[Any], name: str, path: Path, config: TableConfig) -> list[str]:
    values = sorted({value for value in train.tolist() if value is not None})
    if len(values) > LARGEST_ONE_HOT and config.encoding is Encoding.one_hot:
        raise ConfigError(
            f"{path}: column {name} has {len(values)} categories, and at most {LARGEST_ONE_HOT} become an input each. "
            "Leave it out of data.categorical, or use data.encoding=ordinal."
        )
    return values


def _codes(mine: NDArray[Any], categories: Sequence[str]) -> NDArray[np.int32]:
    """Return each value's category number; unknown and missing values share one further number."""
    numbers = {value: number for number, value in enumerate(categories)}
    return np.array([numbers.get(value, len(categories)) for value in mine.tolist()], dtype=np.int32)


def _stacked(columns: list[NDArray[Any]], num_rows: int, dtype: Any) -> NDArray[Any]:
    return np.stack(columns, axis=1) if columns else np.zeros((num_rows, 0), dtype=dtype)
