"""`data=image_folder` and `data=image_shards`: a user's own pictures, each with a class."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hpc_trainer.config.schema.data.shipped import DataConfig
from hpc_trainer.config.schema.key import ALWAYS, APART, COUNTS, SAFE, key

EVAL_FOLDERS = ("eval", "val")
"""Names of the folder of held-out pictures beside train; the first one that exists is used."""


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
        """`path` as a folder. `config/data_files/image_files.py` checks first that it is set."""
        return Path(self.path or "").expanduser()

    @property
    def short_side(self) -> int:
        """Pixels of the shorter side before the centre crop: as usual for ImageNet, 256 for a crop of 224."""
        return self.resize or round(self.image_size * 256 / 224)


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
