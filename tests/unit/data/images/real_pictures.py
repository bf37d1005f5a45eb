"""Photographs that scikit-image and scikit-learn ship, in tiles that share no pixel; a tile's class is its picture."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
from PIL import Image

FEW = ("astronaut", "brick", "coffee", "grass")
ALL = (
    "astronaut", "brick", "camera", "cell", "chelsea", "china", "coffee", "coins", "flower", "grass", "gravel",
    "hubble_deep_field", "ihc", "moon", "motorcycle_left", "retina", "rocket",
)  # fmt: skip
_EVERY = 5
"""Tile (row, column) is held out where row + 2 × column is a multiple: a fifth, spread over the picture."""


def photograph(name: str) -> np.ndarray:
    """RGB [height, width, 3]."""
    for package, folder in (("skimage", "data"), ("sklearn", "datasets/images")):
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        for path in (Path(spec.origin).parent / folder).glob(f"{name}.*"):
            if path.suffix in (".png", ".jpg"):
                return np.asarray(Image.open(path).convert("RGB"))
    raise FileNotFoundError(name)


def write_tiles(root: Path, names: tuple[str, ...], size: int, most: int) -> tuple[int, int]:
    """`root`/train/NAME/ROW-COLUMN.jpg and `root`/eval/...; numbers of both.

    Of each picture at most `most` tiles, drawn from all of it.
    """
    counts = [0, 0]
    for label, name in enumerate(names):
        pixels = photograph(name)
        rows, columns = pixels.shape[0] // size, pixels.shape[1] // size
        order = np.random.default_rng(label).permutation(rows * columns)[:most]
        for row, column in (divmod(int(each), columns) for each in order):
            is_eval = (row + 2 * column) % _EVERY == 0
            folder = root / ("eval" if is_eval else "train") / name
            folder.mkdir(parents=True, exist_ok=True)
            tile = pixels[row * size : (row + 1) * size, column * size : (column + 1) * size]
            Image.fromarray(tile).save(folder / f"{row:03}-{column:03}.jpg", quality=90)
            counts[is_eval] += 1
    return counts[0], counts[1]
