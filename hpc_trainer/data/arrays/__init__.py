"""`data=arrays`: its keys, and the names, dtypes and shapes in the headers of its files. No torch.

.npz             arrays by their names in it
.parquet         columns: numbers, or lists of equal length
a folder         a file NAME.npy for each array

numpy and pyarrow are imported late: `plan` of other data needs neither.
"""

from __future__ import annotations

import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from hpc_trainer.config.packages import optional
from hpc_trainer.config.schema.data import ARRAY, DataConfig
from hpc_trainer.config.schema.key import ALWAYS, COUNTS, RULED, SAFE, key
from hpc_trainer.config.schema.task import TargetKind
from hpc_trainer.config.user_files import is_folder, open_given
from hpc_trainer.data.files import check_parts, num_held_out
from hpc_trainer.errors import ConfigError, DataError, HpcTrainerError, valid

_FLOATS, _WHOLE = "f", "iub"
_PER_FILE = ".npz, .parquet or a folder of .npy files"


@dataclass(kw_only=True, slots=True)
class ArraysConfig(DataConfig):
    """Inputs and targets as arrays: a folder of .npy files (memory-mapped), an .npz or a .parquet file."""

    takes_task: ClassVar[bool] = True
    kept_keys: ClassVar[tuple[str, ...]] = ("inputs", "targets", "num_classes")
    is_text: ClassVar[bool | None] = False
    name: str = "arrays"
    _target_: str = "hpc_trainer.datasets.records.arrays.build"
    path: str | None = key(None, ALWAYS, COUNTS, SAFE)
    """Folder with inputs.npy and targets.npy, or file with arrays or columns of these names."""
    inputs: str = key("inputs", ALWAYS, COUNTS)
    """Name of the array or column of inputs, numbers [rows, ...]."""
    targets: str = key("targets", ALWAYS, COUNTS)
    """Name of the array or column of targets [rows, ...]: classes as whole numbers, or numbers."""
    eval_path: str | None = key(None, ALWAYS, COUNTS, SAFE)
    """Folder or file for evaluation, of the same form; null: a part of `path`."""
    eval_fraction: float = key(0.1, RULED, COUNTS, limits="(0, 1)")
    """Share of the rows held out for evaluation, by a fixed shuffle."""
    num_classes: int | None = key(None, ALWAYS, COUNTS, limits="≥ 2")
    """Number of classes; null: the largest target in `path` + 1."""
    input_scale: float = key(1.0, ALWAYS, COUNTS, limits="> 0")
    """Factor on inputs: 0.00392157 maps bytes to 0 to 1."""

    def num_train_samples(self) -> int | None:
        if self.path is None:
            return None
        try:
            num_rows = read_facts(Path(self.path).expanduser(), (self.inputs, self.targets))[0].shape[0] or 0
        except HpcTrainerError:  # `check` reports it
            return None
        return num_rows - num_held_out(num_rows, self.eval_fraction if self.eval_path is None else 0.0)

    def check(self, targets: TargetKind) -> None:
        check_headers(self, targets)

    def model_facts(self) -> dict[str, Any]:
        facts = DataConfig.model_facts(self)
        try:
            shape = read_facts(Path(str(self.path)).expanduser(), (self.inputs, self.targets))[0].shape[1:]
        except HpcTrainerError:
            return facts
        return facts if None in shape else {**facts, "shape": tuple(shape)}

    def preprocessing(self, mean: Any = None, std: Any = None) -> dict[str, Any]:
        from hpc_trainer.training.data.preprocessing import array

        return array(self.input_scale)

    def keys_as(self, kind: str | None, was: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
        return {"input_scale": was.get("input_scale")} if kind == ARRAY else {}


class ArrayFacts(NamedTuple):
    """Facts from the header of an array."""

    kind: str
    """numpy's letter: f, i, u, b; training does not take others."""
    dtype: str
    shape: tuple[int | None, ...]
    """Shape [rows, ...]; None for the length of a list, which is known only after reading."""


def read_facts(path: Path, names: tuple[str, str]) -> tuple[ArrayFacts, ArrayFacts]:
    """Read the facts of the inputs and of the targets.

    Raises:
        ConfigError: the file is of another kind, or has no such array.
        DataError: the file or pyarrow is missing, or the file is damaged.
    """
    try:
        if is_folder(path):
            files: dict[str, Any] = {file.stem: file for file in sorted(path.glob("*.npy"))}
            _check_names(path, names, files)
            return _npy_facts(files[names[0]]), _npy_facts(files[names[1]])
        if path.suffix == ".npz":
            return _npz_facts(path, names)
        if path.suffix == ".parquet":
            return _parquet_facts(path, names)
    except HpcTrainerError:
        raise
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read: {error}. Write it again, or name another file.") from error
    if path.suffix == ".npy":
        raise ConfigError(
            f"data.path={path} is one array. Name the folder that has inputs and targets as .npy files, "
            f"data.path={path.parent} data.inputs={path.stem} data.targets=OTHER."
        )
    raise ConfigError(f"data.path={path} must be {_PER_FILE}; there is no such file. Check the path, on every node.")


def check_headers(data: ArraysConfig, kind: TargetKind) -> None:
    """Check everything that can be checked without reading the arrays.

    Raises:
        ConfigError: a key is wrong, or does not fit the file.
        DataError: a file is missing or damaged.
    """
    if data.path is None:
        raise ConfigError(f"data=arrays needs data.path: {_PER_FILE}.")
    check_parts(data.eval_path, data.eval_fraction, ArraysConfig().eval_fraction)
    names = (data.inputs, data.targets)
    train = Path(data.path).expanduser()
    inputs, targets = read_facts(train, names)
    _check_facts(train, names, inputs, targets, kind)
    num_rows = inputs.shape[0] or 0
    if data.eval_path is None and not 0 < num_held_out(num_rows, data.eval_fraction) < num_rows:
        raise ConfigError(
            f"data.path={train} has {num_rows} rows: with data.eval_fraction={data.eval_fraction:g} a part would be "
            "empty. Add rows, or set data.eval_path to a file of its own."
        )
    if data.eval_path is not None:
        held_out = Path(data.eval_path).expanduser()
        others = read_facts(held_out, names)
        _check_facts(held_out, names, *others, kind)
        for name, here, there in zip(names, (inputs, targets), others, strict=True):
            if here.shape[1:] != there.shape[1:] and None not in (*here.shape, *there.shape):
                raise ConfigError(
                    f"data.eval_path={held_out}: {name} is [rows, {_shown(there.shape)}], and that of "
                    f"data.path={train} is [rows, {_shown(here.shape)}]. Give both the same shape."
                )


def _check_facts(path: Path, names: tuple[str, str], inputs: ArrayFacts, targets: ArrayFacts, kind: TargetKind) -> None:
    for name, facts in zip(names, (inputs, targets), strict=True):
        if facts.kind not in _FLOATS + _WHOLE:
            why = "which only unpickling could read: that runs code" if facts.kind == "O" else "and must be numbers"
            raise ConfigError(f"{path}: {name} has dtype {facts.dtype}, {why}. Save it as numbers of one shape.")
        if not facts.shape or 0 in facts.shape:
            raise ConfigError(f"{path}: {name} has shape {list(facts.shape)}: it holds no sample. Save [rows, ...].")
    if len(inputs.shape) < 2:
        raise ConfigError(
            f"{path}: {names[0]} has shape {list(inputs.shape)}, and must be [rows, ...]. For one number a row save "
            f"it as [{inputs.shape[0]}, 1]."
        )
    if inputs.shape[0] != targets.shape[0]:
        raise ConfigError(
            f"{path}: {names[0]} has {inputs.shape[0]} rows and {names[1]} {targets.shape[0]}; each input needs a "
            "target. Save the same number of both."
        )
    if kind is TargetKind.classes and targets.kind == "f":
        raise ConfigError(
            f"{path}: {names[1]} has dtype {targets.dtype}, and classes are whole numbers. Save them as int64, or use "
            "task=regression."
        )


def _check_names(path: Path, names: tuple[str, str], present: Any) -> None:
    for keyword, name in zip(("inputs", "targets"), names, strict=True):
        if name not in present:
            has = valid(name, present) if present else "It has none."
            raise ConfigError(f"data.{keyword}={name}: {path} has no array of this name. {has}")


def _npy_facts(path: Path) -> ArrayFacts:
    with open_given(path) as file:
        return _header(file)


def _npz_facts(path: Path, names: tuple[str, str]) -> tuple[ArrayFacts, ArrayFacts]:
    with open_given(path) as given, zipfile.ZipFile(given) as file:
        members = {member.removesuffix(".npy"): member for member in file.namelist()}
        _check_names(path, names, members)
        with file.open(members[names[0]]) as inputs, file.open(members[names[1]]) as targets:
            return _header(inputs), _header(targets)


def _header(file: Any) -> ArrayFacts:
    from numpy.lib import format as npy

    version = npy.read_magic(file)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(file)
    return ArrayFacts(dtype.kind, str(dtype), tuple(shape))


def _parquet_facts(path: Path, names: tuple[str, str]) -> tuple[ArrayFacts, ArrayFacts]:
    open_given(path).close()  # pyarrow would wait for the writer of a pipe
    types = optional("pyarrow.types", str(path))
    file = optional("pyarrow.parquet", str(path)).ParquetFile(path)
    schema, num_rows = file.schema_arrow, file.metadata.num_rows
    _check_names(path, names, schema.names)
    inputs, targets = (_column_facts(schema.field(name).type, num_rows, types) for name in names)
    return inputs, targets


def _column_facts(kind: Any, num_rows: int, types: Any) -> ArrayFacts:
    shape: tuple[int | None, ...] = (num_rows,)
    while types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        shape = (*shape, kind.list_size if types.is_fixed_size_list(kind) else None)
        kind = kind.value_type
    for letter, holds in (("f", types.is_floating), ("i", types.is_integer), ("b", types.is_boolean)):
        if holds(kind):
            return ArrayFacts(letter, str(kind), shape)
    return ArrayFacts("U", str(kind), shape)


def _shown(shape: tuple[int | None, ...]) -> str:
    return ", ".join("?" if size is None else str(size) for size in shape[1:])
