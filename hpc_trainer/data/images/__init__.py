"""`data=image_folder` and `data=image_shards`: their keys, and what the login node checks without reading an image."""

from __future__ import annotations

import enum
import functools
import json
import math
import os
import socket
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hpc_trainer.config.packages import missing
from hpc_trainer.config.schema.data import PICTURE, DataConfig
from hpc_trainer.config.schema.key import ALWAYS, APART, COUNTS, SAFE, key
from hpc_trainer.config.user_files import is_file, is_folder, read_given
from hpc_trainer.errors import DataError

EVAL_FOLDERS = ("eval", "val")
"""Names of the folder of held-out pictures beside train; the first one that exists is used."""
CLASSES = "classes.json"
"""File with the names of the classes of tar shards."""
_INDEX = "index.json"


class OnBroken(str, enum.Enum):
    """Handling of a picture that cannot be decoded."""

    refuse = "refuse"
    skip = "skip"


@dataclass(kw_only=True, slots=True)
class ImagesConfig(DataConfig):
    """Base class of the sources of pictures; not a choice itself."""

    takes_fed: ClassVar[bool] = True
    is_text: ClassVar[bool | None] = False
    _target_: str = "hpc_trainer.datasets.images.dataset.build"
    path: str | None = key(None, ALWAYS, COUNTS, SAFE)
    """Folder of the pictures, which must exist on every node. Required."""
    eval_fraction: float | None = key(None, ALWAYS, COUNTS, limits="(0, 1)")
    """null: path has the folders train and eval. Otherwise this share is held out, chosen by a hash of each file's
    name."""
    image_size: int = key(224, ALWAYS, COUNTS, limits="≥ 1")
    """Height and width in pixels of the model's input, which is cut from the centre."""
    resize: int | None = key(None, ALWAYS, COUNTS, limits="≥ 1")
    """Pixels of the shorter side before the cut, ≥ image_size; null: image_size × 256 / 224."""
    num_channels: int = key(3, ALWAYS, COUNTS, limits="1 or 3")
    """Number of colour channels; 1 makes pictures grey."""
    mean: list[float] | None = key(None, ALWAYS, COUNTS)
    """Values to subtract, one for each channel, in 0 to 1. null: those in statistics.json in path, or 0.5 without that
    file."""
    std: list[float] | None = key(None, ALWAYS, COUNTS)
    """Values to divide by, one for each channel, > 0. null: those in statistics.json in path, or 0.5 without that
    file."""
    on_broken: OnBroken = key(OnBroken.refuse, ALWAYS, APART, SAFE)
    """refuse: a picture that cannot be decoded ends the run. skip: always the same other picture takes its place."""

    @property
    def folder(self) -> Path:
        """`path` as a folder. `problems` reports first that it is not set."""
        return Path(self.path or "").expanduser()

    @property
    def short_side(self) -> int:
        """Pixels of the shorter side before the centre crop: as usual for ImageNet, 256 for a crop of 224."""
        return self.resize or round(self.image_size * 256 / 224)

    def split_folder(self, split: str) -> Path:
        """Return the folder of a split's pictures: its own folder, or with `eval_fraction` the shared folder.

        Raises:
            DataError: the split's folder does not exist.
        """
        path = self.folder
        if self.eval_fraction is not None:
            return path
        names = ("train",) if split == "train" else EVAL_FOLDERS
        folder = next((path / name for name in names if (path / name).is_dir()), None)
        if folder is None:
            raise DataError(
                f"data.path={self.path} must hold the folders train and eval (data.eval_fraction=null); {names[0]} is "
                "missing on this node. Fix: make it, or hold out a share of all: data.eval_fraction=0.1."
            )
        return folder

    def problems(self) -> Iterator[str]:
        """Yield each problem with the values, and with the folder as it is seen from here."""
        yield from _values(self)
        yield from _folders(self)

    def model_facts(self) -> dict[str, Any]:
        facts = DataConfig.model_facts(self)
        try:
            folder = self.split_folder("train")
            return {**facts, "classes": tuple(read_classes(folder) or class_folders(folder))}
        except DataError:
            return facts

    def preprocessing(self, mean: Any = None, std: Any = None) -> dict[str, Any]:
        from hpc_trainer.training.data.preprocessing import picture

        return picture(
            num_channels=self.num_channels, resize=self.short_side, crop=[self.image_size, self.image_size],
            mean=self.mean if mean is None else mean, std=self.std if std is None else std,
        )  # fmt: skip

    def unknown_facts(self, made: Mapping[str, Any] | None) -> str | None:
        return "mean and std" if made is None or made.get("mean") is None or made.get("std") is None else None

    def keys_as(self, kind: str | None, was: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
        if kind != PICTURE:
            return {}
        keys, num_channels = keys_of_pictures(was), was.get("num_channels")
        if isinstance(was.get("resize"), int) and "image_size" not in given:
            keys["resize"] = was["resize"]
        if "num_channels" not in given or self.num_channels == num_channels:
            keys |= {"mean": was.get("mean"), "std": was.get("std")}
        return keys


@dataclass(kw_only=True, slots=True)
class ImageFolderConfig(ImagesConfig):
    """Pictures (jpg, jpeg, png, webp) in a folder for each class; classes are numbered by their folders' names."""

    name: str = "image_folder"


@dataclass(kw_only=True, slots=True)
class ImageShardsConfig(ImagesConfig):
    """Pictures in tar shards of WebDataset's layout, with the index that `hpc-trainer data index` writes."""

    name: str = "image_shards"
    stage_dir: str | None = key(None, ALWAYS, APART, SAFE)
    """Folder on each node's own disk, such as $TMPDIR, to which shards are copied once and from which they are read.
    null: they are read from path itself."""

    def num_train_samples(self) -> int | None:
        """Return the number in the index of `train`; None if both parts share a folder, which would have to be read."""
        if self.eval_fraction is not None:
            return None
        try:
            index = self.folder / "train" / _INDEX
            return _num_samples(str(index), index.stat().st_mtime_ns)
        except (OSError, RuntimeError, ValueError, TypeError, KeyError):
            return None


def keys_of_pictures(was: Mapping[str, Any]) -> dict[str, Any]:
    """Return num_channels and, if images are square, image_size of the preprocessing `was`."""
    resize, crop = was.get("resize"), was.get("crop")
    keys: dict[str, Any] = {"num_channels": was.get("num_channels")}
    size = crop if crop is not None else resize
    return {**keys, "image_size": size[0]} if isinstance(size, list) and size[0] == size[1] else keys


def _values(data: ImagesConfig) -> Iterator[str]:
    problem = missing(f"data={data.name}", "PIL")
    if problem is not None:
        yield problem
    if data.resize is not None and data.resize < data.image_size:
        yield (
            f"data.resize={data.resize} is less than data.image_size={data.image_size}, which is cut out of it. "
            f"Use {data.image_size}."
        )
    if isinstance(data, ImageShardsConfig) and data.stage_dir is not None and not data.stage_dir.startswith(("/", "$")):
        yield (
            f"data.stage_dir={data.stage_dir} must be a folder on each node, written out (/scratch/local) or by a "
            "variable that is set there ($TMPDIR). Use '$TMPDIR' or null."
        )
    for name, values in (("mean", data.mean), ("std", data.std)):
        if values is None:
            continue
        if len(values) != data.num_channels:
            yield (
                f"data.{name} has {len(values)} numbers, and must have one for each of data.num_channels="
                f"{data.num_channels}. Use {[0.5] * data.num_channels} or null."
            )
        wrong = next((value for value in values if not math.isfinite(value) or (name == "std" and value <= 0)), None)
        if wrong is not None:
            yield f"data.{name} holds {wrong:g}; it must be finite{', and greater than 0' * (name == 'std')}. Use 0.5."


def _folders(data: ImagesConfig) -> Iterator[str]:
    if data.path is None:
        yield f"data={data.name} needs data.path, the folder of the pictures, as data.path=/data/flowers."
        return
    path = data.folder
    if not is_folder(path):
        yield f"data.path={data.path} must be a readable folder; there is none."
        return
    folders = [path]
    if data.eval_fraction is None:
        held_out = next((path / name for name in EVAL_FOLDERS if is_folder(path / name)), None)
        if held_out is None or not is_folder(path / "train"):
            yield (
                f"data.path={data.path} must hold the folders train and eval (data.eval_fraction=null); "
                f"{'train' if held_out else 'eval'} is not there. Make it, or hold out a share of all pictures: "
                "data.eval_fraction=0.1."
            )
            return
        folders = [path / "train", held_out]
    yield from _shards(folders) if isinstance(data, ImageShardsConfig) else _classes(folders[0], data)


def _shards(folders: list[Path]) -> Iterator[str]:
    for folder in folders:
        if not is_file(folder / _INDEX):
            yield (
                f"{folder} must hold tar shards and their index; {_INDEX} is not there. Write it once with: "
                f"hpc-trainer data index {folder}"
            )


def _classes(folder: Path, data: ImagesConfig) -> Iterator[str]:
    try:
        with os.scandir(folder) as entries:
            count = sum(entry.is_dir() and not entry.name.startswith(".") for entry in entries)
    except OSError as error:
        yield f"data.path: {folder} must be a readable folder: {error.strerror}. Use another."
        return
    if count < 2:
        way = "" if data.eval_fraction is None else " With train and eval in it, use data.eval_fraction=null."
        yield f"{folder} must hold a folder for each class, two or more; it has {count}. Use another data.path.{way}"


@functools.lru_cache(maxsize=64)
def _num_samples(index: str, changed_ns: int) -> int:
    del changed_ns  # part of the cache key: a rewritten file is read again
    return int(json.loads(read_given(index))["num_samples"])


def class_folders(folder: Path) -> list[str]:
    """Return the names of the folders in `folder`, sorted.

    Raises:
        DataError: the folder cannot be read, or has fewer than two folders.
    """
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise DataError(
            f"data.path: {folder} must be a folder that this user can read on every node: {error.strerror} (on "
            f"{socket.gethostname()}). Fix: check the path and its permissions."
        ) from error
    if len(names) < 2:
        raise DataError(
            f"{folder} must hold a folder for each class, and two classes or more; it has {len(names)}. Fix: check "
            "data.path. Where it holds the folders train and eval, leave out data.eval_fraction."
        )
    return names


def read_classes(folder: Path) -> list[str] | None:
    """Return the names in `classes.json`; None if the file is missing.

    Raises:
        DataError: the file is not a list of distinct names.
    """
    path = folder / CLASSES
    try:
        names = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}. Fix: it must be a JSON list of class names.") from error
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise DataError(f"{path} must be a JSON list of class names; it is {json.dumps(names)[:60]}.")
    if len(set(names)) != len(names):
        raise DataError(f"{path} names a class twice. Fix: give each class one line of its own.")
    return names
