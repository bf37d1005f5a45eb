"""`data=table`: its keys, and the columns in the head of its file. No torch; pyarrow is imported late."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from hpc_trainer.config.packages import optional
from hpc_trainer.config.schema.data import TABLE, DataConfig
from hpc_trainer.config.schema.key import ALWAYS, COUNTS, RULED, SAFE, key
from hpc_trainer.config.schema.task import TargetKind
from hpc_trainer.config.user_files import open_given
from hpc_trainer.data.files import check_parts
from hpc_trainer.errors import ConfigError, DataError, HpcTrainerError, valid

NUMBER, TEXT, OTHER = "number", "text", "other"
_SUFFIXES = (".csv", ".parquet")


class Missing(str, enum.Enum):
    """Handling of a missing value of a table."""

    refuse = "refuse"
    mean = "mean"


class Encoding(str, enum.Enum):
    """Encoding of a category as numbers."""

    one_hot = "one_hot"
    ordinal = "ordinal"


@dataclass(kw_only=True, slots=True)
class TableConfig(DataConfig):
    """Rows of a .csv or .parquet file: numbers standardised, categories encoded, by the training rows alone."""

    takes_fed: ClassVar[bool] = True
    takes_task: ClassVar[bool] = True
    kept_keys: ClassVar[tuple[str, ...]] = ("target", "numeric", "categorical", "encoding", "missing")
    encodes_by_rows: ClassVar[bool] = True
    is_text: ClassVar[bool | None] = False
    name: str = "table"
    _target_: str = "hpc_trainer.datasets.records.table.build"
    path: str | None = key(None, ALWAYS, COUNTS, SAFE)
    """File of the table. A .csv has the names of its columns in its first line."""
    target: str = key("target", ALWAYS, COUNTS)
    """Column to predict: any values with task=classification, numbers with task=regression."""
    numeric: list[str] | None = key(None, ALWAYS, COUNTS)
    """Columns of numbers; null: all columns of numbers that no other key names."""
    categorical: list[str] | None = key(None, ALWAYS, COUNTS)
    """Columns of categories; null: all columns of texts or booleans that no other key names."""
    encoding: Encoding = key(Encoding.one_hot, ALWAYS, COUNTS)
    """one_hot: an input for each category and one for unknown ones. ordinal: one input, the category's number scaled to
    0 to 1."""
    missing: Missing = key(Missing.refuse, ALWAYS, COUNTS)
    """refuse: an error with column and row. mean: a missing number becomes the column's mean, a missing category
    unknown."""
    eval_path: str | None = key(None, ALWAYS, COUNTS, SAFE)
    """File for evaluation, with the same columns; null: a part of `path`."""
    eval_fraction: float = key(0.1, RULED, COUNTS, limits="(0, 1)")
    """Share of the rows held out for evaluation, by a fixed shuffle."""

    def check(self, targets: TargetKind) -> None:
        check_table(self, targets)

    def unknown_facts(self, made: Mapping[str, Any] | None) -> str | None:
        return "scaling" if made is None else None

    def keys_as(self, kind: str | None, was: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
        if kind != TABLE:
            return {}
        keys = {name: was.get(name) for name in ("target", "encoding", "missing")}
        lists = {name: was[name] for name in ("numeric", "categorical") if name in was}
        return {**keys, **{name: [column["column"] for column in columns] for name, columns in lists.items()}}


class Columns(NamedTuple):
    """Columns to read, by their use."""

    target: str
    target_is_text: bool
    numeric: list[str]
    categorical: list[str]


class Head(NamedTuple):
    """Kind and type name of each column; number of rows, if the file gives it."""

    kinds: dict[str, tuple[str, str]]
    num_rows: int | None


def read_head(path: Path) -> Head:
    """Read the head of a table; the types of a .csv are those of its first megabyte.

    Raises:
        ConfigError: the file is of another kind, pyarrow is missing, or two columns have one name.
        DataError: the file is missing, empty or damaged.
    """
    if path.suffix not in _SUFFIXES:
        raise ConfigError(f"data.path={path} must be a file {' or '.join(_SUFFIXES)}. Convert it, or name another.")
    what = f"data=table data.path={path}"
    try:
        open_given(path).close()  # pyarrow would wait for the writer of a pipe
        if path.suffix == ".csv":
            schema, num_rows = optional("pyarrow.csv", what).open_csv(path).schema, None
        else:
            file = optional("pyarrow.parquet", what).ParquetFile(path)
            schema, num_rows = file.schema_arrow, file.metadata.num_rows
    except HpcTrainerError:
        raise
    except (OSError, ValueError) as error:  # pyarrow's own errors are both
        raise DataError(f"{path} cannot be read: {error}. Write it again, or name another file.") from error
    twice = [name for name, count in Counter(schema.names).items() if count > 1]
    if twice:
        raise ConfigError(f"{path} has several columns named {twice[0]!r}. Give each its own name.")
    types = optional("pyarrow.types", what)
    return Head({field.name: (_kind(field.type, types), str(field.type)) for field in schema}, num_rows)


def choose_columns(data: TableConfig, kind: TargetKind, path: Path, head: Head) -> Columns:
    """Return the use of each column.

    Raises:
        ConfigError: a column is missing, or of a kind that cannot be used.
    """
    kinds = head.kinds
    lists = {"numeric": data.numeric, "categorical": data.categorical}
    named = [("target", data.target), *((keyword, name) for keyword, many in lists.items() for name in many or [])]
    for keyword, name in named:
        if name not in kinds:
            raise ConfigError(f"data.{keyword}={name}: {path} has no such column. {valid(name, kinds)}")
        if kinds[name][0] == OTHER:
            raise ConfigError(
                f"data.{keyword}={name} is {kinds[name][1]} in {path}; supported are numbers, texts and booleans."
            )
    twice = [name for name, count in Counter(name for _, name in named).items() if count > 1]
    if twice:
        raise ConfigError(f"data.target, data.numeric and data.categorical name {twice[0]} twice. Name it once.")
    wrong = next((name for name in data.numeric or [] if kinds[name][0] != NUMBER), None)
    if wrong is not None:
        raise ConfigError(f"data.numeric names {wrong}, which is {kinds[wrong][1]} in {path}. Use data.categorical.")
    taken = {name for _, name in named}
    free = [(name, column_kind) for name, (column_kind, _) in kinds.items() if name not in taken]
    if None in lists.values():
        odd = next((name for name, column_kind in free if column_kind == OTHER), None)
        if odd is not None:
            raise ConfigError(
                f"{path}: column {odd} is {kinds[odd][1]}, which is neither number nor text. Name the columns to use "
                "in data.numeric and data.categorical."
            )
    numeric = [name for name, column_kind in free if column_kind == NUMBER] if data.numeric is None else data.numeric
    categorical = (
        [name for name, column_kind in free if column_kind == TEXT] if data.categorical is None else data.categorical
    )
    if not numeric and not categorical:
        raise ConfigError(f"{path} has no column besides data.target={data.target} to predict it from. Name some.")
    is_text = kinds[data.target][0] == TEXT
    if kind is TargetKind.labels or (is_text and kind is not TargetKind.classes):
        reason = f"is {kinds[data.target][1]}" if is_text else "is one column"
        raise ConfigError(
            f"data.target={data.target} {reason} in {path}, which this task cannot predict. Use task=classification."
        )
    return Columns(data.target, is_text, list(numeric), list(categorical))


def check_table(data: TableConfig, kind: TargetKind) -> Columns:
    """Check the heads of the files, and return the columns to read.

    Raises:
        ConfigError: a key is wrong, or does not fit the file.
        DataError: a file is missing, empty or damaged.
    """
    if data.path is None:
        raise ConfigError("data=table needs data.path, a .csv or .parquet file.")
    check_parts(data.eval_path, data.eval_fraction, TableConfig().eval_fraction)
    path = Path(data.path).expanduser()
    head = read_head(path)
    columns = choose_columns(data, kind, path, head)
    if head.num_rows is not None and head.num_rows < 2:
        raise ConfigError(f"{path} has {head.num_rows} rows, and training and evaluation need one each. Add rows.")
    if data.eval_path is not None:
        held_out = Path(data.eval_path).expanduser()
        others = read_head(held_out).kinds
        for name in (columns.target, *columns.numeric, *columns.categorical):
            if name not in others:
                raise ConfigError(f"data.eval_path={held_out} has no column {name}, which {path} has. Add it.")
    return columns


def _kind(kind: Any, types: Any) -> str:
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind) or types.is_null(kind):
        return NUMBER
    return TEXT if types.is_string(kind) or types.is_large_string(kind) or types.is_boolean(kind) else OTHER
