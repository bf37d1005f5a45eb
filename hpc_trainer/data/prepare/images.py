"""`data prepare images`: pictures in a folder for each class become resized pictures in tar shards.

Each shard keeps a picture with its label and has an index. The pictures are split in two, with their statistics.
"""

from __future__ import annotations

import errno
import hashlib
import io
import math
import os
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_trainer.config.packages import check_installed
from hpc_trainer.config.user_files import LARGEST_PICTURE, naming, read_given
from hpc_trainer.data.images import CLASSES, EVAL_FOLDERS
from hpc_trainer.data.images.index import (
    ABOUT as INDEX,
)
from hpc_trainer.data.images.index import (
    ROW,
    IndexedShard,
    Shard,
    missing_shards,
    read_index,
    write_index,
)
from hpc_trainer.data.images.pictures import EXTENSIONS, decode
from hpc_trainer.data.images.pictures import FORMATS as PILLOW
from hpc_trainer.data.prepare.job import (
    EVAL,
    TRAIN,
    InputFile,
    Inputs,
    Job,
    Prepared,
    Settings,
    absolute,
    check_apart,
    check_fraction,
    check_parts,
    commit,
    make_missing,
    part_of,
    remove_temporaries,
    shuffled,
    tell_broken,
    temporary_of,
    write_record,
)
from hpc_trainer.data.prepare.pool import Piece, Tell
from hpc_trainer.errors import BrokenPictureError, ConfigError, DataError
from hpc_trainer.record.files import write_json

FORMATS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP"}
CHANNELS, LEVELS = 3, 256
_FORMATS_READ = (*PILLOW, "BMP", "GIF", "TIFF", "PPM")
_REPORT_EVERY = 32
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
                if index % _REPORT_EVERY == _REPORT_EVERY - 1:
                    tell(_REPORT_EVERY)
            tar.close()
            out.flush()
            os.fsync(out.fileno())
        tell(len(piece.items) % _REPORT_EVERY)
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
    """Return a sample's unique key in a shard: the file's name without dots, at which readers would cut."""
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


STATISTICS = "statistics.json"
_READ = (*(f".{extension}" for extension in EXTENSIONS), ".bmp", ".gif", ".tif", ".tiff", ".ppm")
_QUALITY = 90
_MIB = 1 << 20
# Small sets get smaller shards, so that some 32 cores have work; shards below 4 MiB would be too many small files.
_FEWEST_SHARDS, _SMALLEST_MIB = 32, 4
_SAMPLED = 32  # pictures that are packed to estimate their size


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions:
    """Options of the preparation. `size`: largest shorter side in pixels. `quality`: for jpg and webp; None: 90."""

    size: int = 256
    format: str = "jpg"
    quality: int | None = None
    eval_fraction: float = 0.1
    shard_mib: int = 128


def prepare_images(source: Path, folder: Path, options: ImageOptions, settings: Settings, tell: Any) -> Prepared:
    """Make the missing pieces; once none is missing, write the index.

    Args:
        source: the folder with a folder of pictures for each class.
        folder: the prepared folder.
        options: the options.
        settings: how to carry out the call.
        tell: called with (done, total) pictures from time to time.

    Raises:
        ConfigError: an option is wrong, or an option or the input differs from the folder's first call.
        RunStateError: pictures are broken, and `settings` does not say to skip them.
    """
    _check(options)
    source, folder = absolute(source), absolute(folder)
    check_apart([source], folder)
    classes, listed, has_parts = _listing(source)
    job = Job(
        folder=folder,
        kind="images",
        options={
            "source": str(source), "size": options.size, "format": options.format, "quality": _quality(options),
            "eval_fraction": options.eval_fraction, "shard_mib": options.shard_mib,
        },
        inputs=Inputs(files=tuple(file for file, _ in listed)),
    )  # fmt: skip
    labels = {file.name: label for file, label in listed}
    parts = _parts(labels, options, has_parts)
    maker = ImageMaker(
        folder=str(job.folder), source=str(source), size=options.size, format=options.format, quality=_quality(options)
    )
    plan = job.begin(lambda: {"per_shard": _per_shard(maker, parts, options)}, fresh=settings.fresh)
    pieces = list(_pieces(parts, labels, int(plan["per_shard"])))
    made = make_missing(job, maker, pieces, settings, tell)
    records = job.records(pieces)
    if records is None:
        return job.unfinished(pieces, made)
    broken = [(str(name), str(cause)) for record in records for name, cause in record["broken"]]
    _finish(job, pieces, records, broken, classes, options, settings)
    remove_temporaries(job.folder, settings)
    return Prepared(
        folder=str(job.folder), is_whole=True, num_pieces=len(pieces), num_made=made, num_missing=0,
        counts={part: _counts(pieces, records, part) for part in (TRAIN, EVAL)}, num_broken=len(broken),
        overrides=_training_overrides(job.folder, options.size),
    )  # fmt: skip


