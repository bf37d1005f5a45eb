"""`data=hf_dataset`: its keys, and the facts in the JSON of a folder of Hugging Face's `save_to_disk`. No torch.

dataset_dict.json     the names of splits, each a folder beside it; missing if the folder is one split
dataset_info.json     features: columns and their types
state.json            names of the arrow files
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from hpc_trainer.config.packages import check_installed
from hpc_trainer.config.schema.data import PICTURE, TOKENS, DataConfig
from hpc_trainer.config.schema.key import ALWAYS, COUNTS, RULED, SAFE, key
from hpc_trainer.config.schema.task import TargetKind
from hpc_trainer.config.user_files import is_file, read_given
from hpc_trainer.data.files import check_parts
from hpc_trainer.data.images import keys_of_pictures
from hpc_trainer.errors import ConfigError, DataError, valid

IMAGE, CLASSES, WHOLE, FLOAT, LIST, OTHER = "image", "classes", "whole numbers", "numbers", "lists", "other"
_LISTS = frozenset({"List", "LargeList", "Sequence", "Array2D", "Array3D", "Array4D", "Array5D"})


@dataclass(kw_only=True, slots=True)
class HfDatasetConfig(DataConfig):
    """A folder of Hugging Face's `Dataset.save_to_disk` or `DatasetDict.save_to_disk`, memory-mapped."""

    takes_fed: ClassVar[bool] = True
    takes_task: ClassVar[bool] = True
    kept_keys: ClassVar[tuple[str, ...]] = ("input", "target", "image_size", "num_channels")
    name: str = "hf_dataset"
    _target_: str = "hpc_trainer.datasets.records.hf_dataset.build"
    path: str | None = key(None, ALWAYS, COUNTS, SAFE)
    """Folder that `save_to_disk` made."""
    input: str = key("image", ALWAYS, COUNTS)
    """Column of inputs: images, numbers, lists of numbers, or with seq_len lists of tokens."""
    target: str | None = key(None, ALWAYS, COUNTS)
    """Column of targets; null: label, or with seq_len the token after each token."""
    train_split: str = key("train", ALWAYS, COUNTS)
    """Name of the training split, if the folder has several splits."""
    eval_split: str | None = key(None, ALWAYS, COUNTS)
    """Name of the split for evaluation; null: a part of the training split."""
    eval_fraction: float = key(0.1, RULED, COUNTS, limits="(0, 1)")
    """Share of the training split held out for evaluation, by a fixed shuffle."""
    image_size: int | None = key(None, ALWAYS, COUNTS, limits="≥ 1")
    """Height and width to which images are resized (Pillow, bilinear); null: all images have the size of the first."""
    num_channels: int = key(3, ALWAYS, COUNTS, limits="1 or 3")
    """Channels of images: 1 for grey, 3 for colour."""
    seq_len: int | None = key(None, ALWAYS, COUNTS, limits="≥ 2")
    """Tokens that a sample predicts. Longer lists are cut, shorter ones are padded with targets that do not count."""
    vocab_size: int | None = key(None, ALWAYS, COUNTS, limits="2 to 2,147,483,648")
    """Number of tokens in the vocabulary; goes with seq_len."""

    def vocabulary(self) -> int | None:
        return self.vocab_size

    def check(self, targets: TargetKind) -> None:
        check_hf_folder(self, targets)

    def preprocessing(self, mean: Any = None, std: Any = None) -> dict[str, Any] | None:
        from hpc_trainer.training.data.preprocessing import tokens

        return None if self.seq_len is None else tokens(seq_len=self.seq_len, vocab_size=self.vocab_size)

    def keys_as(self, kind: str | None, was: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
        if kind == TOKENS:
            return {name: was.get(name) for name in ("seq_len", "vocab_size")}
        return keys_of_pictures(was) if kind == PICTURE else {}


class Column(NamedTuple):
    """Column of a data set.

    `kind` is a constant above; `classes` has class names, `inner` the kind of a list's items.
    """

    name: str
    kind: str
    shown: str
    classes: list[str] | None = None
    inner: str | None = None


class HfParts(NamedTuple):
    """Folders of the splits, and the columns."""

    train: Path
    evaluation: Path
    input: Column
    target: Column | None
    """Column of targets; None if the target of each token is the next token."""


def check_hf_folder(data: HfDatasetConfig, kind: TargetKind) -> HfParts:
    """Return the splits and columns that `data` names.

    Raises:
        ConfigError: a package, split or column is missing, or a column is of a kind that cannot be used.
        DataError: the folder is damaged, or was not made by `save_to_disk`.
    """
    if data.path is None:
        raise ConfigError("data=hf_dataset needs data.path, a folder that Dataset.save_to_disk made.")
    path = Path(data.path).expanduser()
    check_installed(f"data=hf_dataset data.path={path}", "datasets")
    if data.eval_split is not None:
        check_parts(data.eval_split, data.eval_fraction, HfDatasetConfig().eval_fraction, key="eval_split")
    train = _split_folder(path, "train_split", data.train_split)
    evaluation = train if data.eval_split is None else _split_folder(path, "eval_split", data.eval_split)
    _check_sizes(data)
    columns = _columns(train)
    if evaluation != train and columns != _columns(evaluation):
        raise ConfigError(
            f"{evaluation} has other columns, types or classes than {train}. Give both the same columns, types and "
            "classes."
        )
    given = _column(columns, "input", data.input, train)
    if data.seq_len is not None:
        if given.kind != LIST or given.inner != WHOLE:
            raise ConfigError(
                f"data.seq_len is for lists of tokens, and column {given.name} of {train} is {given.shown}."
            )
        return HfParts(train, evaluation, given, None)
    if given.kind not in (IMAGE, WHOLE, FLOAT, LIST) or (given.kind == LIST and given.inner not in (WHOLE, FLOAT)):
        raise ConfigError(
            f"data.input={given.name} is {given.shown} in {train}; supported are images, numbers and lists of numbers. "
            "Convert it before save_to_disk (a text: to tokens)."
        )
    if given.kind == IMAGE:
        check_installed(f"the images of data.path={path}", "PIL")
    target = _column(columns, "target", data.target or "label", train)
    _check_target(target, kind, train)
    return HfParts(train, evaluation, given, target)


def _check_sizes(data: HfDatasetConfig) -> None:
    if (data.seq_len is None) != (data.vocab_size is None):
        raise ConfigError("data.seq_len and data.vocab_size go together: set both for tokens, or neither.")
    if data.seq_len is not None and data.target is not None:
        raise ConfigError(
            f"data.target={data.target} has no effect with data.seq_len: each token's target is the next one. Use "
            "data.target=null."
        )


def _check_target(target: Column, kind: TargetKind, folder: Path) -> None:
    fits = {
        TargetKind.classes: target.kind in (CLASSES, WHOLE),
        TargetKind.numbers: FLOAT in (target.kind, target.inner) or WHOLE in (target.kind, target.inner),
        TargetKind.labels: target.kind == LIST and target.inner in (WHOLE, FLOAT),
        TargetKind.any: target.kind in (CLASSES, WHOLE, FLOAT) or target.inner in (WHOLE, FLOAT),
    }[kind]
    if not fits:
        wanted = {"classes": "ClassLabel or whole numbers", "labels": "lists of 0 and 1"}.get(kind.value, "numbers")
        raise ConfigError(
            f"data.target={target.name} is {target.shown} in {folder}, and the task takes {wanted}. Convert the column "
            "before save_to_disk, name another, or choose another task."
        )


def _split_folder(path: Path, key: str, split: str) -> Path:
    if is_file(path / "dataset_dict.json"):
        splits = _json(path / "dataset_dict.json").get("splits", [])
        if split not in splits:
            raise ConfigError(f"data.{key}={split}: {path} has no such split. {valid(split, map(str, splits))}")
        return path / split
    if not is_file(path / "state.json"):
        raise DataError(
            f"{path} must be a folder that Dataset.save_to_disk made, and has no dataset_dict.json and no state.json. "
            "Check the path, on every node."
        )
    if key == "eval_split":
        raise ConfigError(f"data.eval_split={split}: {path} is a single split. Use data.eval_split=null.")
    return path


def _columns(folder: Path) -> dict[str, Column]:
    for name in _files(folder):
        if not is_file(folder / name):
            raise DataError(f"{folder} lists {name}, which is missing. Copy the folder again.")
    features = _json(folder / "dataset_info.json").get("features")
    if not isinstance(features, dict):
        raise DataError(f"{folder / 'dataset_info.json'} names no features. Save the data set again.")
    return {name: _of_feature(name, feature) for name, feature in features.items()}


def _files(folder: Path) -> list[str]:
    files = _json(folder / "state.json").get("_data_files") or []
    return [str(file.get("filename")) for file in files if isinstance(file, dict)]


def _of_feature(name: str, feature: Any) -> Column:
    if isinstance(feature, list) and len(feature) == 1:  # older than 4.0
        feature = {"_type": "List", "feature": feature[0]}
    if not isinstance(feature, dict):
        return Column(name, OTHER, "a structure")
    kind = str(feature.get("_type"))
    if kind == "Image":
        return Column(name, IMAGE, "images")
    if kind == "ClassLabel":
        classes = [str(label) for label in feature.get("names", [])]
        return Column(name, CLASSES, f"ClassLabel of {len(classes)} classes", classes)
    if kind == "Value":
        dtype = str(feature.get("dtype"))
        return Column(name, _of_dtype(dtype), dtype)
    if kind in _LISTS:
        inner: Any = feature
        while isinstance(inner, dict) and inner.get("_type") in _LISTS and "feature" in inner:
            inner = inner["feature"]
        dtype = str(inner.get("dtype")) if isinstance(inner, dict) else "structures"
        return Column(name, LIST, f"{kind} of {dtype}", inner=_of_dtype(dtype))
    return Column(name, OTHER, kind)


def _of_dtype(dtype: str) -> str:
    if dtype.startswith(("int", "uint", "bool")):
        return WHOLE
    return FLOAT if dtype.startswith("float") else OTHER


def _column(columns: dict[str, Column], key: str, name: str, folder: Path) -> Column:
    if name not in columns:
        raise ConfigError(f"data.{key}={name}: {folder} has no such column. {valid(name, columns)}")
    return columns[name]


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_given(path))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}. Save the data set again, or name another.") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} is damaged: it is not a mapping. Save the data set again.")
    return content
