"""Packing of pictures into one tar shard, each with its label, and the shard's record for the index."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_trainer.config.data_files.given import LARGEST_PICTURE, naming, read_given
from hpc_trainer.datasets.images.pictures import FORMATS as PILLOW
from hpc_trainer.datasets.images.pictures import decode
from hpc_trainer.errors import BrokenPictureError
from hpc_trainer.operate.prepare.job import TRAIN, commit, temporary_of, write_record
from hpc_trainer.operate.prepare.pool import Piece, Tell

FORMATS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP"}
CHANNELS, LEVELS = 3, 256
_FORMATS_READ = (*PILLOW, "BMP", "GIF", "TIFF", "PPM")
_TOLD_EVERY = 32
# Errors of one file, not of the file system.
_OF_THE_FILE = frozenset({errno.EACCES, errno.EPERM, errno.EINVAL, errno.EFBIG, errno.ENXIO})


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageMaker:
    """Maker of shards. `folder` is the prepared folder; `source` is the folder of the pictures."""

    folder: str
    source: str
    size: int
    format: str
    quality: int

    def make(self, piece: Piece, tell: Tell) -> None:
        """Write one shard and its record, which lists the pictures that cannot be read."""
        part, _, number = piece.name.partition("-")
        file = f"{part}/shard-{number}.tar"
        path = Path(self.folder, file)
        temporary = temporary_of(path)
        rows: list[tuple[int, int, int]] = []
        broken: list[tuple[str, str]] = []
        levels = np.zeros(CHANNELS * LEVELS, dtype=np.int64)
        with naming(temporary), temporary.open("wb") as out:
            hashed = _Hashed(out)
            tar = tarfile.open(fileobj=hashed, mode="w", format=tarfile.USTAR_FORMAT)  # type: ignore[call-overload]  # noqa: SIM115
            for index, (name, label) in enumerate(piece.items):
                tar.members.clear()  # otherwise the tar object keeps all members  # type: ignore[attr-defined]
                try:
                    data, histogram = self._pack(name)
                except BrokenPictureError as error:
                    broken.append((name, str(error)))
                else:
                    key = _key(name)
                    _add(tar, f"{key}.{self.format}", data)
                    rows.append((tar.offset - _padded(len(data)), len(data), label))
                    _add(tar, f"{key}.cls", str(label).encode())
                    if part == TRAIN:
                        levels += histogram
                if index % _TOLD_EVERY == _TOLD_EVERY - 1:
                    tell(_TOLD_EVERY)
            tar.close()
            out.flush()
            os.fsync(out.fileno())
        tell(len(piece.items) % _TOLD_EVERY)
        if rows:
            commit(temporary, path)
        else:
            temporary.unlink()
        record = {
            "files": {file: hashed.size} if rows else {}, "sha256": hashed.digest.hexdigest(), "rows": rows,
            "broken": broken, "levels": levels.tolist(),
        }  # fmt: skip
        write_record(Path(self.folder), piece.name, record)

    def size_of(self, name: str) -> int:
        """Return the bytes of one packed picture; 0 for a broken one."""
        try:
            return len(self._pack(name)[0])
        except BrokenPictureError:
            return 0

    def _pack(self, name: str) -> tuple[bytes, NDArray[np.int64]]:
        """Return a picture's bytes in the shard and its histogram [3 * 256], the levels of each channel in turn."""
        from PIL import Image

        path = Path(self.source, name)
        try:
            data = read_given(path, LARGEST_PICTURE)
        except OSError as error:
            if error.errno not in _OF_THE_FILE and not path.is_symlink():
                raise  # an error of the file system
            raise BrokenPictureError(f"it cannot be read: {error.strerror}") from error
        # Decoded at twice the final size: Lanczos then gives nearly the result of the full picture.
        image: Any = decode(data, "it", CHANNELS, least=2 * self.size, formats=_FORMATS_READ)
        is_plain = image.format == FORMATS[self.format]  # a converted or turned picture has no format
        if (shorter := min(image.size)) > self.size:
            scale = self.size / shorter
            image.thumbnail(tuple(round(side * scale) for side in image.size), Image.Resampling.LANCZOS)
            is_plain = False
        histogram = np.array(image.histogram(), dtype=np.int64)
        if is_plain:
            return data, histogram  # a picture that needs no change is copied without loss
        image.info = {}  # removes profiles and the like, which some formats would keep
        out = io.BytesIO()
        image.save(out, FORMATS[self.format], **({} if self.format == "png" else {"quality": self.quality}))
        return out.getvalue(), histogram


def _key(name: str) -> str:
    """Return a sample's unique key in a shard: it shows the file's name, and has no dot, where readers would cut."""
    label, _, rest = name.rpartition("/")
    plain = [re.sub(r"[^A-Za-z0-9_-]+", "_", text) for text in (label, os.path.splitext(rest)[0])]  # noqa: PTH122
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:12]
    return f"{plain[0][:24]}/{plain[1][:40]}-{digest}"


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)  # without owner and time, so that the same input gives the same bytes
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def _padded(size: int) -> int:
    return -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


class _Hashed:
    """File written in order, with its SHA-256."""

    def __init__(self, file: Any) -> None:
        self._file, self.digest, self.size = file, hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        self.size += len(data)
        return self._file.write(data)  # type: ignore[no-any-return]

    def tell(self) -> int:
        return self.size