def _training_overrides(folder: Path, size: int) -> tuple[str, ...]:
    """Return the overrides that train on the folder; `data.resize` crops pictures to 7/8 of their shorter side."""
    cut = round(size * 224 / 256)
    return ("data=image_shards", f"data.path={folder}", *([] if cut == 224 else [f"data.image_size={cut}"]))


def _check(options: ImageOptions) -> None:
    if options.format not in FORMATS:
        raise ConfigError(f"--format={options.format}: use {', '.join(FORMATS)}.")
    if options.quality is not None and options.format == "png":
        raise ConfigError(f"--quality={options.quality} has no effect with --format png. Leave it out.")
    for name, value, low, high in (
        ("size", options.size, 8, 8192), ("quality", _quality(options), 1, 100),
        ("shard-mib", options.shard_mib, 1, 4096),
    ):  # fmt: skip
        if not low <= value <= high:
            raise ConfigError(f"--{name}={value} must be {low} to {high}. Use {min(max(value, low), high)}.")
    check_fraction(options.eval_fraction)
    check_installed("data prepare images", "PIL")


def _quality(options: ImageOptions) -> int:
    return _QUALITY if options.quality is None else options.quality


# --- the input ---


def _listing(source: Path) -> tuple[list[str], list[tuple[InputFile, int]], bool]:
    """Return the sorted classes, all pictures with their class index, and True if the source is split already."""
    if not source.is_dir():
        raise ConfigError(f"{source} must be a folder with a folder of pictures for each class; there is none.")
    tops = _folders(source)
    own = next((name for name in EVAL_FOLDERS if name in tops), None)
    is_split = TRAIN in tops and own is not None
    roots = {name: source / name for name in (TRAIN, str(own))} if is_split else {"": source}
    classes = sorted({name for root in roots.values() for name in _folders(root)})
    numbers = {name: label for label, name in enumerate(classes)}
    pictures = [
        (file, numbers[label])
        for top, root in roots.items()
        for label in _folders(root)
        for file in _pictures(root / label, f"{top}/{label}" if top else label)
    ]
    empty = sorted(set(classes) - {classes[label] for _, label in pictures})
    if len(classes) == 1:
        raise ConfigError(f"{source} has one folder, {classes[0]}, and must have one for each of two classes or more.")
    if not classes or len(empty) == len(classes):
        raise ConfigError(
            f"{source} must hold a folder for each class, with pictures in it ({', '.join(_READ)}); "
            + ("it has no folder." if not classes else "its folders have none.")
        )
    if empty:
        raise ConfigError(
            f"{source / empty[0]} has no picture, and each folder is a class ({', '.join(_READ)} are read). Put "
            "pictures into it, or remove it."
        )
    pictures.sort(key=lambda pair: pair[0].name)
    return classes, pictures, is_split


def _folders(root: Path) -> list[str]:
    with os.scandir(root) as entries:
        return sorted(entry.name for entry in entries if _is_folder(entry) and not entry.name.startswith("."))


def _pictures(folder: Path, name: str, above: tuple[tuple[int, int], ...] = ()) -> Iterator[InputFile]:
    """Yield the pictures of one class, also from the folders below its own.

    A link to a folder that contains the link is skipped: it holds no more pictures.

    Args:
        folder: the folder.
        name: its name in the names of the pictures.
        above: device and inode of the folders above `folder`.
    """
    info = folder.stat()
    if (here := (info.st_dev, info.st_ino)) in above:
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if _is_folder(entry):
                yield from _pictures(folder / entry.name, f"{name}/{entry.name}", (*above, here))
            elif os.path.splitext(entry.name)[1].lower() in _READ:  # noqa: PTH122  (a Path takes ten times as long)
                info = _attributes(entry)
                yield InputFile(
                    name=f"{name}/{entry.name}", path=entry.path, size=info.st_size, mtime_ns=info.st_mtime_ns
                )


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _attributes(entry: os.DirEntry[str]) -> os.stat_result:
    """Return the attributes of an entry, or of the link itself if its target is missing: such a picture is broken."""
    try:
        return entry.stat()
    except OSError:
        return entry.stat(follow_symlinks=False)


# --- pieces ---


