"""`data=image_folder` and `data=image_shards`: pictures with a class each, from files of a person's own."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hpc_trainer.config.schema.data.shipped import DataConfig
from hpc_trainer.config.schema.key import ALWAYS, APART, COUNTS, SAFE, key

EVAL_FOLDERS = ("eval", "val")
"""Names of the folder of held-out pictures beside train; the first that is there counts."""


class OnBroken(str, enum.Enum):
    """What becomes of a picture that cannot be decoded."""

    refuse = "refuse"
    skip = "skip"


@dataclass(kw_only=True, slots=True)
class ImagesConfig(DataConfig):
    """What sources of pictures have in common. Not chosen itself."""

    takes_fed: ClassVar[bool] = True
    is_text: ClassVar[bool | None] = False
    _target_: str = "hpc_trainer.datasets.images.dataset.build"
    path: str | None = key(None, ALWAYS, COUNTS, SAFE)
    """The folder, which must be there on every node; it has to be set."""
    eval_fraction: float | None = key(None, ALWAYS, COUNTS, limits="(0, 1)")
    """null: path has the folders train and eval. Else this share is held out, chosen by a hash of each file's name."""
    image_size: int = key(224, ALWAYS, COUNTS, limits="≥ 1")
    """Height and width in pixels of what the model is given, cut from the centre."""
    resize: int | None = key(None, ALWAYS, COUNTS, limits="≥ 1")
    """Pixels of the shorter side before that is cut out, ≥ image_size; null: image_size × 256 / 224."""
    num_channels: int = key(3, ALWAYS, COUNTS, limits="1 or 3")
    """Colour channels: 1 makes pictures grey."""
    mean: list[float] | None = key(None, ALWAYS, COUNTS)
    """Of each channel, in 0 to 1; it is subtracted. null: that of statistics.json in path, without one 0.5."""
    std: list[float] | None = key(None, ALWAYS, COUNTS)
    """Of each channel, > 0; pixels are divided by it. null: that of statistics.json in path, without one 0.5."""
    on_broken: OnBroken = key(OnBroken.refuse, ALWAYS, APART, SAFE)
    """A picture that cannot be decoded ends the run (refuse), or another one always stands in for it (skip)."""

    @property
    def folder(self) -> Path:
        """`path`; that it is set is checked before anything else (`config/data_files/image_files.py`)."""
        return Path(self.path or "").expanduser()


@dataclass(kw_only=True, slots=True)
class ImageFolderConfig(ImagesConfig):
    """Pictures (jpg, jpeg, png, webp) in a folder for each class; classes are numbered by their folders' names."""

    name: str = "image_folder"


@dataclass(kw_only=True, slots=True)
class ImageShardsConfig(ImagesConfig):
    """Pictures in tar shards of WebDataset's layout, with the index that `hpc-trainer data index` writes."""

    name: str = "image_shards"
    stage_dir: str | None = key(None, ALWAYS, APART, SAFE)
    """A folder on each node's own disk, as $TMPDIR, to which shards are copied once and read from; null: path itself
    is read."""
