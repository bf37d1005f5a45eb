"""Pictures, as far as this machine can check them without reading: the data set itself is built on the nodes."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

from hpc_trainer.config.packages import missing
from hpc_trainer.config.schema.data.images import EVAL_FOLDERS, ImagesConfig, ImageShardsConfig
from hpc_trainer.config.user_files import is_file, is_folder, read_given

_INDEX = "index.json"


def image_problems(data: ImagesConfig) -> tuple[str, ...]:
    """Return each problem with the values, and with the folder as it is seen from here."""
    return (*_values(data), *_folders(data))


def num_train_images(data: ImagesConfig) -> int | None:
    """Return the number of training pictures if an index gives it; None otherwise.

    Without an index the folder would have to be listed.
    """
    if not isinstance(data, ImageShardsConfig) or data.eval_fraction is not None:
        return None
    try:
        index = data.folder / "train" / _INDEX
        return _num_samples(str(index), index.stat().st_mtime_ns)
    except (OSError, RuntimeError, ValueError, TypeError, KeyError):
        return None


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
    for key, values in (("mean", data.mean), ("std", data.std)):
        if values is None:
            continue
        if len(values) != data.num_channels:
            yield (
                f"data.{key} has {len(values)} numbers, and must have one for each of data.num_channels="
                f"{data.num_channels}. Use {[0.5] * data.num_channels} or null."
            )
        wrong = next((value for value in values if not math.isfinite(value) or (key == "std" and value <= 0)), None)
        if wrong is not None:
            yield f"data.{key} holds {wrong:g}; it must be finite{', and greater than 0' * (key == 'std')}. Use 0.5."


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
