"""Pictures for tests: folders of classes, and tar shards of the same."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("ant", "bee", "cat")
EXTENSIONS = ("jpg", "png", "webp", "jpeg")


def pixels(label: int, number: int, size: tuple[int, int] = (20, 24), channels: int = 3) -> np.ndarray:
    """Noise that is brightest in the channel of the class; the same for the same arguments."""
    random = np.random.default_rng([label, number])
    found = random.integers(0, 100, (*size, channels), dtype=np.uint8)
    found[..., label % channels] += 120
    return found


def encoded(array: np.ndarray, extension: str = "png", **options: object) -> bytes:
    file = io.BytesIO()
    kind = {"jpg": "JPEG", "jpeg": "JPEG"}.get(extension, extension.upper())
    Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array).save(file, kind, **options)
    return file.getvalue()


def picture(label: int, number: int, extension: str = "png") -> bytes:
    return encoded(pixels(label, number), extension)


def make_folder(root: Path, **counts: int) -> Path:
    """`root`/SPLIT/CLASS/NUMBER.EXTENSION, `counts` pictures of a class by split; split `here` is root itself."""
    for split, count in counts.items():
        for label, name in enumerate(CLASSES):
            folder = (root if split == "here" else root / split) / name
            folder.mkdir(parents=True)
            for number in range(count):
                extension = EXTENSIONS[number % len(EXTENSIONS)]
                data = picture(label, number + 100 * (split == "eval"), extension)
                (folder / f"{number:03}.{extension}").write_bytes(data)
    return root


def make_shards(folder: Path, samples: list[tuple[str, bytes, int]], per_shard: int = 4) -> Path:
    """Tars of (file name, bytes, label) in `folder`, without an index."""
    folder.mkdir(parents=True, exist_ok=True)
    for start in range(0, len(samples), per_shard):
        with tarfile.open(folder / f"shard-{start // per_shard:06}.tar", "w") as tar:
            for name, data, label in samples[start : start + per_shard]:
                for member, content in ((name, data), (f"{name.rpartition('.')[0]}.cls", str(label).encode())):
                    info = tarfile.TarInfo(member)
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    return folder


def samples(count: int, first: int = 0) -> list[tuple[str, bytes, int]]:
    """`count` samples for `make_shards`, of the classes in turn."""
    found = []
    for number in range(first, first + count):
        extension = EXTENSIONS[number % len(EXTENSIONS)]
        label = number % len(CLASSES)
        found.append((f"{number:06}.{extension}", picture(label, number, extension), label))
    return found
