"""Small raw data, and what a prepared folder holds."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

TIMED = ("prepare.json",)  # it has the time at which the first call began


def picture(seed: int, size: tuple[int, int] = (24, 32), mode: str = "RGB") -> Any:
    """A picture of noise; `size` is (width, height)."""
    channels = len(Image.new(mode, (1, 1)).getbands())
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], channels), dtype=np.uint8)
    return (
        Image.fromarray(pixels[..., 0] if channels == 1 else pixels, mode=None)
        if mode != "CMYK"
        else Image.merge("CMYK", [Image.fromarray(pixels[..., index]) for index in range(4)])
    )


def raw_pictures(folder: Path, *, num: int = 30, classes: tuple[str, ...] = ("cat", "dog")) -> Path:
    """`num` jpg files, in turn of each class."""
    for index in range(num):
        path = folder / classes[index % len(classes)] / f"{index:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(index).save(path)
    return folder


def content(folder: Path) -> dict[str, str]:
    """File -> SHA-256, of all but what has times."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in TIMED)
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def samples(folder: Path) -> list[tuple[str, Any, int]]:
    """(key, picture, label) of all shards of a part, as any reader of tars finds them."""
    found = []
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            members = {info.name: tar.extractfile(info).read() for info in tar.getmembers()}  # type: ignore[union-attr]
        names = list(members)
        for name, label in zip(names[::2], names[1::2], strict=True):
            assert label == f"{name.rpartition('.')[0]}.cls"
            image = Image.open(io.BytesIO(members[name]))
            found.append((name, image, int(members[label])))
    return found