def _parts(labels: Mapping[str, int], options: ImageOptions, has_parts: bool) -> dict[str, list[str]]:
    """Return the names of each part in the order of packing."""
    parts: dict[str, list[str]] = {TRAIN: [], EVAL: []}
    for name in shuffled(labels):
        is_train = name.startswith(f"{TRAIN}/")
        given = TRAIN if is_train else EVAL
        parts[given if has_parts else part_of(name, options.eval_fraction)].append(name)
    check_parts({part: len(names) for part, names in parts.items()}, "pictures", options.eval_fraction)
    return parts


def _per_shard(maker: ImageMaker, parts: Mapping[str, Sequence[str]], options: ImageOptions) -> int:
    """Return the number of pictures per shard, estimated from the packed size of a few pictures."""
    names = [name for part in parts.values() for name in part]
    sizes = [size for size in map(maker.size_of, names[:: math.ceil(len(names) / _SAMPLED)]) if size]
    mean = sum(sizes) / len(sizes) if sizes else _MIB
    wanted = min(options.shard_mib * _MIB, max(_SMALLEST_MIB * _MIB, mean * len(names) / _FEWEST_SHARDS))
    return max(1, round(wanted / mean))


def _pieces(parts: Mapping[str, Sequence[str]], labels: Mapping[str, int], per_shard: int) -> Iterator[Piece]:
    """Yield pieces of equal length, so that no shard is nearly empty."""
    for part, names in parts.items():
        number = math.ceil(len(names) / per_shard)
        for index in range(number):
            mine = names[index * len(names) // number : (index + 1) * len(names) // number]
            yield Piece(name=f"{part}-{index:06d}", items=[[name, labels[name]] for name in mine], amount=len(mine))


# --- the end ---


def _finish(
    job: Job, pieces: Sequence[Piece], records: Sequence[Mapping[str, Any]], broken: Sequence[tuple[str, str]],
    classes: list[str], options: ImageOptions, settings: Settings,
) -> None:  # fmt: skip
    """Write the statistics, the classes and, last, the index; do nothing if the index exists."""
    tell_broken(job.folder, broken, len(job.inputs.files), "pictures", settings)
    counts = {part: _counts(pieces, records, part)["samples"] for part in (TRAIN, EVAL)}
    check_parts(counts, "pictures that can be read", options.eval_fraction)
    if all(_is_indexed(job.folder / part) for part in (TRAIN, EVAL)):
        return
    levels = np.sum([record["levels"] for record in records], axis=0)
    write_json(job.folder / STATISTICS, _statistics(levels, counts[TRAIN]))
    for folder in (job.folder, job.folder / TRAIN, job.folder / EVAL):
        write_json(folder / CLASSES, classes)
    for part in (EVAL, TRAIN):
        shards = [
            _indexed(record) for piece, record in zip(pieces, records, strict=True)
            if piece.name.startswith(f"{part}-") and record["files"]
        ]  # fmt: skip
        write_index(job.folder / part, shards, len(classes))


def _is_indexed(folder: Path) -> bool:
    try:
        return (folder / INDEX).exists() and not list(missing_shards(read_index(folder)))
    except DataError:
        return False


def _indexed(record: Mapping[str, Any]) -> IndexedShard:
    ((file, size),) = record["files"].items()
    rows = np.array([(0, *row) for row in record["rows"]], dtype=ROW)
    shard = Shard(name=Path(file).name, size=size, sha256=record["sha256"], num_samples=len(rows))
    return IndexedShard(shard=shard, rows=rows)


def _counts(pieces: Sequence[Piece], records: Sequence[Mapping[str, Any]], part: str) -> dict[str, int]:
    mine = [record for piece, record in zip(pieces, records, strict=True) if piece.name.startswith(f"{part}-")]
    return {
        "samples": sum(len(record["rows"]) for record in mine),
        "shards": sum(len(record["files"]) for record in mine),
        "bytes": sum(size for record in mine for size in record["files"].values()),
    }


def _statistics(levels: NDArray[np.int64], num_samples: int) -> dict[str, Any]:
    """Return mean and std of each channel over all pixels of the training pictures, on the scale 0 to 1."""
    table = levels.reshape(CHANNELS, LEVELS).astype(np.float64)
    values = np.arange(LEVELS) / (LEVELS - 1)
    pixels = table.sum(axis=1)
    mean = table @ values / pixels
    std = np.sqrt(np.maximum(table @ values**2 / pixels - mean**2, 0.0))
    return {"mean": mean.tolist(), "std": std.tolist(), "count": num_samples, "num_pixels": int(pixels[0])}
